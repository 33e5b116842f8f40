"""What is in a checkpoint directory, told from headers and names; also of one that is incomplete or damaged."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tangram.checkpoints.conversion import check_family, whole
from tangram.checkpoints.copier import show
from tangram.checkpoints.dcp_manifest import find_checkpoint
from tangram.checkpoints.dcp_manifest import read_manifest as read_training_manifest
from tangram.checkpoints.dcp_planner import SafeReader, check_model_names, read_metadata
from tangram.checkpoints.dcp_state import split_key
from tangram.checkpoints.find_split import RANK_FOLDER, chunks_of, find_split
from tangram.checkpoints.hf_directory import HFDirectory
from tangram.checkpoints.kinds import kind_of_weights
from tangram.checkpoints.look_options import InspectOptions
from tangram.checkpoints.lora_inspect import describe_adapter
from tangram.checkpoints.manifest import Manifest, read_manifest
from tangram.checkpoints.mp_rank import MMDirectory
from tangram.checkpoints.open import open_checkpoint
from tangram.checkpoints.rank_file import load_rank_file
from tangram.checkpoints.reader import TensorInfo, count_elements
from tangram.checkpoints.safetensors_io import SafetensorsFile
from tangram.config.model import ModelConfig
from tangram.config.parsing import read_mapping
from tangram.errors import TangramError
from tangram.families.base import Family, get_family, has_family
from tangram.placement.blocks import canonical_shapes

LORA_NAME = re.compile(r".+\.lora_[AB]\.default\.weight")


@dataclass
class Inspection:
    """A description of one directory. What could not be found out is None or empty; why stands in ``problems``."""

    path: str
    format: str
    family: str | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    """Layers, widths and vocabulary, by config.json."""
    split: dict[str, Any] = field(default_factory=dict)
    dtypes: dict[str, int] = field(default_factory=dict)
    """Stored tensors per element type."""
    tensors: int = 0
    """Stored; in a split checkpoint the parts of one tensor count each."""
    parameters: int = 0
    """Elements of the model's tensors, each counted once; of the stored ones where the model is not known."""
    bytes: int = 0
    """Of stored tensors."""
    files: int = 0
    file_bytes: int = 0
    tied: bool | None = None
    key_layout: str | None = None
    step: int | None = None
    optimizer: bool | None = None
    """Whether optimizer state is stored."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the manifest says besides, and for adapters rank, alpha and targets."""
    problems: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 where nothing is wrong, else 1."""
        return 1 if self.problems else 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        rows = [("path", self.path), ("format", self.format), ("family", self.family or "unknown")]
        rows += [(name.replace("_", " "), f"{value}") for name, value in (*self.sizes.items(), *self.split.items())]
        rows += [
            ("element types", ", ".join(f"{count} {name}" for name, count in self.dtypes.items()) or "none"),
            ("tensors", f"{self.tensors}, {self.parameters} parameters, {self.bytes} bytes"),
            ("files", f"{self.files}, {self.file_bytes} bytes"),
        ]
        others = {"tied head": self.tied, "key layout": self.key_layout, "step": self.step, "optimizer state": self.optimizer, **self.facts}
        words = {True: "yes", False: "no"}
        rows += [(name, words[value] if isinstance(value, bool) else _flat(value)) for name, value in others.items() if value is not None]
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value}" for name, value in rows]
        return "\n".join([*lines, *(["problems:"] if self.problems else []), *(f"  {problem}" for problem in self.problems)])

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Turn a fault of the block into a problem, once."""
        try:
            yield
        except TangramError as error:
            if str(error) not in self.problems:
                self.problems.append(str(error))

    def add_tensors(self, infos: Mapping[str, TensorInfo]) -> None:
        """Count stored tensors."""
        counts = Counter(self.dtypes)
        counts.update(show(info.dtype) for info in infos.values())
        self.dtypes = dict(sorted(counts.items()))
        self.tensors += len(infos)
        self.bytes += sum(info.nbytes for info in infos.values())

    def add_files(self, files: list[Path]) -> None:
        self.files = len(files)
        self.file_bytes = sum(file.stat().st_size for file in files if file.is_file())

    def add_model(self, config: Mapping[str, Any], family: Family) -> ModelConfig:
        """Family, sizes and tied head of a config."""
        self.family = family.name
        model = family.from_hf_config(config)
        text, encoder = model.text_decoder, model.image_encoder
        self.sizes = {"text_layers": text.num_layers, "text_hidden_size": text.hidden_size, "vocabulary": text.vocab_size}
        if encoder is not None:
            vision = encoder.vision_encoder
            self.sizes |= {"vision_layers": vision.num_layers, "vision_hidden_size": vision.hidden_size}
        self.tied = not text.untie_embeddings_and_output_weights
        shapes = canonical_shapes(family.tensor_table(model, text.vocab_size), whole(model))
        self.parameters = sum(map(count_elements, shapes.values()))
        return model


