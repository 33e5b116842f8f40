"""LoRA adapters between PEFT and ``mp_rank`` directories, and into their base."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from tangram.checkpoints.conversion import Conversion, check_experts, check_family, open_hf, topology_of
from tangram.checkpoints.convert import hf_conversion
from tangram.checkpoints.copier import show
from tangram.checkpoints.derived_readers import CastReader, lossy_cast
from tangram.checkpoints.engine import peak_memory, write_files
from tangram.checkpoints.export import plan_file
from tangram.checkpoints.kinds import ADAPTER_CONFIG, ADAPTER_MANIFEST
from tangram.checkpoints.lora_adapter import WEIGHTS, Adapter, adapter_manifest_text, open_adapter
from tangram.checkpoints.lora_options import LoraMergeOptions, LoraToHFOptions, LoraToMMOptions
from tangram.checkpoints.mp_rank import TRACKER, plan_ranks, write_ranks
from tangram.checkpoints.publish import require_new
from tangram.checkpoints.reader import CanonicalReader, TensorInfo, check_rectangle, identity_of
from tangram.checkpoints.resume import resumable_directory
from tangram.checkpoints.writing import WritePlan, WriteSettings
from tangram.errors import CheckpointError, ConfigError
from tangram.placement.proof import prove_table
from tangram.placement.table import Shape, padded_vocabulary


def prepare_lora_to_mm(options: LoraToMMOptions, families: tuple[str, ...] = (), dtype: torch.dtype | None = None) -> Conversion:
    """From a PEFT directory to the ``mp_rank`` directory of an adapter at a split.

    Args:
        families: that the base may be of; empty: any.
        dtype: cast to it; None: every tensor keeps its own.

    Raises:
        TangramError: as ``open_adapter``; another family; a split that does not fit; an output with content.
    """
    out, split = Path(options.mm_dir), options.parallel_config
    require_new(out)
    adapter = open_adapter(options.hf_config.hf_dir, base_dir=options.base_hf_dir)
    check_family(adapter.family, families, f"{adapter.path}: its base")
    model = adapter.family.from_hf_config(adapter.base_config)
    topology = topology_of(model, split)
    padded = padded_vocabulary(model.text_decoder.vocab_size, topology.tensor, split.make_vocab_size_divisible_by or 1)
    check_experts(adapter.family.tensor_table(model, padded), topology)
    table = adapter.table(padded)
    prove_table(table, topology)
    source = _cast(adapter.reader, dtype)

    def execute(settings: WriteSettings) -> int:
        with resumable_directory(out) as journal:
            written = write_ranks(journal.folder / "release", table, topology, source, settings, journal)
            shutil.copyfile(adapter.config.path, journal.folder / ADAPTER_CONFIG)
            (journal.folder / ADAPTER_MANIFEST).write_text(adapter_manifest_text(adapter, topology, padded), encoding="utf-8")
            (journal.folder / TRACKER).write_text("release")
        return written

    def plan(settings: WriteSettings) -> WritePlan:
        return plan_ranks(table, topology, source, settings)

    ranks = topology.model_parallel_size * topology.expert
    return Conversion(out, source, plan, execute, tied=False, ranks=ranks, note=lossy_cast(adapter.reader, dtype))


def prepare_lora_to_hf(options: LoraToHFOptions, families: tuple[str, ...] = (), dtype: torch.dtype | None = None) -> Conversion:
    """From the ``mp_rank`` directory of an adapter to a PEFT directory; ``adapter_config.json`` stays as it was.

    Raises:
        TangramError: as ``prepare_lora_to_mm``.
    """
    out, mm_dir = Path(options.save_hf_dir), Path(options.mm_dir)
    require_new(out)
    config_dir = options.hf_config.hf_dir
    if config_dir is None and not (mm_dir / ADAPTER_CONFIG).is_file():
        raise ConfigError(f"{mm_dir}: no {ADAPTER_CONFIG}; give the directory that has it with --cfg.hf_config.hf_dir")
    adapter = open_adapter(mm_dir, base_dir=options.base_hf_dir, split=options.parallel_config, config_dir=config_dir, key_layout=options.key_layout)
    check_family(adapter.family, families, f"{adapter.path}: its base")
    source = _cast(adapter.reader, dtype)
    file = plan_file(WEIGHTS, {adapter.key(name): (name, info) for name, info in source.names().items()}, source)

    def execute(settings: WriteSettings) -> int:
        with resumable_directory(out) as journal:
            shutil.copyfile(adapter.config.path, journal.folder / ADAPTER_CONFIG)
            return write_files(journal.folder, [file], identity_of(source), settings, journal)

    def plan(settings: WriteSettings) -> WritePlan:
        return WritePlan(((file.path, file.size),), peak_memory(settings))

    assert adapter.topology is not None, "an mp_rank directory has a split"
    ranks = adapter.topology.model_parallel_size * adapter.topology.expert
    return Conversion(out, source, plan, execute, tied=False, ranks=ranks, note=lossy_cast(adapter.reader, dtype))


def prepare_lora_merge(
    options: LoraMergeOptions, families: tuple[str, ...] = (), dtype: torch.dtype | None = None, max_shard_bytes: int | None = None
) -> Conversion:
    """The base with the adapter added to its weights, in the base's element types and, unless ``max_shard_bytes`` is given, its files.

    Raises:
        TangramError: as ``prepare_lora_to_mm``; a base that is incomplete or holds no plain floating-point weights; an adapter that cannot be
            merged.
    """
    out = Path(options.save_hf_dir)
    require_new(out)
    base = open_hf(options.hf_config.hf_dir, families)
    base.check_model()
    adapter = open_adapter(options.lora_dir, base_dir=base.path, split=options.parallel_config)
    shards = base.shards if max_shard_bytes is None else None
    tied = base.embedding is not None
    return hf_conversion(out, base.family, MergedReader(base, adapter), base.config, base.path, shards, max_shard_bytes, dtype, tied=tied)


class MergedReader:
    """``base`` with ``W + scale * B A`` for every adapted weight, computed in fp32 or wider and rounded once to the base's type.

    Raises:
        CheckpointError: the adapter changed its base when it was started, or an adapted weight is stored in less than 16 bits.
    """

    def __init__(self, base: CanonicalReader, adapter: Adapter) -> None:
        adapter.config.check_mergeable()
        self._base, self._adapter = base, adapter
        self._modules = {f"{module}.weight": module for module in adapter.ranks}
        for name in self._modules:
            dtype = base.names()[name].dtype
            if not dtype.is_floating_point or dtype.itemsize < 2:
                raise CheckpointError(f"{name}: the base holds it as {show(dtype)}, which cannot take an adapter; merge into 16- or 32-bit weights")

    @property
    def identity(self) -> str | None:
        """See ``identity_of``."""
        parts = [identity_of(self._base), identity_of(self._adapter.reader)]
        return None if None in parts else f"{parts} {sorted(self._adapter.config.raw.items(), key=str)}"

    def names(self) -> Mapping[str, TensorInfo]:
        return self._base.names()

    def read(self, name: str, start: Shape, shape: Shape) -> torch.Tensor:
        """As the base's, with the adapter's part of the rectangle added."""
        check_rectangle(self._base.names(), name, start, shape, "base with adapter")
        weight = self._base.read(name, start, shape)
        module = self._modules.get(name)
        if module is None:
            return weight
        rank, reader = self._adapter.ranks[module], self._adapter.reader
        a = reader.read(f"{module}.lora_A.weight", (0, start[1]), (rank, shape[1]))
        b = reader.read(f"{module}.lora_B.weight", (start[0], 0), (shape[0], rank))
        wide = torch.promote_types(weight.dtype, torch.float32)
        return torch.addmm(weight.to(wide), b.to(wide), a.to(wide), alpha=self._adapter.scale(module)).to(weight.dtype)


def _cast(source: CanonicalReader, dtype: torch.dtype | None) -> CanonicalReader:
    return source if dtype is None else CastReader(source, dtype)
