"""LoRA adapters between PEFT and ``mp_rank`` directories, and into their base."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from tangram.checkpoints.copier import show
from tangram.checkpoints.export import export_hf
from tangram.checkpoints.hf_directory import HFDirectory
from tangram.checkpoints.kinds import ADAPTER_CONFIG, ADAPTER_MANIFEST
from tangram.checkpoints.lora_adapter import WEIGHTS, Adapter, adapter_manifest_text, open_adapter
from tangram.checkpoints.lora_options import LoraMergeOptions, LoraToHFOptions, LoraToMMOptions
from tangram.checkpoints.mp_rank import TRACKER, write_ranks
from tangram.checkpoints.open import split_topology
from tangram.checkpoints.publish import new_directory, require_new
from tangram.checkpoints.reader import CanonicalReader, TensorInfo, check_rectangle, read_whole
from tangram.errors import CheckpointError, ConfigError
from tangram.placement.proof import prove_table
from tangram.placement.table import Shape, padded_vocabulary


@dataclass(frozen=True)
class LoraReport:
    """What was written where."""

    out: Path
    modules: int
    """Adapted linears."""
    bytes: int
    """Of tensors in the output."""
    ranks: int | None = None
    """Model-parallel ranks of an ``mp_rank`` directory."""

    def __str__(self) -> str:
        ranks = f", {self.ranks} model-parallel rank(s)" if self.ranks is not None else ""
        return f"{self.out}: {self.modules} adapted modules{ranks}, {self.bytes} bytes"


def run_lora_to_mm(options: LoraToMMOptions, family: str) -> LoraReport:
    """Write the ``mp_rank`` directory of an adapter.

    Raises:
        TangramError: as ``open_adapter``; another family; a split that does not fit; an output with content. Nothing is published then.
    """
    out, split = Path(options.mm_dir), options.parallel_config
    require_new(out)
    adapter = open_adapter(options.hf_config.hf_dir, base_dir=options.base_hf_dir)
    _check_family(adapter, family)
    model = adapter.family.from_hf_config(adapter.base_config)
    topology = split_topology(split, model)
    padded = padded_vocabulary(model.text_decoder.vocab_size, topology.tensor, split.make_vocab_size_divisible_by or 1)
    table = adapter.table(padded)
    prove_table(table, topology)
    with new_directory(out) as temporary:
        written = write_ranks(temporary / "release", table, topology, adapter.reader)
        shutil.copyfile(adapter.config.path, temporary / ADAPTER_CONFIG)
        (temporary / ADAPTER_MANIFEST).write_text(adapter_manifest_text(adapter, topology, padded), encoding="utf-8")
        (temporary / TRACKER).write_text("release")
    return LoraReport(out, len(adapter.ranks), written, topology.model_parallel_size)


def run_lora_to_hf(options: LoraToHFOptions, family: str) -> LoraReport:
    """Write the PEFT directory of an adapter; ``adapter_config.json`` stays as it was.

    Raises:
        TangramError: as ``run_lora_to_mm``.
    """
    out, mm_dir = Path(options.save_hf_dir), Path(options.mm_dir)
    require_new(out)
    config_dir = None
    if not (mm_dir / ADAPTER_CONFIG).is_file():
        if options.hf_config is None:
            raise ConfigError(f"{mm_dir}: no {ADAPTER_CONFIG}; give the directory that has it with --cfg.hf_config.hf_dir")
        config_dir = options.hf_config.hf_dir
    adapter = open_adapter(
        mm_dir, base_dir=options.base_hf_dir, split=options.parallel_config, config_dir=config_dir, key_layout=options.key_layout
    )
    _check_family(adapter, family)
    names = {adapter.key(name): name for name in adapter.reader.names()}
    tensors = {key: read_whole(adapter.reader, name).contiguous() for key, name in names.items()}
    with new_directory(out) as temporary:
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        shutil.copyfile(adapter.config.path, temporary / ADAPTER_CONFIG)
    return LoraReport(out, len(adapter.ranks), sum(tensor.nbytes for tensor in tensors.values()))


def run_lora_merge(options: LoraMergeOptions, family: str) -> LoraReport:
    """Write the base with the adapter added to its weights, in the base's files and element types.

    Raises:
        TangramError: as ``run_lora_to_mm``; a base that is incomplete or holds no plain floating-point weights; an adapter that cannot be merged.
    """
    out = Path(options.save_hf_dir)
    require_new(out)
    base = HFDirectory(options.hf_config.hf_dir)
    base.check_model()
    adapter = open_adapter(options.lora_dir, base_dir=base.path, split=options.parallel_config)
    _check_family(adapter, family)
    source = MergedReader(base, adapter)
    written = export_hf(source, out, base.family, files_from=base.path, hf_config=base.config, shards=base.shards)
    return LoraReport(out, len(adapter.ranks), written)


class MergedReader:
    """``base`` with ``W + scale * B A`` for every adapted weight, computed in fp32 and rounded once to the base's type.

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


def _check_family(adapter: Adapter, family: str) -> None:
    if adapter.family.name != family:
        name = adapter.family.name
        raise ConfigError(f"{adapter.path}: its base is a {name} model but the converter is for {family}; use the {name} converter")
