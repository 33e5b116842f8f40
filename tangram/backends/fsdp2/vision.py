"""Passes of the vision tower, as many on every rank.

A model runs its tower once for a micro-batch's images, once for its videos, and not at all without either; but each pass gathers weights and
sums gradients, in which all ranks take part. So a rank that has fewer than another makes up for it with passes over the smallest picture,
whose result counts nothing. They start in the input embedding, ahead of the passes of the micro-batch itself, so that the order is the same
on all ranks on the way forward, and on the way back, where autograd goes by what was made last.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tangram.backends.engine import Batch
from tangram.errors import ConfigError

PASSES = ("pixel_values", "pixel_values_videos")
"""Each brings one pass in the models of transformers."""
QWEN_VL = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Model types whose ``model.visual`` takes patches and ``grid_thw``."""


@runtime_checkable
class Media(Protocol):
    """What a model class of a plug-in has, so that ranks may differ in what media they hold."""

    def media_passes(self, batch: Batch) -> int:
        """How many passes of the tower a micro-batch brings."""

    def dummy_media(self, device: torch.device) -> Tensor:
        """One more pass over something small: a finite scalar in which all that the pass gives has a part."""


class QwenMedia:
    """``Media`` of the models of ``QWEN_VL``."""

    def __init__(self, model: nn.Module) -> None:
        self.tower = model.get_submodule("model.visual")
        config: Any = model.config
        self.config = config.vision_config

    def media_passes(self, batch: Batch) -> int:
        """Images are one pass, videos another."""
        return sum(name in batch for name in PASSES)

    def dummy_media(self, device: torch.device) -> Tensor:
        """A black picture of one token."""
        merge = int(self.config.spatial_merge_size)
        width = self.config.in_channels * self.config.temporal_patch_size * self.config.patch_size**2
        pixels, grid = torch.zeros(merge**2, width, device=device), torch.tensor([[1, merge, merge]], device=device)
        made = [leaf for leaf in tree_leaves(self.tower(pixels, grid_thw=grid)) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        return torch.stack([tensor.float().sum() for tensor in made]).sum()


class ClipMedia:
    """``Media`` of LLaVA: a tower that takes whole pictures of one size, and a projector."""

    def __init__(self, model: nn.Module) -> None:
        config: Any = model.config
        self.model, self.config = model.get_submodule("model"), config.vision_config

    def media_passes(self, batch: Batch) -> int:
        return int(PASSES[0] in batch)

    def dummy_media(self, device: torch.device) -> Tensor:
        """A black picture, as far as the projector looks: the tower's last layers may count for nothing in a real pass too."""
        picture = torch.zeros(1, self.config.num_channels, self.config.image_size, self.config.image_size, device=device)
        given = self.model.get_image_features(pixel_values=picture)  # type: ignore[operator]
        return torch.stack([leaf.float().sum() for leaf in tree_leaves(getattr(given, "pooler_output", given)) if isinstance(leaf, Tensor)]).sum()


class VisionBalance:
    """Makes the passes that this rank lacks.

    Args:
        model: sharded already, for then its own hooks on the embedding come first.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._media, self._device, self._missing = media_of(model), device, 0
        self._name = type(model).__name__
        if self._media is not None:
            model.get_input_embeddings().register_forward_hook(self._add)  # type: ignore[operator]

    def passes(self, batch: Batch) -> int:
        """How many passes of the tower a micro-batch brings."""
        return self._media.media_passes(batch) if self._media is not None else sum(name in batch for name in PASSES)

    def check(self, least: list[int], most: list[int]) -> None:
        """Refuse micro-batches in which ranks differ where the model cannot make up for it.

        Args:
            least, most: passes of each micro-batch on the rank with fewest and on the one with most, so the same on every rank.

        Raises:
            ConfigError: they differ.
        """
        if self._media is None and least != most:
            raise ConfigError(
                f"some ranks hold pictures in a micro-batch where others hold none, and {self._name} cannot make up for it; give its class the "
                "methods media_passes and dummy_media (tangram.backends.fsdp2.vision), or see that every micro-batch has pictures, or none has"
            )

    def lack(self, count: int) -> None:
        """The next forward pass makes so many passes more than its micro-batch brings."""
        self._missing = count

    def _add(self, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        assert self._media is not None
        missing, self._missing = self._missing, 0
        for _pass in range(missing):
            output = output + 0 * self._media.dummy_media(self._device).to(output.device, output.dtype)
        return output


def media_of(model: nn.Module) -> Media | None:
    """What makes the passes of a model; None: nothing does."""
    if isinstance(model, Media):
        return model
    if getattr(getattr(model, "config", None), "model_type", None) in QWEN_VL:
        return QwenMedia(model)
    if getattr(getattr(model, "config", None), "model_type", None) == "llava":
        return ClipMedia(model)
    return None
