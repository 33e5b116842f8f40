"""A model of plain parameters laid out by Qwen2.5-VL's real table, and what three steps of AdamW make of its unsplit tensors.

The oracle is torch's own AdamW on whole canonical tensors: it knows nothing of splits, buffers or checkpoints.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cache

import torch

from tangram.families.qwen2_5_vl import QWEN2_5_VL
from tangram.placement.blocks import Placement, canonical_shapes, place
from tangram.placement.table import Rule, Shape, padded_vocabulary
from tangram.placement.topology import Topology

VOCABULARY = 37  # odd: padded at every tensor-parallel size above 1
ADAM = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}


def hf_config(tied: bool) -> dict[str, object]:
    return {
        "model_type": "qwen2_5_vl",
        "tie_word_embeddings": tied,
        "image_token_id": 30,
        "video_token_id": 31,
        "vision_start_token_id": 32,
        "text_config": {
            "num_hidden_layers": 4, "hidden_size": 16, "intermediate_size": 12, "num_attention_heads": 4, "num_key_value_heads": 2,
            "vocab_size": VOCABULARY, "max_position_embeddings": 64, "hidden_act": "silu", "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 0]},
        },
        "vision_config": {
            "depth": 2, "hidden_size": 16, "intermediate_size": 20, "num_heads": 4, "in_channels": 3, "patch_size": 2, "temporal_patch_size": 2,
            "spatial_merge_size": 2, "window_size": 8, "fullatt_block_indexes": [1], "tokens_per_second": 2, "hidden_act": "silu",
        },
    }  # fmt: skip


def split(tensor: int = 1, vit: list[list[int]] | None = None, llm: list[list[int]] | None = None) -> Topology:
    return Topology.build(vision_layers=2, text_layers=4, tensor=tensor, vit_pp_layers=vit or [[2]], llm_pp_layers=llm or [[4]])


def table(topology: Topology, tied: bool) -> list[Rule]:
    return QWEN2_5_VL.tensor_table(QWEN2_5_VL.from_hf_config(hf_config(tied)), padded_vocabulary(VOCABULARY, topology.tensor))


def shapes(topology: Topology, tied: bool) -> dict[str, Shape]:
    return canonical_shapes(table(topology, tied), topology)


def placements(topology: Topology, tied: bool, tp_rank: int, pp_rank: int) -> list[Placement]:
    return [place(table(topology, tied), topology, tp_rank, topology.chunk(pp_rank, vp)) for vp in range(topology.virtual)]


def drawn(name: str, salt: str, shape: Shape) -> torch.Tensor:
    """Numbers that depend on the name alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(f"{salt}:{name}".encode())))


def start(name: str, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    return drawn(name, "parameter", shape).to(dtype)


def gradient(name: str, step: int, shape: Shape) -> torch.Tensor:
    return drawn(name, f"gradient {step}", shape)


@dataclass(frozen=True)
class Truth:
    """A canonical tensor after some steps."""

    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


@cache
def truth(name: str, shape: Shape, steps: int, dtype: torch.dtype) -> Truth:
    """What torch's AdamW makes of a whole tensor that starts in ``dtype`` and is updated in fp32."""
    master = torch.nn.Parameter(start(name, shape, dtype).float())
    adam = torch.optim.AdamW([master], **ADAM)  # type: ignore[arg-type]
    for step in range(steps):
        master.grad = gradient(name, step, shape)
        adam.step()
    state = adam.state[master]
    return Truth(master.detach(), state["exp_avg"], state["exp_avg_sq"])


def cut(placement: Placement, name: str, whole: dict[str, torch.Tensor]) -> torch.Tensor:
    """The local tensor ``name``, from whole canonical tensors; padding is zero."""
    tensor = placement.tensors[name]
    local = torch.zeros(tensor.shape, dtype=next(iter(whole.values())).dtype)
    for block in tensor.blocks:
        if block.canonical is not None:
            local[block.local_slices] = whole[block.canonical][block.canonical_slices]
    return local
