"""LoRA adapters as canonical tensors: PEFT directories, and ``mp_rank`` directories that hold nothing but adapters.

Canonical names are those of the adapted module with ``.lora_A.weight`` and ``.lora_B.weight``. Source of the PEFT names:
https://huggingface.co/docs/peft/developer_guides/checkpoint; of the local ones (``...lora_A.default.weight``): the public ``mp_rank``
adapters of MindSpeed-MM.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from tangram.checkpoints.conversion import filled, topology_of, whole
from tangram.checkpoints.find_split import chunks_of
from tangram.checkpoints.kinds import ADAPTER_MANIFEST, has_rank_folders
from tangram.checkpoints.lora_config import AdapterConfig, read_adapter_config
from tangram.checkpoints.lora_table import PARTS, Linear, linears, local_modules, lora_table
from tangram.checkpoints.manifest import SplitManifest
from tangram.checkpoints.mp_rank import MMDirectory, Rank
from tangram.checkpoints.options import ParallelOptions
from tangram.checkpoints.rank_file import load_rank_file
from tangram.checkpoints.reader import CanonicalReader, TensorInfo, check_rectangle, files_identity
from tangram.checkpoints.safetensors_io import SafetensorsFile
from tangram.config.parsing import parse_section, read_mapping
from tangram.errors import CheckpointError, ConfigError, name_some
from tangram.families.base import Family, get_family
from tangram.placement.canonical_form import PackedThirds
from tangram.placement.proof import prove_table
from tangram.placement.table import Rule, Shape, padded_vocabulary
from tangram.placement.topology import Topology

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What PEFT puts before the names of the base's modules."""
KeyLayout = Literal["hub", "state_dict"]
_KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.(lora_[AB])\.weight")
_LOCAL_KEY = re.compile(r"(.+)\.(lora_[AB])\.default\.weight")


class AdapterManifest(SplitManifest):
    """Content of ``tangram_adapter.json`` in an ``mp_rank`` directory of an adapter."""

    key_layout: KeyLayout


@dataclass(frozen=True)
class Adapter:
    """An adapter that can be read.

    Args:
        config: of PEFT.
        reader: its tensors, by canonical name.
        family: of the base.
        base_config: the base's config.json.
        known: every linear of the base.
        ranks: rank of the pair of every adapted module.
        key_layout: whether module names in PEFT's files are the hub's or those of ``state_dict()``.
        topology: its split; None for a PEFT directory.
    """

    path: Path
    config: AdapterConfig
    reader: CanonicalReader
    family: Family
    base_config: Mapping[str, Any]
    known: Mapping[str, Linear]
    ranks: Mapping[str, int]
    key_layout: KeyLayout
    topology: Topology | None = None

    def table(self, padded_vocab: int | None = None) -> list[Rule]:
        """The tensor table.

        Args:
            padded_vocab: rows of an adapted head over all tensor-parallel ranks; None: those of the model.
        """
        model = self.family.from_hf_config(self.base_config)
        known = self.known if padded_vocab is None else linears(self.family.tensor_table(model, padded_vocab), whole(model))
        return lora_table(known, self.ranks, str(self.path))

    def module_name(self, module: str) -> str:
        """How PEFT's files and patterns call a canonical module."""
        return module if self.key_layout == "state_dict" else self.family.hub_name(f"{module}.weight").removesuffix(".weight")

    def key(self, name: str) -> str:
        """Key of a canonical tensor in PEFT's file."""
        module, part = name.removesuffix(".weight").rsplit(".", 1)
        return f"{PREFIX}{self.module_name(module)}.{part}.weight"

    def scale(self, module: str) -> float:
        """What ``B A`` of a canonical module is multiplied by."""
        return self.config.scale_of(self.module_name(module))

    def check(self) -> None:
        """Check names, shapes and ranks against the base and ``adapter_config.json``.

        Raises:
            CheckpointError: modules that the base does not have, halves of pairs, other shapes or ranks, targets without tensors, or tensors of
                modules that are no targets.
        """
        infos = self.reader.names()
        integers = [name for name, info in infos.items() if not info.dtype.is_floating_point]
        if integers:
            raise CheckpointError(f"{self.path}: {len(integers)} tensors hold integers: {name_some(integers)}; quantised adapters are not read")
        expected = {source.name: source.shape for rule in self.table() for source in rule.sources}
        lost = sorted(set(expected) - set(infos))
        if lost:
            raise CheckpointError(f"{self.path}: {len(lost)} pairs lack a half: {name_some(lost)} missing; copy or save the adapter again")
        for module, rank in self.ranks.items():
            said = self.config.rank_of(self.module_name(module))
            if rank != said:
                raise CheckpointError(
                    f"{self.path}: {module} has rank {rank}, but {self.config.path.name} says {said}; they are of different adapters"
                )
        wrong = [name for name, shape in expected.items() if infos[name].shape != shape]
        if wrong:
            first = min(wrong)
            raise CheckpointError(
                f"{self.path}: {len(wrong)} tensors have another shape than this base needs: {first} has {infos[first].shape}, "
                f"needed is {expected[first]}; the adapter is of another model"
            )
        targets = {module for module in self.known if self.config.targets_module(self.module_name(module))}
        for what, names in (("targets have no tensors", targets - set(self.ranks)), ("adapted modules are no targets", set(self.ranks) - targets)):
            if names:
                raise CheckpointError(
                    f"{self.path}: {len(names)} {what} by target_modules of {self.config.path.name}: {name_some(names)}; config and tensors are of "
                    "different adapters, or tensors were lost"
                )


