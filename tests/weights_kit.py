"""Small training checkpoints and LoRA adapters of a Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tangram.checkpoints.conversion import whole
from tangram.checkpoints.dcp_manifest import RunFacts
from tangram.checkpoints.hf_directory import HFDirectory
from tangram.checkpoints.load_hf import load_hf
from tangram.checkpoints.manager import CheckpointManager
from tangram.placement.blocks import place


def to_training(path: Path, folder: Path, step: int = 7, with_config: bool = True) -> Path:
    """A training checkpoint with the weights of a directory, without optimizer state; returns its folder."""
    hf = HFDirectory(path)
    topology = whole(hf.model)
    placement = place(hf.table, topology, 0, topology.chunk(0))
    dtype = next(iter(hf.names().values())).dtype
    parameters = {name: torch.nn.Parameter(torch.empty(tensor.shape, dtype=dtype)) for name, tensor in placement.tensors.items()}
    load_hf(hf, [placement], [parameters])
    facts = RunFacts(hf.family.name, topology, 1, hf.config if with_config else {}, "tok", "data", 42, {"lr": 0.1})
    manager = CheckpointManager(facts, [(placement.chunk, placement, parameters)], hf.shapes)
    return manager.save(folder, step, 8 * step)


def write_adapter(
    path: Path,
    base: Path,
    *,
    targets: tuple[str, ...] = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    rank: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    rename: Callable[[str], str] = lambda module: module,
    ranks: Callable[[str], int] | None = None,
    **config: Any,
) -> Path:
    """A random PEFT adapter of the modules of a directory whose names end in one of ``targets``, named as the directory's own files are.

    Args:
        rename: module name in the base's files -> in the adapter's.
        ranks: rank by module name; None: ``rank``.
        config: more keys of adapter_config.json.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for file in sorted(base.glob("*.safetensors")):
        for key, weight in load_file(file).items():
            module = key.removesuffix(".weight")
            if key == module or weight.dim() != 2 or not any(module == t or module.endswith(f".{t}") for t in targets):
                continue
            r = ranks(module) if ranks else rank
            for part, shape in (("lora_A", (r, weight.shape[1])), ("lora_B", (weight.shape[0], r))):
                tensors[f"base_model.model.{rename(module)}.{part}.weight"] = (torch.randn(shape, generator=generator) * 0.1).to(dtype)
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    content = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(base),
        "bias": "none",
        "fan_in_fan_out": False,
        "lora_alpha": 16,
        "lora_dropout": 0.05,
        "modules_to_save": None,
        "r": rank,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": list(targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    (path / "adapter_config.json").write_text(json.dumps({**content, **config}, indent=2))
    return path
