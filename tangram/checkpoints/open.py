"""Any checkpoint as canonical tensors, with what is known of its model and split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tangram.checkpoints.conversion import ModelSplit, open_mm, refuse_unknown_order
from tangram.checkpoints.copier import show
from tangram.checkpoints.dcp_reader import DCPReader
from tangram.checkpoints.find_split import find_split
from tangram.checkpoints.hf_directory import HFDirectory
from tangram.checkpoints.kinds import WeightKind, kind_of_weights
from tangram.checkpoints.mp_rank import MMDirectory
from tangram.checkpoints.options import FormOptions, ParallelOptions
from tangram.checkpoints.reader import CanonicalReader
from tangram.config.model import ModelConfig
from tangram.config.parsing import read_mapping
from tangram.errors import CheckpointError
from tangram.families.base import Family, get_family
from tangram.placement.topology import Topology


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint that can be read.

    Args:
        reader: its tensors.
        config: content of config.json.
        topology: its split; None where it has none, as Hugging Face directories and training checkpoints.
        facts: what else its manifest says, such as step and source.
    """

    path: Path
    kind: WeightKind
    reader: CanonicalReader
    family: Family
    config: Mapping[str, Any]
    model: ModelConfig
    topology: Topology | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tied(self) -> bool:
        """The head is the embedding, by the config."""
        return not self.model.text_decoder.untie_embeddings_and_output_weights

    @property
    def embedding(self) -> str:
        """Canonical name of the word embedding."""
        table = self.family.tensor_table(self.model, self.model.text_decoder.vocab_size)
        return next(rule.sources[0].name for rule in table if rule.component == "text" and rule.place == "first")

    @property
    def dtypes(self) -> dict[str, int]:
        """Tensors per element type."""
        return dict(sorted(Counter(show(info.dtype) for info in self.reader.names().values()).items()))


def open_checkpoint(
    path: str | Path, *, split: ParallelOptions | None = None, hf_dir: str | Path | None = None, config: Mapping[str, Any] | None = None
) -> OpenCheckpoint:
    """Open a Hugging Face directory, an ``mp_rank`` directory, a training checkpoint or a LoRA adapter. Tensors are mapped, not loaded.

    The names of a Hugging Face directory are those of its files, also where they are not the model's (``HFDirectory.check_model``).

    Args:
        split: of an ``mp_rank`` directory without a manifest; None: as its folders tell it.
        hf_dir: directory with the config.json of a checkpoint that holds none; for an adapter that of its base.
        config: content of config.json, where no ``hf_dir`` is at hand.

    Raises:
        TangramError: no checkpoint, a damaged or incomplete one, or one without a config when none is given.
    """
    path = Path(path)
    kind = kind_of_weights(path)
    if hf_dir is not None:
        config = read_mapping(Path(hf_dir, "config.json"))
    if kind == "Hugging Face directory":
        hf = HFDirectory(path)
        return OpenCheckpoint(path, kind, hf, hf.family, hf.config, hf.model, facts={"key layout": hf.layout})
    if kind == "mp_rank directory":
        return _open_ranks(path, split, config)
    if kind == "training checkpoint":
        return _open_training(path, config)
    from tangram.checkpoints.lora_adapter import open_adapter

    adapter = open_adapter(path, base_config=config, split=split)
    model = adapter.family.from_hf_config(adapter.base_config)
    return OpenCheckpoint(path, kind, adapter.reader, adapter.family, adapter.base_config, model, adapter.topology)


def _open_training(path: Path, given: Mapping[str, Any] | None) -> OpenCheckpoint:
    reader = DCPReader(path)
    manifest = reader.manifest
    config = manifest.hf_config or given
    if not config:
        raise CheckpointError(f"{reader.folder}: holds no Hugging Face config (the run had none); give that of its model as hf_dir")
    family = get_family(manifest.family)
    facts = {"step": manifest.step, "optimizer": manifest.optimizer, "split of the run": dict(manifest.split), "packages": dict(manifest.packages)}
    return OpenCheckpoint(reader.folder, "training checkpoint", reader, family, config, family.from_hf_config(config), facts=facts)


def _open_ranks(path: Path, split: ParallelOptions | None, given: Mapping[str, Any] | None) -> OpenCheckpoint:
    mm = MMDirectory(path)
    facts: dict[str, Any] = {}
    config: Mapping[str, Any]
    if mm.manifest is not None:
        opened = open_mm(str(path), (), split or ParallelOptions(), FormOptions(), None)
        parts, config = opened.split, opened.hf_config
        facts |= {"source": mm.manifest.source, "package_version": mm.manifest.package_version}
    else:
        if given is None:
            raise CheckpointError(
                f"{path}: has no manifest and no config.json, and its files do not name their model; give the Hugging Face directory of the "
                f"model as hf_dir (its folders look like {find_split(mm.folder)})"
            )
        config = given
        parts = _found_split(mm, split, config)
    reader = mm.canonical(parts.table, parts.topology, parts.shapes)
    return OpenCheckpoint(path, "mp_rank directory", reader, parts.family, config, parts.model, parts.topology, facts)


def _found_split(mm: MMDirectory, split: ParallelOptions | None, config: Mapping[str, Any]) -> ModelSplit:
    """The split of a directory without a manifest: as given, else as its files tell it; they tell its form too."""
    family = get_family(str(config.get("model_type")))
    model = family.from_hf_config(config)
    found = find_split(mm.folder)
    parts = ModelSplit.build(
        family,
        model,
        split or found.options(model.text_decoder.num_layers),
        canonical_form=found.canonical_form,
        vit_only=found.vit_only,
    )
    if split is None and found.padded_vocab is not None:
        parts = replace(parts, padded_vocab=found.padded_vocab)
    refuse_unknown_order(parts, str(mm.path))
    return parts
