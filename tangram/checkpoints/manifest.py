"""The manifest of an ``mp_rank`` directory: what it was converted from, and for which split."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch

import tangram
from tangram.checkpoints.copier import show
from tangram.config.model import ModelConfig
from tangram.config.parsing import Section, parse_section, read_mapping
from tangram.errors import CheckpointError, ConfigError
from tangram.families.base import get_family
from tangram.placement.topology import Topology

MANIFEST = "tangram_manifest.json"


class Manifest(Section):
    """Content of ``tangram_manifest.json``."""

    format_version: Literal[1] = 1
    family: str
    tensor_parallel: int
    pipeline_parallel: int
    virtual_pipeline: int
    vit_pp_layers: list[list[int]]
    llm_pp_layers: list[list[int]]
    tied: bool
    """The head is the embedding."""
    vocab_size: int
    padded_vocab: int
    """Rows of the word embedding over all tensor-parallel ranks."""
    dtypes: dict[str, int]
    """Canonical tensors per element type."""
    hf_config: dict[str, Any]
    """config.json of the source."""
    source: str
    """``sha256:`` of the source's config and headers."""
    package_version: str = tangram.__version__

    @property
    def topology(self) -> Topology:
        """The split that the directory was converted for.

        Raises:
            ConfigError: the lists are not those of a split.
        """
        return Topology(tensor=self.tensor_parallel, vision=tuple(map(tuple, self.vit_pp_layers)), text=tuple(map(tuple, self.llm_pp_layers)))


def make_manifest(
    *, family: str, topology: Topology, model: ModelConfig, padded_vocab: int, dtypes: Iterable[torch.dtype], hf_config: dict[str, Any], source: str
) -> Manifest:
    """Describe a conversion."""
    return Manifest(
        family=family,
        tensor_parallel=topology.tensor,
        pipeline_parallel=topology.pipeline,
        virtual_pipeline=topology.virtual,
        vit_pp_layers=[list(row) for row in topology.vision],
        llm_pp_layers=[list(row) for row in topology.text],
        tied=not model.text_decoder.untie_embeddings_and_output_weights,
        vocab_size=model.text_decoder.vocab_size,
        padded_vocab=padded_vocab,
        dtypes=dict(sorted(Counter(map(show, dtypes)).items())),
        hf_config=hf_config,
        source=source,
    )


def manifest_text(manifest: Manifest) -> str:
    return json.dumps(manifest.model_dump(), indent=2) + "\n"


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a directory; None where it has none, as directories of other converters.

    Raises:
        CheckpointError: it is damaged or of another format version.
    """
    path = directory / MANIFEST
    if not path.exists():
        return None
    try:
        return parse_section(Manifest, read_mapping(path), str(path))
    except ConfigError as error:
        raise CheckpointError(f"{error}; convert again") from None


def check_manifest(manifest: Manifest, topology: Topology, model: ModelConfig, where: str = MANIFEST, padded_vocab: int | None = None) -> None:
    """Check that a directory was converted for this run.

    Three places describe a split: the converter's manifest, the layer lists of model.json or the run config, and the sizes among the
    launch flags. They must agree.

    Args:
        where: the directory, for the message.
        padded_vocab: the run's; None: not compared.

    Raises:
        CheckpointError: one line that names each difference, the place it is set in, both values and the mend.
    """
    text = model.text_decoder
    lists = "pipeline_num_layers of model.json or the run config's"
    compared = [
        ("family", manifest.family, "model_id of model.json", get_family(model.model_id).name),
        ("tp_size", manifest.tensor_parallel, "the launch flag --tensor-model-parallel-size", topology.tensor),
        ("pipeline size", manifest.pipeline_parallel, "the launch flag --pipeline-model-parallel-size with its layer lists", topology.pipeline),
        ("virtual stages", manifest.virtual_pipeline, f"the rows of {lists} layer lists", topology.virtual),
        ("vit_pp_layers", manifest.vit_pp_layers, f"{lists} vit_pp_layers", [list(row) for row in topology.vision]),
        ("llm_pp_layers", manifest.llm_pp_layers, f"{lists} llm_pp_layers", [list(row) for row in topology.text]),
        ("tied embeddings", manifest.tied, "untie_embeddings_and_output_weights of model.json", not text.untie_embeddings_and_output_weights),
        ("vocab_size", manifest.vocab_size, "vocab_size of model.json", text.vocab_size),
        ("padded vocabulary", manifest.padded_vocab, "the launch flag --make-vocab-size-divisible-by", padded_vocab or manifest.padded_vocab),
    ]
    found = [f"{what} is {ours} in the converter manifest but {theirs} by {place}" for what, ours, place, theirs in compared if ours != theirs]
    if found:
        raise CheckpointError(
            f"{where}: converted for another run: {'; '.join(found)}; convert again for this split, or correct the run to the manifest's values"
        )
