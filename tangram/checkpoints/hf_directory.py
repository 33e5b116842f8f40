"""A Hugging Face model directory as a reader of canonical tensors."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import torch

from tangram.checkpoints.expert_stacks import turned, turned_stacks
from tangram.checkpoints.links import require_inside
from tangram.checkpoints.reader import TensorInfo, check_rectangle, count_elements, files_identity, same_bits
from tangram.checkpoints.safetensors_io import SafetensorsFile
from tangram.config.model import ModelConfig
from tangram.config.parsing import read_mapping
from tangram.errors import CheckpointError, name_some
from tangram.families.base import Family, get_family
from tangram.placement.blocks import canonical_shapes, check_names
from tangram.placement.table import Rule, Shape
from tangram.placement.topology import Topology

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TIED_HEAD = "lm_head.weight"
"""Name under which some files hold the head although config.json ties it to the embedding."""
_QUANTISED = (
    *("_scale_inv", ".weight_scale", ".input_scale", ".weight_scale_2", "_proj_scale"),
    *(".scales", ".qweight", ".qzeros", ".g_idx", ".absmax", ".SCB"),
)
"""Ends of the names of scales and packed weights: block-scaled and per-tensor fp8, NVFP4, GPTQ, AWQ, bitsandbytes."""
_UNQUANTISED = "give the directory of the bf16, fp16 or fp32 weights"


class HFDirectory:
    """Weights and config of a Hugging Face directory.

    Both key layouts are read: the hub's (``visual.*``, ``model.layers.*``) and that of ``state_dict()`` (``model.visual.*``,
    ``model.language_model.*``), and stacked experts either way round; see ``expert_stacks``. Files are mapped, not loaded.
    ``bytes_read`` counts the bytes of all rectangles handed out.

    Args:
        path: the directory.
        family: None: the one that ``model_type`` of config.json names.

    Raises:
        ConfigError: config.json is missing or unusable.
        CheckpointError: no weights, a missing or damaged shard, an index that disagrees with the shards, or mixed layouts.
    """

    def __init__(self, path: str | Path, family: Family | None = None) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path}: no such directory")
        self.config: dict[str, Any] = read_mapping(self.path / "config.json")
        self.family = family or get_family(str(self.config.get("model_type")))
        self.bytes_read = 0
        self._lock = Lock()
        for section in (self.config, *self.config.values()):
            self._refuse_quantised(section.get("quantization_config") if isinstance(section, dict) else None)
        self.shards: dict[str, list[str]] = {}
        """Keys, as the files have them, of every file."""
        self._files: dict[str, SafetensorsFile] = {}
        self._find_files()
        self._refuse_scales()
        self.layout: Literal["hub", "state_dict"] = self._find_layout()
        self._places = {self.family.canonical_name(key): (file, key) for file, keys in self.shards.items() for key in keys}

    def _find_files(self) -> None:
        index_path = self.path / INDEX
        present = sorted(file.name for file in self.path.glob("*.safetensors"))
        weight_map = self._read_index(index_path) if index_path.exists() else None
        if weight_map is None:
            if not present:
                raise CheckpointError(f"{self.path}: no *.safetensors file and no {INDEX}; give a directory with safetensors weights")
            self._check_numbering(present)
            wanted = present
        else:
            wanted = sorted(set(weight_map.values()))
            if SINGLE in present and SINGLE not in wanted:
                raise CheckpointError(f"{self.path}: holds both {SINGLE} and {INDEX}, which does not name it; remove one of them")
            absent = sorted(set(wanted) - set(present))
            if absent:
                raise CheckpointError(f"{index_path}: {len(absent)} of {len(wanted)} shards are missing: {name_some(absent)}; copy or download them")
        holders: dict[str, str] = {}
        for name in wanted:
            require_inside(self.path, self.path / name)
            file = SafetensorsFile(self.path / name)
            for key in file.infos:
                if key in holders:
                    raise CheckpointError(f"{self.path}: {key} is in {holders[key]} and in {name}; remove the files that do not belong to this model")
                holders[key] = name
            self._files[name] = file
            self.shards[name] = list(file.infos)
        if weight_map is not None:
            self._check_index(index_path, weight_map, holders)

    def _refuse_quantised(self, quantisation: Any) -> None:
        if quantisation:
            found = quantisation if isinstance(quantisation, dict) else {}
            block = found.get("weight_block_size")
            what = str(found.get("quant_method", quantisation)) + (f", blocks of {' x '.join(map(str, block))}" if isinstance(block, list) else "")
            raise CheckpointError(f"{self.path}: the weights are quantised ({what}), which is not read; {_UNQUANTISED}")

    def _refuse_scales(self) -> None:
        """Scales show what config.json keeps quiet about."""
        scales = [key for keys in self.shards.values() for key in keys if key.endswith(_QUANTISED)]
        if scales:
            what = f"{len(scales)} tensors such as {min(scales)}"
            raise CheckpointError(f"{self.path}: the weights are quantised ({what}), which is not read; {_UNQUANTISED}")

    def _read_index(self, path: Path) -> dict[str, str]:
        weight_map = read_mapping(path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{path}: no weight_map, or an empty one; copy or download the file again")
        for key, name in weight_map.items():
            if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name:
                raise CheckpointError(f"{path}: {key} is said to be in {name!r}, which is not the plain name of a file in this directory")
        return weight_map

    def _check_numbering(self, present: list[str]) -> None:
        """Without an index, the shards' own numbering tells whether one is missing."""
        numbered = [m for m in (re.fullmatch(r".*-(\d+)-of-(\d+)\.safetensors", name) for name in present) if m]
        totals = {int(m[2]) for m in numbered}
        if totals and (len(totals) > 1 or {int(m[1]) for m in numbered} != set(range(1, max(totals) + 1))):
            raise CheckpointError(
                f"{self.path}: {len(numbered)} of {max(totals)} shards are there and there is no {INDEX}; copy or download the rest"
            )

    @staticmethod
    def _check_index(path: Path, weight_map: dict[str, str], holders: dict[str, str]) -> None:
        ghosts = [key for key, name in weight_map.items() if holders.get(key) != name]
        if ghosts:
            first = min(ghosts)
            raise CheckpointError(
                f"{path}: {len(ghosts)} of {len(weight_map)} tensors are not in the shard that the index names: {name_some(ghosts)}; "
                f"{first} should be in {weight_map[first]} and is {'in ' + holders[first] if first in holders else 'nowhere'}"
            )
        unlisted = set(holders) - set(weight_map)
        if unlisted:
            raise CheckpointError(f"{path}: the shards hold {len(unlisted)} tensors that the index does not list: {name_some(unlisted)}")

    def _find_layout(self) -> Literal["hub", "state_dict"]:
        keys = [key for keys in self.shards.values() for key in keys]
        hub = [key for key in keys if self.family.canonical_name(key) != key]
        state_dict = [key for key in keys if self.family.canonical_name(key) == key and self.family.hub_name(key) != key]
        if hub and state_dict:
            raise CheckpointError(
                f"{self.path}: mixes two key layouts: {len(hub)} keys like {min(hub)} and {len(state_dict)} like {min(state_dict)}; "
                "the directory holds files of two checkpoints, remove those that do not belong"
            )
        return "state_dict" if state_dict else "hub"

    @cached_property
    def _stored(self) -> dict[str, TensorInfo]:
        """Every tensor as its file holds it."""
        return {name: self._files[file].infos[key] for name, (file, key) in self._places.items()}

    @cached_property
    def _turned(self) -> frozenset[str]:
        """Stacked experts that the files hold as ``[experts, out, in]``. The config is looked at only where there is a stack."""
        if not any(len(info.shape) == 3 for info in self._stored.values()):
            return frozenset()
        rules = [rule for rule in self.table if any(source.stacked for source in rule.sources)]
        return turned_stacks(self._shapes_of(rules), self._stored, str(self.path))

    @cached_property
    def _infos(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo(turned(info.shape), info.dtype) if name in self._turned else info for name, info in self._stored.items()}

    def names(self) -> Mapping[str, TensorInfo]:
        """Every tensor there is.

        Raises:
            CheckpointError: as ``turned_stacks``.
            ConfigError: as ``model``, where there are stacked experts.
        """
        return self._infos

    def read(self, name: str, start: Shape, shape: Shape) -> torch.Tensor:
        check_rectangle(self._infos, name, start, shape, str(self.path))
        file, key = self._places[name]
        with self._lock:
            self.bytes_read += count_elements(shape) * self._infos[name].dtype.itemsize
            if name in self._turned:
                return self._files[file].read(key, turned(start), turned(shape)).transpose(1, 2)
            return self._files[file].read(key, start, shape)

    def close(self) -> None:
        """Let go of all maps; the directory can still be read."""
        for file in self._files.values():
            file.close()

    @property
    def file_bytes(self) -> int:
        """Size of all tensors in the files."""
        return sum(info.nbytes for info in self._infos.values())

    @cached_property
    def model(self) -> ModelConfig:
        """The model that config.json describes.

        Raises:
            ConfigError: as the family's ``from_hf_config``.
        """
        return self.family.from_hf_config(self.config)

    @cached_property
    def table(self) -> list[Rule]:
        """The family's tensor table for this model; its canonical side does not depend on vocabulary padding."""
        return self.family.tensor_table(self.model, self.model.text_decoder.vocab_size)

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Name and shape of every canonical tensor that the model has by its config."""
        return self._shapes_of(self.table)

    def _shapes_of(self, rules: list[Rule]) -> dict[str, Shape]:
        encoder = self.model.image_encoder
        vision = encoder.vision_encoder.num_layers if encoder else 0
        return canonical_shapes(rules, Topology.build(vision_layers=vision, text_layers=self.model.text_decoder.num_layers))

    @property
    def fingerprint(self) -> str:
        """``sha256:`` of config.json and of all headers: equal for equal names, shapes, types and shards."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for name in sorted(self._files):
            digest.update(name.encode())
            digest.update(self._files[name].header)
        return f"sha256:{digest.hexdigest()}"

    @property
    def identity(self) -> str:
        """Changes with ``fingerprint`` and whenever a weight file is touched; see ``reader.identity_of``."""
        return f"{self.fingerprint} {files_identity(self.path / name for name in self._files)}"

    @property
    def embedding(self) -> str | None:
        """Canonical name of the tensor that a tied head repeats; None where the head is a tensor of its own."""
        return next((rule.sources[0].name for rule in self.table if rule.tied), None)

    @property
    def repeats_head(self) -> bool:
        """The files hold a head although the config ties it."""
        return self.embedding is not None and TIED_HEAD in self._infos

    def check_model(self, shapes: Mapping[str, Shape] | None = None) -> None:
        """Check that the files hold exactly the tensors of a model.

        Args:
            shapes: of every canonical tensor; None: those of the model that config.json describes.

        Raises:
            PlacementError: missing or unexpected tensors, with counts and names.
            CheckpointError: a tensor has another shape.
        """
        shapes = self.shapes if shapes is None else shapes
        found = [name for name in self._infos if not (name == TIED_HEAD and self.repeats_head)]
        check_names(found, list(shapes), str(self.path))
        wrong = [name for name, shape in shapes.items() if self._infos[name].shape != shape]
        if wrong:
            first = min(wrong)
            raise CheckpointError(
                f"{self.path}: {len(wrong)} tensors have another shape than the model: {first} has {self._infos[first].shape} in the file and "
                f"{shapes[first]} in the model; config and weights are of different models"
            )

    def check_head(self, start: Shape, shape: Shape) -> None:
        """Check that a head in the files, tied by the config, repeats a rectangle of the embedding.

        Raises:
            CheckpointError: it differs.
        """
        assert self.embedding is not None
        head, embedding = self.read(TIED_HEAD, start, shape), self.read(self.embedding, start, shape)
        if not same_bits(head, embedding):
            raise CheckpointError(
                f"{self.path}: {TIED_HEAD} differs from {self.embedding} in rows {start[0]}..{start[0] + shape[0] - 1}, but config.json ties them; "
                "set tie_word_embeddings to false, or remove the tensor"
            )
