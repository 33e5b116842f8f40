"""Sizes and settings of the demo, chosen by trial so that two cores are enough."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tangram.families.tiny import TinySpec

FAMILY = "qwen2_5_vl"


@dataclass(frozen=True)
class Recipe:
    """One way to run the demo.

    The learning rate and the width of the random weights (1 / sqrt(fan-in), of ``TinySpec``) decide: with the published std of 0.02 a
    model this small sits still for some hundred steps.
    """

    steps: int = 350
    warmup: int = 30
    lr: float = 2e-3
    global_batch_size: int = 32
    micro_batch_size: int = 16
    tensor: int = 2
    pipeline: int = 2
    vit_pp_layers: tuple[int, ...] = (2, 0)
    llm_pp_layers: tuple[int, ...] = (1, 3)
    """The first stage has the vision encoder too, and the last one the head."""
    image_min_pixels: int = 56 * 56
    image_max_pixels: int = 84 * 84
    """easy-VQA's pictures become 56 x 56, 4 tokens; photographs up to 9 tokens."""
    photo_repeats: int = 20
    heldout_per_kind: int = 250
    seed: int = 7

    @property
    def processes(self) -> int:
        return self.tensor * self.pipeline

    @property
    def sizes(self) -> TinySpec:
        """Hidden size 64; the vocabulary is the real one."""
        return TinySpec(hidden=64, text_layers=4, heads=4, kv_heads=2, vision_hidden=64, vision_layers=2, vision_heads=4)


def run_file(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Content of ``run.yaml`` in ``folder``; paths are relative to it."""
    return {
        "backend": "megatron",
        "parallel": {
            "tensor_model_parallel_size": recipe.tensor,
            "pipeline_model_parallel_size": recipe.pipeline,
            "vit_pp_layers": list(recipe.vit_pp_layers),
            "llm_pp_layers": list(recipe.llm_pp_layers),
        },
        "data": {
            "dataset_param": {
                "preprocess_parameters": {
                    "model_name_or_path": "hf_init",
                    "image_min_pixels": recipe.image_min_pixels,
                    "image_max_pixels": recipe.image_max_pixels,
                },
                "basic_parameters": {"dataset": "data/train.json", "dataset_dir": "data"},
            },
            "dataloader_param": {"shuffle": True},
        },
        "model": {"hf_dir": "hf_init", "load": "mm"},
        "features": {"freeze_vision_encoder": False},
        "training": {
            "micro_batch_size": recipe.micro_batch_size,
            "global_batch_size": recipe.global_batch_size,
            "seq_length": 128,
            "train_iters": recipe.steps,
            "seed": recipe.seed,
            "lr": recipe.lr,
            "lr_decay_style": "cosine",
            "min_lr": recipe.lr / 10,
            "lr_warmup_iters": recipe.warmup,
            "weight_decay": 0.0,
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
            "clip_grad": 1.0,
            "loss_type": "per_token_loss",
            "save": "ckpt",
            "metrics_file": "metrics.jsonl",
        },
    }


def write_run_file(recipe: Recipe, folder: Path) -> Path:
    """Write ``run.yaml`` and return its path."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run_file(recipe, folder), sort_keys=False), encoding="utf-8")
    return path
