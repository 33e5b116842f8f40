"""A rank's part of ``test_media_share``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from tangram.config.model import Grid, VisionEncoderConfig
from tangram.config.parsing import read_mapping
from tangram.families.base import get_family
from tangram.models.media_balance import BalancedMedia
from tangram.models.media_share import MediaShare

GRIDS = [[(1, 8, 8), (1, 2, 2), (1, 4, 8), (1, 4, 8)], []]


Found = tuple[int, list[int], list[float]]


def dealt(config: str) -> dict[str, tuple[Found, list[int]]]:
    """``_encode``'s, and the numbers of the media encoded: of two data-parallel ranks with media of their own, and of two copies of the encoder that
    have the same, on one data-parallel rank."""
    model = get_family("qwen2_5_vl").from_hf_config(read_mapping(config))
    assert model.image_encoder is not None
    section = model.image_encoder.vision_encoder
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    both, device = dist.group.WORLD, torch.device("cpu")
    alone = [dist.new_group([number]) for number in range(2)][rank]
    assert both is not None
    balanced = BalancedMedia(section, GRIDS[rank], both, 1, device)
    copies = BalancedMedia(section, GRIDS[0], alone, 1, device, both)
    shared = MediaShare(section, GRIDS[0], None, both)
    return {
        "ranks": (_encode(section, balanced, GRIDS[rank], 1 + rank), [number for _, number in balanced.dealt[rank]]),
        "copies, balanced": (_encode(section, copies, GRIDS[0], 1), [number for _, number in copies.dealt[0]]),
        "copies": (_encode(section, shared, GRIDS[0], 1), shared.own),
    }


def _encode(section: VisionEncoderConfig, share: BalancedMedia | MediaShare, grids: Sequence[Grid], weight: float) -> Found:
    """Patches that this rank encodes; of its own media, the patch numbers that come back; the gradients of what it encoded.

    The patches of medium k are numbers from 100 k on; a tower that gives the first patch of each token stands for the real one.
    """
    pixels = [
        (100 * number + torch.arange(t * h * w, dtype=torch.float32))[:, None].expand(-1, section.patch_width)
        for number, (t, h, w) in enumerate(grids)
    ]
    encoded = share.own_pixels(pixels, torch.float32, torch.device("cpu")).requires_grad_()
    rows = share.collect(encoded[:: section.spatial_merge_size**2, :1])
    (rows * weight).sum().backward()
    assert encoded.grad is not None
    return len(encoded), rows[:, 0].int().tolist(), encoded.grad[:, 0].tolist()
