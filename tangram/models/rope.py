"""Rotary angles: 2-D for vision encoders, 1-D and multimodal 3-D (mRoPE) for text decoders.

All give angles [s, b, 1, head_dim] in fp32, the two halves of the last axis equal, as megatron-core's rotary code takes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def inverse_frequencies(dim: int, theta: float, device: torch.device) -> Tensor:
    """``theta^(-2k/dim)`` for k in 0..dim/2-1, fp32 (Su et al. 2021)."""
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64, device=device).float() / dim))


def text_angles(position_ids: Tensor, head_dim: int, theta: float, mrope_section: Sequence[int] | None, *, interleaved: bool = False) -> Tensor:
    """Angles of text positions.

    Args:
        position_ids: [3, b, s], positions in time, height and width.
        mrope_section: how many frequencies take each of the three; None: all take the first.
        interleaved: frequencies go to the three in turn, as long as height and width are due some, and the rest to time; else in three runs.

    Source: Wang et al. 2024 (Qwen2-VL), section 2.1, and transformers ``apply_multimodal_rotary_pos_emb``; interleaved: transformers
    ``Qwen3VLTextRotaryEmbedding``.
    """
    frequencies = inverse_frequencies(head_dim, theta, position_ids.device)
    angles = position_ids.float()[..., None] * frequencies  # [3, b, s, head_dim / 2]
    if mrope_section is None:
        half = angles[0]
    elif interleaved:
        half = angles[0].clone()
        for axis in (1, 2):
            turns = slice(axis, 3 * mrope_section[axis], 3)
            half[..., turns] = angles[axis, ..., turns]
    else:
        half = torch.cat([part[axis] for axis, part in enumerate(angles.split(list(mrope_section), dim=-1))], dim=-1)
    return torch.cat([half, half], dim=-1).transpose(0, 1)[:, :, None]


def vision_angles(grids: Sequence[tuple[int, int, int]], merge: int, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Angles of patches: half of the frequencies take the row, half the column.

    Args:
        grids: (t, h, w) in patches of each image, in the order of the patches; within a frame, patches are ordered by squares of
            ``merge * merge``.
    """
    frequencies = inverse_frequencies(head_dim // 2, theta, device)
    longest = max(max(h, w) for _, h, w in grids)
    table = torch.arange(longest, device=device).float()[:, None] * frequencies  # [longest, head_dim / 4]
    halves = []
    for t, h, w in grids:
        cells = (h // merge, merge, w // merge, merge)
        rows = torch.arange(h, device=device)[:, None].expand(h, w).reshape(cells).transpose(1, 2).flatten()
        columns = torch.arange(w, device=device)[None, :].expand(h, w).reshape(cells).transpose(1, 2).flatten()
        halves.append(torch.cat([table[rows], table[columns]], dim=-1).repeat(t, 1))
    half = torch.cat(halves)
    return torch.cat([half, half], dim=-1)[:, None, None]
