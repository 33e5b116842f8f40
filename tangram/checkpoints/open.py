"""Any checkpoint as canonical tensors, with what is known of its model and split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tangram.checkpoints.conversion import ModelSplit
from tangram.checkpoints.copier import show
from tangram.checkpoints.dcp_reader import DCPReader
from tangram.checkpoints.find_split import find_split
from tangram.checkpoints.hf_directory import HFDirectory
from tangram.checkpoints.kinds import WeightKind, kind_of_weights
from tangram.checkpoints.mp_rank import MMDirectory
from tangram.checkpoints.options import ParallelOptions
from tangram.checkpoints.reader import CanonicalReader
from tangram.config.model import ModelConfig
from tangram.config.parsing import read_mapping
from tangram.errors import CheckpointError
from tangram.families.base import Family, get_family
from tangram.placement.table import padded_vocabulary
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
    if mm.folder.name != "release":
        facts["step"] = int(mm.folder.name.removeprefix("iter_"))
    if mm.manifest is not None:
        config, family = mm.manifest.hf_config, get_family(mm.manifest.family)
        model, topology, padded = family.from_hf_config(config), mm.manifest.topology, mm.manifest.padded_vocab
        facts |= {"source": mm.manifest.source, "package_version": mm.manifest.package_version}
    else:
        if given is None:
            raise CheckpointError(
                f"{path}: has no manifest and no config.json, and its files do not name their model; give the Hugging Face directory of the "
                f"model as hf_dir (its folders look like {find_split(mm.folder)})"
            )
        config, family = given, get_family(str(given.get("model_type")))
        model = family.from_hf_config(config)
        topology, padded = _given_split(mm, split, model)
    form, alone = (mm.manifest.canonical_form, mm.manifest.vit_only) if mm.manifest is not None else (False, False)
    held = ModelSplit(family, model, topology, padded, form, alone)
    reader = mm.canonical(held.table, topology, held.shapes)
    return OpenCheckpoint(path, "mp_rank directory", reader, family, config, model, topology, facts)


def _given_split(mm: MMDirectory, split: ParallelOptions | None, model: ModelConfig) -> tuple[Topology, int]:
    """Topology and padded vocabulary of a directory without a manifest."""
    vocab = model.text_decoder.vocab_size
    if split is not None:
        topology = split_topology(split, model)
        return topology, padded_vocabulary(vocab, topology.tensor, split.make_vocab_size_divisible_by or 1)
    found = find_split(mm.folder)
    told = ParallelOptions(tp_size=found.tensor, vit_pp_layers=found.vit_pp_layers, llm_pp_layers=found.llm_pp_layers)
    return split_topology(told, model), found.padded_vocab or vocab


def split_topology(split: ParallelOptions, model: ModelConfig) -> Topology:
    """The topology that options describe.

    Raises:
        ConfigError: the lists do not fit the model.
    """
    encoder = model.image_encoder
    return Topology.build(
        vision_layers=encoder.vision_encoder.num_layers if encoder else 0,
        text_layers=model.text_decoder.num_layers,
        tensor=split.tp_size or 1,
        vit_pp_layers=split.vit_pp_layers,
        llm_pp_layers=split.llm_pp_layers,
        expert=split.ep_size or 1,
        vision_tensor=split.vit_tp_size or None,
    )


def whole(model: ModelConfig) -> Topology:
    """The split that is none."""
    return split_topology(ParallelOptions(), model)