def inspect(path: str | Path, hf_dir: str | Path | None = None) -> Inspection:
    """Describe a directory and check that it is whole. Tensors' values are not read.

    Args:
        hf_dir: directory with the config.json of a checkpoint that holds none.

    Raises:
        CheckpointError: no directory there, or it holds no weights at all.
    """
    path = Path(path)
    kind = kind_of_weights(path)
    found = Inspection(str(path), kind)
    if kind == "LoRA adapter":
        describe_adapter(found, path, hf_dir)
    elif kind == "Hugging Face directory":
        _describe_hf(found, path)
    elif kind == "mp_rank directory":
        _describe_ranks(found, path, hf_dir)
    else:
        _describe_training(found, path, hf_dir)
    return found


def run_inspect(options: InspectOptions, families: tuple[str, ...] = ()) -> Inspection:
    """``inspect`` as the command line asks for it.

    Args:
        families: that the converter is for, empty: any; another one in the directory is a problem.

    Raises:
        TangramError: as ``inspect``.
    """
    found = inspect(options.path, options.hf_config.hf_dir)
    if families and found.family is not None:
        with found.noting():
            check_family(get_family(found.family), families, found.path)
    return found


def inspection_text(found: Inspection, as_json: bool) -> str:
    """The table, or JSON."""
    return json.dumps(found.as_dict(), indent=1) if as_json else str(found)


def _describe_hf(found: Inspection, path: Path) -> None:
    with found.noting():
        config = read_mapping(path / "config.json")
        found.add_model(config, get_family(str(config.get("model_type"))))
    stored: dict[str, TensorInfo] = {}
    files = sorted(path.glob("*.safetensors"))
    found.add_files(files)
    for file in files:
        with found.noting():
            infos = SafetensorsFile(file).infos
            found.add_tensors(infos)
            stored |= infos
    if found.family is None:
        found.parameters = sum(count_elements(info.shape) for info in stored.values())
    if not found.problems:
        with found.noting():
            hf = HFDirectory(path)
            found.key_layout = hf.layout
            hf.check_model()
            if hf.repeats_head:
                found.facts["head"] = f"stored, though config.json ties it to {hf.embedding}"


def _describe_ranks(found: Inspection, path: Path, hf_dir: str | Path | None) -> None:
    manifest = config = family = None
    with found.noting():
        manifest = read_manifest(path)
    if manifest is not None:
        config = manifest.hf_config
        found.facts |= {"source": manifest.source, "written by": f"tangram {manifest.package_version}"}
    elif hf_dir is not None:
        with found.noting():
            config = read_mapping(Path(hf_dir, "config.json"))
    if config is not None:
        with found.noting():
            family = get_family(manifest.family if manifest is not None else str(config.get("model_type")))
            found.add_model(config, family)
    folder = next(path.glob("*/mp_rank_*")).parent
    with found.noting():
        folder = MMDirectory(path).folder
    _describe_rank_files(found, folder)
    with found.noting():
        found.split = _split(manifest, folder)
    if config is None:
        found.facts["not checked"] = "names and shapes, since neither a manifest nor --hf tells the model"
    elif not found.problems and not found.format.startswith("LoRA"):
        with found.noting():
            open_checkpoint(path, config=config)


def _split(manifest: Manifest | None, folder: Path) -> dict[str, Any]:
    """As the manifest says, else as the files tell it."""
    told = manifest or find_split(folder)
    tensor, expert = (manifest.tensor_parallel, manifest.expert_parallel) if manifest else (told.tensor, told.expert)  # type: ignore[union-attr]
    split: dict[str, Any] = {
        "tensor_parallel": tensor,
        "pipeline_parallel": len(told.llm_pp_layers[0]),
        "virtual_pipeline": len(told.llm_pp_layers),
        "expert_parallel": expert,
        "vit_pp_layers": told.vit_pp_layers,
        "llm_pp_layers": told.llm_pp_layers,
    }
    if manifest is not None and manifest.vision_tensor_parallel:
        split["vision_tensor_parallel"] = manifest.vision_tensor_parallel
    return split | {"canonical_form": told.canonical_form, "vit_only": told.vit_only}


