"""What all conversions share: a model at a split, the directories they read, and a checked conversion that is ready to be written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from tangram.checkpoints.hf_directory import HFDirectory
from tangram.checkpoints.manifest import MANIFEST, Manifest, SplitManifest, differences, make_manifest, manifest_text
from tangram.checkpoints.mp_rank import TRACKER, MMDirectory, plan_ranks, write_ranks
from tangram.checkpoints.options import FormOptions, ParallelOptions
from tangram.checkpoints.reader import CanonicalReader
from tangram.checkpoints.resume import resumable_directory
from tangram.checkpoints.writing import WritePlan, WriteSettings
from tangram.config.model import ModelConfig
from tangram.config.sources import read_hf_config
from tangram.errors import CheckpointError, ConfigError
from tangram.families.base import Family, get_family
from tangram.placement.blocks import canonical_shapes
from tangram.placement.canonical_form import PackedThirds, unfuse
from tangram.placement.proof import prove_table
from tangram.placement.table import Rule, Shape, padded_vocabulary
from tangram.placement.topology import Topology


@dataclass(frozen=True)
class ConversionReport:
    """What was written where."""

    out: Path
    tensors: int
    """Canonical tensors."""
    bytes: int
    """Of tensors in the output; replicas and tied copies count each time."""
    ranks: int | None
    """Model-parallel ranks of the ``mp_rank`` directory that was read or written; None where there is none."""
    tied: bool
    note: str | None = None

    def __str__(self) -> str:
        ranks = f"{self.ranks} model-parallel rank(s), " if self.ranks is not None else ""
        tied = ", output layer tied to the embedding" if self.tied else ""
        return f"{self.out}: {self.tensors} tensors, {ranks}{self.bytes} bytes{tied}{f'; {self.note}' if self.note else ''}"


@dataclass(frozen=True)
class Conversion:
    """A conversion whose options, names and shapes are checked; nothing is written yet.

    Args:
        out: directory that will be written.
        source: the tensors that will be written.
        plan: says which files will be written.
        execute: writes them and returns the bytes of tensors in the output; nothing is published if it raises.
        note: what the user should know, such as a lossy cast.
    """

    out: Path
    source: CanonicalReader
    plan: Callable[[WriteSettings], WritePlan]
    execute: Callable[[WriteSettings], int]
    tied: bool
    ranks: int | None = None
    note: str | None = None

    def write(self, settings: WriteSettings | None = None) -> ConversionReport:
        """Write the output directory.

        Raises:
            TangramError: damaged weights, or an output directory with content. Nothing is published then.
        """
        written = self.execute(settings or WriteSettings())
        return ConversionReport(self.out, len(self.source.names()), written, self.ranks, self.tied, self.note)


@dataclass(frozen=True)
class ModelSplit:
    """A model at a split, in a form: what an ``mp_rank`` directory holds.

    Args:
        padded_vocab: rows of the word embedding over all tensor-parallel ranks.
        canonical_form: parameters are not fused.
        vit_only: the vision encoder and the projector alone.
    """

    family: Family
    model: ModelConfig
    topology: Topology
    padded_vocab: int
    canonical_form: bool = False
    vit_only: bool = False

    @classmethod
    def build(
        cls, family: Family, model: ModelConfig, parallel: ParallelOptions, *, canonical_form: bool | None = None, vit_only: bool = False
    ) -> ModelSplit:
        """The split that options ask for; what is absent is the default.

        Raises:
            ConfigError: lists or sizes that do not fit the model.
        """
        if vit_only and model.image_encoder is None:
            raise ConfigError("save_vit_only: the model has no vision encoder; leave the option out")
        topology = topology_of(model, parallel)
        padded = padded_vocabulary(model.text_decoder.vocab_size, topology.tensor, parallel.make_vocab_size_divisible_by or 1)
        split = cls(family, model, topology, padded, bool(canonical_form), vit_only)
        check_experts(split.whole_table, topology)
        return split

    @cached_property
    def whole_table(self) -> list[Rule]:
        """Of both components, in this form."""
        table = self.family.tensor_table(self.model, self.padded_vocab)
        return unfuse(table) if self.canonical_form else table

    @cached_property
    def table(self) -> list[Rule]:
        """Of what the directory holds."""
        return [rule for rule in self.whole_table if rule.component == "vision"] if self.vit_only else self.whole_table

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Name and shape of every canonical tensor that the directory holds, after the proof that the split covers each.

        Raises:
            PlacementError: it does not, or a size does not divide.
        """
        return prove_table(self.table, self.topology)

    def component_names(self, component: str) -> list[str]:
        """Canonical names of a component's tensors."""
        return list(canonical_shapes([rule for rule in self.whole_table if rule.component == component], self.topology))

    @property
    def tied(self) -> bool:
        """The output layer is the embedding."""
        return not self.model.text_decoder.untie_embeddings_and_output_weights and not self.vit_only

    @property
    def ranks(self) -> int:
        """Ranks that hold the model once, and files that a directory has."""
        return self.topology.model_parallel_size * self.topology.expert