class PeftFile:
    """``adapter_model.safetensors`` by canonical names.

    Raises:
        CheckpointError: missing, damaged, mixed key layouts, or tensors that are no halves of LoRA pairs.
    """

    def __init__(self, directory: Path, family: Family) -> None:
        path = directory / WEIGHTS
        if not path.is_file():
            raise CheckpointError(f"{directory}: no {WEIGHTS}; save the adapter with safe_serialization")
        self._file = SafetensorsFile(path)
        matches = {key: _KEY.fullmatch(key) for key in self._file.infos}
        foreign = [key for key, match in matches.items() if match is None]
        if foreign:
            raise CheckpointError(f"{path}: {len(foreign)} tensors are no lora_A or lora_B of a linear: {name_some(foreign)}; merge it with PEFT")
        plain = {key: f"{match[1]}.{match[2]}.weight" for key, match in matches.items() if match}
        self._keys = {family.canonical_name(name): key for key, name in plain.items()}
        if len(self._keys) != len(plain):
            raise CheckpointError(f"{path}: holds a tensor under two names; save the adapter again")
        hub = [name for name in plain.values() if family.canonical_name(name) != name]
        other = [name for name in plain.values() if family.canonical_name(name) == name and family.hub_name(name) != name]
        if hub and other:
            raise CheckpointError(f"{path}: mixes two key layouts: {min(hub)} and {min(other)}; save the adapter again")
        self.layout: KeyLayout = "hub" if hub else "state_dict"
        self._infos = {name: self._file.infos[key] for name, key in self._keys.items()}

    @property
    def identity(self) -> str:
        """See ``identity_of``."""
        return files_identity([self._file.path])

    def names(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def read(self, name: str, start: Shape, shape: Shape) -> torch.Tensor:
        check_rectangle(self._infos, name, start, shape, str(self._file.path))
        return self._file.read(self._keys[name], start, shape)


def open_adapter(
    path: str | Path,
    *,
    base_dir: str | Path | None = None,
    base_config: Mapping[str, Any] | None = None,
    split: ParallelOptions | None = None,
    config_dir: str | Path | None = None,
    key_layout: KeyLayout | None = None,
) -> Adapter:
    """Open an adapter of either form and check it.

    Args:
        base_dir: Hugging Face directory of the base, of which config.json alone is read; None: the manifest's, or where
            ``base_model_name_or_path`` points if that is a directory.
        base_config: content of that config.json instead, where the adapter does not know its own.
        split: of an ``mp_rank`` directory without a manifest.
        config_dir: where adapter_config.json lies if not in ``path``.
        key_layout: of PEFT's names, for an ``mp_rank`` directory without a manifest; None: that of ``state_dict()``.

    Raises:
        TangramError: no adapter, a damaged one, or one of another base; see ``Adapter.check``.
    """
    path = Path(path)
    config = read_adapter_config(path if config_dir is None else Path(config_dir))
    manifest = read_adapter_manifest(path)
    base: Mapping[str, Any]
    if base_dir is None and manifest is not None:
        base = manifest.hf_config
    elif base_dir is None and base_config is not None:
        base = base_config
    else:
        base = _base_config(config, base_dir)
    family = get_family(str(base.get("model_type")))
    model = family.from_hf_config(base)
    vocab = model.text_decoder.vocab_size
    known = linears(family.tensor_table(model, vocab), whole(model))
    split = split or ParallelOptions()
    if not has_rank_folders(path):
        if split.given:
            raise ConfigError(f"{path}: is a PEFT directory, which has no split; leave the options of parallel_config out")
        file = PeftFile(path, family)
        adapter = Adapter(path, config, file, family, base, known, _ranks(file.names()), file.layout)
    else:
        mm = MMDirectory(path)
        topology = topology_of(model, split if manifest is None else filled(split, manifest))
        if manifest is not None:
            _check_split(topology, manifest, path)
        padded = manifest.padded_vocab if manifest else padded_vocabulary(vocab, topology.tensor, split.make_vocab_size_divisible_by or 1)
        ranks = _ranks_of_files(mm, topology, known)
        rules = lora_table(linears(family.tensor_table(model, padded), whole(model)), ranks, str(path))
        if manifest is None and topology.tensor_of("vision") > 1 and any(isinstance(rule.layout, PackedThirds) for rule in rules):
            raise CheckpointError(
                f"{path}: has no {ADAPTER_MANIFEST}, and nothing in the files tells how the rows of the vision encoder's linear_qkv were split at "
                f"tensor-parallel size {topology.tensor_of('vision')}; only size 1 can be read"
            )
        reader = mm.canonical(rules, topology, prove_table(rules, topology))
        layout = key_layout or (manifest.key_layout if manifest is not None else "state_dict")
        adapter = Adapter(path, config, reader, family, base, known, ranks, layout, topology)
    adapter.check()
    return adapter


def _check_split(topology: Topology, manifest: AdapterManifest, path: Path) -> None:
    """Check that options which were given beside a manifest say what it says."""
    pairs = {
        "tp_size": (manifest.topology.tensor, topology.tensor),
        "vit_tp_size": (manifest.topology.tensor_of("vision"), topology.tensor_of("vision")),
        "ep_size": (manifest.topology.expert, topology.expert),
        "vit_pp_layers": (manifest.topology.vision, topology.vision),
        "llm_pp_layers": (manifest.topology.text, topology.text),
    }
    found = [f"{what} is {ours} in the manifest but {theirs} by the options" for what, (ours, theirs) in pairs.items() if ours != theirs]
    if found:
        raise CheckpointError(f"{path}: {'; '.join(found)}; leave the options out to use the manifest's values")


def _base_config(config: AdapterConfig, base_dir: str | Path | None) -> dict[str, Any]:
    folder = base_dir or config.base
    if folder is None or not Path(folder, "config.json").is_file():
        where = f"{base_dir}: " if base_dir is not None else f"{config.path}: the base is {config.base!r}, a directory that is not here: "
        raise CheckpointError(f"{where}no config.json; give the base's Hugging Face directory as base_hf_dir")
    return read_mapping(Path(folder, "config.json"))


def _ranks(infos: Mapping[str, TensorInfo]) -> dict[str, int]:
    """Rank of every module's pair, from the half that is there."""
    ranks: dict[str, int] = {}
    for name, info in infos.items():
        module, part = name.removesuffix(".weight").rsplit(".", 1)
        if len(info.shape) != 2:
            raise CheckpointError(f"{name}: shape {info.shape}; adapters of other modules than linears are not supported")
        if part == PARTS[0] or module not in ranks:
            ranks[module] = info.shape[0 if part == PARTS[0] else 1]
    return ranks


def _ranks_of_files(mm: MMDirectory, topology: Topology, known: Mapping[str, Linear]) -> dict[str, int]:
    """As ``_ranks``, from the files of the first tensor-parallel rank, which has a part of every pair."""
    infos: dict[str, TensorInfo] = {}
    for pp_rank in range(topology.pipeline):
        for vp_rank, tensors in enumerate(chunks_of(load_rank_file(mm.file(Rank(0, pp_rank), topology)))):
            chunk = topology.chunk(pp_rank, vp_rank)
            modules = local_modules(known, chunk)
            for local, tensor in tensors.items():
                match = _LOCAL_KEY.fullmatch(local)
                if match and match[1] in modules and isinstance(tensor, torch.Tensor):
                    infos[f"{modules[match[1]]}.{match[2]}.weight"] = TensorInfo(tuple(tensor.shape), tensor.dtype)
    if not infos:
        raise CheckpointError(f"{mm.folder}: holds no tensor named ...lora_A.default.weight of a linear of this model; give the folder of an adapter")
    return _ranks(infos)


def read_adapter_manifest(directory: Path) -> AdapterManifest | None:
    """The manifest of an ``mp_rank`` directory of an adapter; None where it has none.

    Raises:
        CheckpointError: it is damaged.
    """
    path = directory / ADAPTER_MANIFEST
    if not path.is_file():
        return None
    try:
        return parse_section(AdapterManifest, read_mapping(path), str(path))
    except ConfigError as error:
        raise CheckpointError(f"{error}; convert again") from None


def adapter_manifest_text(adapter: Adapter, topology: Topology, padded_vocab: int) -> str:
    """Content of ``tangram_adapter.json``."""
    manifest = AdapterManifest(
        family=adapter.family.name,
        tensor_parallel=topology.tensor,
        vision_tensor_parallel=topology.tensor_of("vision"),
        expert_parallel=topology.expert,
        vit_pp_layers=[list(row) for row in topology.vision],
        llm_pp_layers=[list(row) for row in topology.text],
        padded_vocab=padded_vocab,
        key_layout=adapter.key_layout,
        hf_config=dict(adapter.base_config),
    )
    return json.dumps(manifest.model_dump(), indent=2) + "\n"