def _describe_rank_files(found: Inspection, folder: Path) -> None:
    files = sorted(folder.glob("mp_rank_*/*.pt"))
    found.add_files(files)
    found.step = int(folder.name.removeprefix("iter_")) if folder.name != "release" else None
    found.optimizer = any(file.name == "distrib_optim.pt" for file in files)
    elements = others = 0
    pairs: dict[str, tuple[int, ...]] = {}
    for entry in sorted(folder.glob("mp_rank_*")):
        if not RANK_FOLDER.fullmatch(entry.name):
            continue
        with found.noting():
            state = load_rank_file(entry / "model_optim_rng.pt")
            found.optimizer = found.optimizer or state.get("optimizer") is not None
            for chunk in chunks_of(state):
                tensors = {name: value for name, value in chunk.items() if isinstance(value, torch.Tensor)}
                found.add_tensors({name: TensorInfo(tuple(value.shape), value.dtype) for name, value in tensors.items()})
                elements += sum(value.numel() for value in tensors.values())
                pairs |= {name: tuple(value.shape) for name, value in tensors.items() if LORA_NAME.fullmatch(name)}
                others += sum(not LORA_NAME.fullmatch(name) for name in tensors)
    if found.family is None:
        found.parameters = elements
    if pairs and not others:
        found.format = "LoRA adapter, mp_rank directory without adapter_config.json"
        ranks = {shape[0] for name, shape in pairs.items() if ".lora_A." in name}
        targets = {name.split(".lora_")[0].rpartition(".")[2] for name in pairs}
        found.facts |= {"rank": ", ".join(map(str, sorted(ranks))), "alpha": "unknown", "targets": ", ".join(sorted(targets))}


def _describe_training(found: Inspection, path: Path, hf_dir: str | Path | None) -> None:
    folder = path
    model = family = None
    with found.noting():
        folder = find_checkpoint(path)
        manifest = read_training_manifest(folder)
        found.step, found.optimizer, found.family = manifest.step, manifest.optimizer, manifest.family
        found.split = _of_training(manifest.split)
        found.facts |= {"folder": folder.name, "samples": manifest.consumed_samples, "seed": manifest.seed, "written by": dict(manifest.packages)}
        config = manifest.hf_config or (read_mapping(Path(hf_dir, "config.json")) if hf_dir is not None else None)
        if config and "fully_shard" in manifest.split and not has_family(manifest.family):
            found.facts["not checked"] = f"names and shapes: {manifest.family} is no family here, so its class alone tells them (or --plugin)"
        elif config:
            family = get_family(manifest.family)
            model = found.add_model(config, family)
    found.add_files(sorted(file for file in folder.rglob("*") if file.is_file()))
    with found.noting():
        metadata = read_metadata(folder)
        stored = {}
        for key, entry in metadata.state_dict_metadata.items():
            kind, name = split_key(key)
            if kind == "model":
                stored[name] = TensorInfo(tuple(entry.size), entry.properties.dtype)  # type: ignore[union-attr]
        found.add_tensors(stored)
        if model is None:
            found.parameters = sum(count_elements(info.shape) for info in stored.values())
        _check_data_files(found, folder, SafeReader(folder, metadata))
        if model is not None and family is not None:
            shapes = canonical_shapes(family.tensor_table(model, model.text_decoder.vocab_size), whole(model))
            check_model_names(metadata, shapes, str(folder))


def _of_training(split: Mapping[str, Any]) -> dict[str, Any]:
    """The axes of the backend that wrote it. The fsdp2 backend splits no layers: what its manifests say of stages stands for none."""
    if "fully_shard" not in split:
        return dict(split)
    return {name: size for name, size in split.items() if name not in ("tensor", "pipeline", "virtual", "vit_pp_layers", "llm_pp_layers")}


def _check_data_files(found: Inspection, folder: Path, reader: SafeReader) -> None:
    """Every file that the metadata names must be there and long enough."""
    ends: dict[str, int] = {}
    for part in reader.read_metadata().storage_data.values():
        ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    for name, end in sorted(ends.items()):
        file = folder / name
        if not file.is_file():
            found.problems.append(f"{file}: is missing; use another checkpoint")
        elif file.stat().st_size < end:
            found.problems.append(f"{file}: {file.stat().st_size} bytes, but its last part ends at {end}; it is truncated, use another checkpoint")


def _flat(value: Any) -> str:
    return ", ".join(f"{key} {part}" for key, part in value.items()) if isinstance(value, Mapping) else str(value)