def topology_of(model: ModelConfig, parallel: ParallelOptions) -> Topology:
    """The topology that options ask for.

    Raises:
        ConfigError: as ``Topology.build``.
    """
    encoder = model.image_encoder
    return Topology.build(
        vision_layers=encoder.vision_encoder.num_layers if encoder else 0,
        text_layers=model.text_decoder.num_layers,
        tensor=parallel.tp_size or 1,
        vit_pp_layers=parallel.vit_pp_layers,
        llm_pp_layers=parallel.llm_pp_layers,
        expert=parallel.ep_size or 1,
        vision_tensor=parallel.vit_tp_size or None,
    )


def check_experts(table: Sequence[Rule], topology: Topology) -> None:
    """Check that there are experts to split where the split asks for it; the files would be copies of each other.

    Raises:
        ConfigError: there are none.
    """
    if topology.expert > 1 and not any(rule.place == "expert" for rule in table):
        raise ConfigError(f"ep_size {topology.expert}: the model has no experts; leave the option out")


def whole(model: ModelConfig) -> Topology:
    """The split that is none."""
    return topology_of(model, ParallelOptions())


def check_family(family: Family, families: tuple[str, ...], where: str) -> None:
    """Check that a directory is of a converter's families.

    Args:
        families: names; empty: any.

    Raises:
        ConfigError: it is not.
    """
    if families and family.name not in families:
        raise ConfigError(
            f"{where} is a {family.name} model but the converter is for {' and '.join(families)}; use the converter for {family.name}, or HFConverter"
        )


def open_hf(path: str, families: tuple[str, ...], option: str = "--cfg.hf_config.hf_dir") -> HFDirectory:
    """The Hugging Face directory, of a family that the converter is for.

    Raises:
        ConfigError: no such directory, or of another family.
        CheckpointError: its weights are damaged or incomplete.
    """
    require_directory(path, option)
    hf = HFDirectory(path)
    check_family(hf.family, families, f"{option}: {path}")
    return hf


def require_directory(path: str, option: str) -> None:
    """Raises:
    ConfigError: no such directory.
    """
    if not Path(path).is_dir():
        raise ConfigError(f"{option}: {path}: no such directory")


@dataclass(frozen=True)
class OpenedMM:
    """An ``mp_rank`` directory with the split that it is of."""

    directory: MMDirectory
    split: ModelSplit
    hf_config: dict[str, Any]

    @cached_property
    def reader(self) -> CanonicalReader:
        """Its canonical tensors.

        Raises:
            CheckpointError, PlacementError: files or tensors missing, unexpected, of another shape or damaged.
        """
        return self.directory.canonical(self.split.table, self.split.topology, self.split.shapes)


def open_mm(
    path: str, families: tuple[str, ...], parallel: ParallelOptions, form: FormOptions, hf_dir: str | None, option: str = "--cfg.mm_dir"
) -> OpenedMM:
    """An ``mp_rank`` directory, its split taken from the options and, where they are absent, from its manifest.

    Args:
        hf_dir: directory whose config.json describes the model; None: the manifest does.

    Raises:
        ConfigError: no such directory, nothing describes the model, or a split that does not fit it.
        CheckpointError: the options and the manifest disagree.
    """
    require_directory(path, option)
    directory = MMDirectory(path)
    manifest = directory.manifest
    if hf_dir is not None:
        require_directory(hf_dir, "--cfg.hf_config.hf_dir")
        hf_config = read_hf_config(hf_dir)
    elif manifest is not None:
        hf_config = manifest.hf_config
    else:
        raise ConfigError(f"{option}: {path} has no {MANIFEST}, so nothing says which model it holds; add --cfg.hf_config.hf_dir")
    family = get_family(str(hf_config.get("model_type")))
    check_family(family, families, f"--cfg.hf_config.hf_dir: {hf_dir}" if hf_dir is not None else f"{option}: {path}")
    split = _split_of(manifest, family, family.from_hf_config(hf_config), parallel, form)
    if manifest is None:
        refuse_unknown_order(split, path)
    else:
        found = differences(manifest, split.topology, split.model, split.padded_vocab, canonical_form=split.canonical_form, vit_only=split.vit_only)
        if found:
            by = "by the options or the Hugging Face config"
            listed = "; ".join(f"{what} is {ours} in the manifest but {theirs} {by}" for what, ours, theirs in found)
            raise CheckpointError(f"{path}: {listed}; leave the options out to use the manifest's values, or give the directory they are for")
    return OpenedMM(directory, split, hf_config)


