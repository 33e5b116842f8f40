"""A dataset, and what turns it into tokens as far as that is known: what ``tangram data check`` and ``show`` look at."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from tangram.config.data import BasicParameters, DatasetAttr, PreprocessParameters
from tangram.config.parsing import Section, merge, parse_section, read_mapping
from tangram.data.build import encoder_of
from tangram.data.dataset import ConversationDataset
from tangram.data.encode import SampleEncoder
from tangram.errors import ConfigError

if TYPE_CHECKING:
    from tangram.config.model import ModelConfig
    from tangram.families.base import Family

NO_CUTOFF = sys.maxsize


class SubjectOptions(Section):
    """Where things lie; what is left out comes from ``config``."""

    dataset: str | None = None
    """Path, or several separated by commas."""
    config: str | None = None
    """A run file or a data.json."""
    dataset_dir: str | None = None
    """None: ``config``'s, or without one the folder of the first file."""
    tokenizer: str | None = None
    """Hugging Face folder: tokenizer, image processor and config.json."""
    template: str | None = None
    """None: ``config``'s, or the family's."""
    cutoff: int | None = Field(default=None, ge=1)
    family: str | None = None
    """What the folder's config.json is read as; None: what its ``model_type`` says."""


@dataclass(frozen=True)
class Encoding:
    """How samples of the dataset become tokens."""

    encoder: SampleEncoder
    family: Family
    model: ModelConfig

    @property
    def cutoff(self) -> int | None:
        """Longest sample, tokens; None: there is no limit."""
        return None if self.encoder.cutoff == NO_CUTOFF else self.encoder.cutoff


@dataclass(frozen=True)
class Subject:
    """What is looked at."""

    dataset: ConversationDataset
    encoding: Encoding | None
    """None: no tokenizer was given."""


def build_subject(options: SubjectOptions, needs_pixels: bool) -> Subject:
    """Open the dataset and what encodes it.

    Raises:
        ConfigError, DataError: as the parts, and where neither ``dataset`` nor ``config`` is given.
    """
    source = _read_config(options.config) if options.config else _Source({}, {}, None, None, None)
    if options.dataset is None and "dataset" not in source.basic:
        raise ConfigError("give the dataset's path, or --config with a run file or data.json that names it")
    given = {"dataset": options.dataset, "dataset_dir": options.dataset_dir, "template": options.template}
    if options.dataset is not None and options.dataset_dir is None and options.config is None:
        first = Path(options.dataset.split(",")[0].strip())
        given["dataset_dir"] = str(first if first.is_dir() else first.parent)
    # Every sample is looked at, those that validation sets aside too.
    whole: dict[str, Any] = {"streaming": False, "val_rate": None}
    if options.dataset is not None:
        whole |= {"mix_strategy": "concat", "interleave_probs": None}  # The file's shares are those of its own datasets.
    basic = parse_section(BasicParameters, merge(source.basic, {key: value for key, value in given.items() if value is not None} | whole), "data")
    dataset = ConversationDataset.from_config(basic, source.attr or DatasetAttr(), "train", 0)
    folder = options.tokenizer or source.preprocess.get("model_name_or_path")
    if folder is None:
        return Subject(dataset, None)
    preprocess = parse_section(PreprocessParameters, {**source.preprocess, "model_name_or_path": folder}, "data")
    limits = [limit for limit in (source.seq_length, basic.cutoff_len) if limit is not None]
    cutoff = options.cutoff or min(limits, default=NO_CUTOFF)
    return Subject(dataset, _encoding(basic, preprocess, source.model, options.family, cutoff, needs_pixels))


def _encoding(
    basic: BasicParameters, preprocess: PreprocessParameters, model: ModelConfig | None, family_name: str | None, cutoff: int, needs_pixels: bool
) -> Encoding:
    from tangram.config.sources import read_hf_config
    from tangram.families import get_family

    if model is None or family_name is not None:
        hf = read_hf_config(preprocess.model_name_or_path)
        family = get_family(family_name or hf["model_type"])
        model = family.from_hf_config(hf)
    else:
        family = get_family(model.model_id)
    encoder = encoder_of(basic, preprocess, model, family, cutoff, needs_pixels)
    return Encoding(encoder, family, model)


@dataclass(frozen=True)
class _Source:
    """What a configuration file says of the data."""

    basic: dict[str, Any]
    preprocess: dict[str, Any]
    attr: DatasetAttr | None
    model: ModelConfig | None
    seq_length: int | None


def _read_config(path: str) -> _Source:
    if "dataset_param" in read_mapping(path):
        from tangram.config.sources import read_data

        data, model, seq_length = read_data(path).dataset_param, None, None
    else:
        from tangram.config.yaml_config import read_run

        run = read_run(path)
        data, model, seq_length = run.data.dataset_param, run.described, run.training.seq_length
    return _Source(data.basic_parameters.model_dump(), data.preprocess_parameters.model_dump(), data.attr, model, seq_length)
