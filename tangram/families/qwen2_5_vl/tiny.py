"""A small random Qwen2.5-VL: Qwen2-VL's text decoder, and a vision tower with windows and a gated MLP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tangram.families.qwen2_vl.tiny import hf_config
from tangram.families.tiny import DEFAULT_SPEC, TinySpec, write_checkpoint


def vision_config(spec: TinySpec) -> dict[str, Any]:
    """Windows of 2 x 2 merged cells, so that they matter on small pictures; every second block attends to the whole frame."""
    return {
        "depth": spec.vision_layers,
        "hidden_size": spec.vision_hidden,
        "out_hidden_size": spec.hidden,
        "intermediate_size": spec.vision_ffn or 2 * spec.vision_hidden,
        "num_heads": spec.vision_heads,
        "hidden_act": "silu",
        "in_channels": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 56,
        "fullatt_block_indexes": list(range(1, spec.vision_layers, 2)),
        "tokens_per_second": 2,
    }


def write_tiny(out: Path, seed: int, tied: bool, spec: TinySpec = DEFAULT_SPEC, *, force: bool = False) -> None:
    """See ``TinyWriter``."""
    write_checkpoint(out, hf_config(spec, tied, "qwen2_5_vl", vision_config(spec)), "Qwen2_5_VLProcessor", seed, spec, force)