def _split_of(manifest: Manifest | None, family: Family, model: ModelConfig, parallel: ParallelOptions, form: FormOptions) -> ModelSplit:
    canonical = form.enable_canonical_hf_struct
    if manifest is None:
        return ModelSplit.build(family, model, parallel, canonical_form=canonical)
    built = ModelSplit.build(family, model, filled(parallel, manifest), canonical_form=manifest.canonical_form if canonical is None else canonical)
    padded = manifest.padded_vocab if parallel.make_vocab_size_divisible_by is None else built.padded_vocab
    return ModelSplit(family, model, built.topology, padded, built.canonical_form, manifest.vit_only)


def filled(parallel: ParallelOptions, manifest: SplitManifest) -> ParallelOptions:
    """Options with a manifest's values where they say nothing."""
    return parallel.model_copy(
        update={
            "tp_size": parallel.tp_size or manifest.tensor_parallel,
            "vit_tp_size": manifest.vision_tensor_parallel if parallel.vit_tp_size is None else parallel.vit_tp_size,
            "ep_size": parallel.ep_size or manifest.expert_parallel,
            "llm_pp_layers": parallel.llm_pp_layers or manifest.llm_pp_layers,
            "vit_pp_layers": parallel.vit_pp_layers or manifest.vit_pp_layers,
        }
    )


def refuse_unknown_order(split: ModelSplit, path: str) -> None:
    """Others may have cut a packed ``[q; k; v]`` into equal parts; nothing in the files tells."""
    packed = any(isinstance(rule.layout, PackedThirds) for rule in split.table)
    if packed and split.topology.tensor_of("vision") > 1:
        raise CheckpointError(
            f"{path}: has no {MANIFEST}, and in the canonical form at tensor-parallel size {split.topology.tensor_of('vision')} nothing in the files "
            "tells how the rows of the vision encoder's linear_qkv were split; use the fused form, or tensor-parallel size 1"
        )


def mm_conversion(
    out: Path,
    split: ModelSplit,
    source: CanonicalReader,
    hf_config: dict[str, Any],
    fingerprint: str,
    note: str | None = None,
    before: Callable[[], None] | None = None,
) -> Conversion:
    """A conversion that writes the ``mp_rank`` directory of a split.

    Args:
        fingerprint: of the weights, for the manifest.
        before: checks that read weights.
    """
    names = source.names()
    manifest = make_manifest(
        family=split.family.name,
        topology=split.topology,
        model=split.model,
        padded_vocab=split.padded_vocab,
        dtypes=[names[name].dtype for name in split.shapes],
        hf_config=hf_config,
        source=fingerprint,
        canonical_form=split.canonical_form,
        vit_only=split.vit_only,
    )

    def execute(settings: WriteSettings) -> int:
        if before is not None:
            before()
        with resumable_directory(out) as journal:
            written = write_ranks(journal.folder / "release", split.table, split.topology, source, settings, journal)
            (journal.folder / MANIFEST).write_text(manifest_text(manifest), encoding="utf-8")
            (journal.folder / TRACKER).write_text("release")
        return written

    def plan(settings: WriteSettings) -> WritePlan:
        return plan_ranks(split.table, split.topology, source, settings)

    return Conversion(out, source, plan, execute, split.tied, split.ranks, note)


def torch_dtype(name: str | None) -> torch.dtype | None:
    """``bfloat16`` as torch's type."""
    return getattr(torch, name) if name else None
