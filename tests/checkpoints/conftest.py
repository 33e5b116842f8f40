"""Small Hugging Face directories, written with the safetensors package. Tests reach the helpers below through the fixture ``kit``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tangram.checkpoints.convert import convert_hf_to_mm, convert_mm_to_hf
from tangram.checkpoints.options import ToHFOptions, ToMMOptions
from tangram.families.base import get_family
from tangram.placement.blocks import canonical_shapes
from tangram.placement.topology import Topology
from tests.weights_kit import write_adapter

torch.set_num_threads(1)

GOLDEN = Path(__file__).parents[1] / "data" / "golden"


@pytest.fixture(scope="session")
def golden() -> Path:
    return GOLDEN


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    helpers = (golden_config, write_hf, shard, hf_tensors, edit, to_mm, to_hf, rank_file, load_rank, assert_same, files)
    return SimpleNamespace(**{helper.__name__: helper for helper in helpers})


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A base and a LoRA adapter of some of its linears."""
    base = write_hf(tmp_path / "base", dtype=torch.float32)
    return base, write_adapter(tmp_path / "lora", base)


def golden_config(family: str = "qwen2_5_vl") -> dict[str, Any]:
    return json.loads((GOLDEN / f"hf_{family}" / "config.json").read_text())


def write_hf(
    path: Path,
    *,
    family: str = "qwen2_5_vl",
    tied: bool = False,
    heads: int = 8,
    groups: int = 4,
    hidden: int = 32,
    vocab: int = 320,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    vision: dict[str, int] | None = None,
    fill: Callable[[str, tuple[int, ...]], torch.Tensor] | None = None,
) -> Path:
    """Write a random model in the hub's key layout; ``fill`` gives other values by canonical name and shape."""
    config = golden_config(family)
    half = hidden // heads // 2
    for section in (config, config["text_config"]):
        section.update(num_attention_heads=heads, num_key_value_heads=groups, hidden_size=hidden, vocab_size=vocab, tie_word_embeddings=tied)
        section["rope_scaling"]["mrope_section"] = [half - half // 2, half // 2, 0]
    config["vision_config"]["out_hidden_size" if family == "qwen2_5_vl" else "hidden_size"] = hidden
    config["vision_config"].update(vision or {})
    config["dtype"] = str(dtype).removeprefix("torch.")
    found = get_family(family)
    model = found.from_hf_config(config)
    shapes = canonical_shapes(found.tensor_table(model, vocab), Topology.build(vision_layers=4, text_layers=4))
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: fill(name, shape) if fill else torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    path.mkdir(parents=True)
    save_file({found.hub_name(name): tensor.to(dtype) for name, tensor in tensors.items()}, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config, indent=1))
    return path


def shard(path: Path, count: int = 3) -> None:
    """Cut a directory's one file into several, with an index."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for i in range(count):
        part = names[i::count]
        file = f"model-{i + 1:05}-of-{count:05}.safetensors"
        save_file({name: tensors[name].contiguous() for name in part}, path / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def hf_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory, by the safetensors package."""
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def edit(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of a one-file directory."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def to_mm(hf: Path, mm: Path, *, family: str = "qwen2_5_vl", **parallel: Any) -> Any:
    options = {"mm_dir": str(mm), "hf_config": {"hf_dir": str(hf)}, "parallel_config": parallel}
    return convert_hf_to_mm(ToMMOptions.model_validate(options), family)


def to_hf(mm: Path, hf: Path, out: Path, *, family: str = "qwen2_5_vl", **parallel: Any) -> Any:
    options = {"mm_dir": str(mm), "hf_config": {"hf_dir": str(hf)}, "save_hf_dir": str(out), "parallel_config": parallel}
    return convert_mm_to_hf(ToHFOptions.model_validate(options), family)


def rank_file(mm: Path, name: str) -> Path:
    return mm / "release" / name / "model_optim_rng.pt"


def load_rank(mm: Path, name: str) -> dict[str, Any]:
    return torch.load(rank_file(mm, name), weights_only=True)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Equal names, types, shapes and bits."""
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*")) if root.exists() else []
