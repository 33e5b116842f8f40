"""A rank's part of ``test_media_share``."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tangram.config.parsing import read_mapping
from tangram.families.base import get_family
from tangram.models.media_balance import BalancedMedia

GRIDS = [[(1, 8, 8), (1, 2, 2), (1, 4, 8), (1, 4, 8)], []]


def balanced(config: str) -> tuple[int, list[int], list[int], list[float]]:
    """Patches that this rank encodes; of its own media, the patch numbers that come back, and from where; the gradients of what it encoded.

    The patches of medium k of rank r are numbers from 1000 r + 100 k on; a tower that gives the first patch of each token stands for the real one.
    """
    model = get_family("qwen2_5_vl").from_hf_config(read_mapping(config))
    assert model.image_encoder is not None
    section = model.image_encoder.vision_encoder
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    assert dist.group.WORLD is not None
    share = BalancedMedia(section, GRIDS[rank], dist.group.WORLD, 1, torch.device("cpu"))
    pixels = [
        (1000 * rank + 100 * number + torch.arange(t * h * w, dtype=torch.float32))[:, None].expand(-1, section.patch_width)
        for number, (t, h, w) in enumerate(GRIDS[rank])
    ]
    encoded = share.own_pixels(pixels, torch.float32, torch.device("cpu")).requires_grad_()
    rows = share.collect(encoded[:: section.spatial_merge_size**2, :1])
    (rows * (1 + rank)).sum().backward()
    assert encoded.grad is not None
    return len(encoded), [number for _, number in share.dealt[rank]], rows[:, 0].int().tolist(), encoded.grad[:, 0].tolist()
