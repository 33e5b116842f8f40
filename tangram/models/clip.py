"""The CLIP tower (Radford et al. 2021) on megatron-core layers: a run of its layers, wherever it is cut over the pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.nn import functional as F

from tangram.config.model import Grid
from tangram.errors import DataError
from tangram.families.llava.config import ClipEncoderConfig
from tangram.models.attention import SegmentPlan
from tangram.models.config import BuildOptions, get_model_config
from tangram.models.norms import NORMS, parameter_device
from tangram.models.regions import collect, divide, split_of
from tangram.models.registry import find_layer_spec
from tangram.models.stack import LayerStack


class PatchConvolution(nn.Conv2d):
    """Patches [n, channels * side * side] -> [n, hidden_size]: a convolution whose stride is its kernel, as one matrix product."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input.to(self.weight.dtype), self.weight.flatten(1), self.bias)


class ClipEncoder(MegatronModule):
    """Layers ``numbers`` of the tower, with the embeddings where ``first``.

    All pictures are of one size. What travels between stages holds the class token of each picture before its patches. The layers after
    ``vision_feature_layer`` and the last norm are kept, since they belong to the checkpoint, but take no part; they are not trained.

    Source of the names: megatron-core's ``CLIPViTModel``; of the arithmetic: transformers' ``CLIPVisionModel`` and ``LlavaModel``.
    """

    def __init__(self, section: ClipEncoderConfig, options: BuildOptions, numbers: range, first: bool, groups: ProcessGroupCollection) -> None:
        super().__init__(config=get_model_config(section, options))
        self.section, self.pre_process, self.tp_group = section, first, groups.tp
        width, device = section.hidden_size, parameter_device(self.config)
        norm = NORMS[section.normalization]
        if first:
            self.conv1 = nn.utils.skip_init(
                PatchConvolution,
                section.in_channels,
                width,
                kernel_size=section.patch_size,
                stride=section.patch_size,
                bias=section.add_bias_conv,
                dtype=options.dtype,
                device=device,
            )
            self.position_embeddings = nn.utils.skip_init(nn.Embedding, section.positions, width, dtype=options.dtype, device=device)
            if section.add_class_token:
                self.class_token = nn.Parameter(torch.empty(width, dtype=options.dtype, device=device))
            self.ln_pre = norm(self.config, width, section.layernorm_epsilon)
        self.decoder = LayerStack(self.config, find_layer_spec(section), numbers, groups)
        self.used = max(0, min(len(numbers), section.used_layers - numbers.start))
        if numbers.stop == section.num_layers:
            self.ln_post = norm(self.config, width, section.layernorm_epsilon)

    def forward(self, hidden: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Encode all pictures of a micro-batch.

        Args:
            hidden: pixel values [n, channels * side * side] where the tower starts here, else the previous stage's output.
            grids: (t, h, w) of each picture.

        Returns:
            [pictures * positions, 1, hidden_size]; with sequence parallelism this rank's part of the padded sequence.

        Raises:
            DataError: a picture of another size than the tower's.
        """
        wrong = [grid for grid in grids if grid != self.section.picture_grid]
        if wrong:
            raise DataError(f"a picture of {wrong[0]} patches (time, height, width); this tower takes {self.section.picture_grid} alone")
        split = split_of(self.section.positions * len(grids), self.config, self.tp_group)
        if self.pre_process:
            hidden = self.ln_pre(divide(self._embed(hidden, len(grids)), split, self.tp_group))
        if not self.used:
            return hidden.clone()  # A stage hands on a tensor of its own: megatron-core frees it once sent.
        padding = [split.padded - split.length] if split.padded > split.length else []
        pictures = SegmentPlan.from_lengths([self.section.positions] * len(grids) + padding, hidden.device)
        hidden, _ = self.decoder(hidden, None, [pictures] * self.used)
        return hidden

    def _embed(self, pixels: Tensor, pictures: int) -> Tensor:
        embedded = self.conv1(pixels).unflatten(0, (pictures, -1))
        if self.section.add_class_token:
            embedded = torch.cat([self.class_token.expand(pictures, 1, -1), embedded], dim=1)
        positions = self.position_embeddings(torch.arange(self.section.positions, device=pixels.device))
        return (embedded + positions).flatten(0, 1)[:, None]

    def features(self, hidden: Tensor, grids: Sequence[Grid]) -> Tensor:
        """What the projector gets: the patches without the class tokens."""
        if not self.section.add_class_token:
            return hidden
        split = split_of(self.section.positions * len(grids), self.config, self.tp_group)
        whole = collect(hidden, split, self.tp_group)[: split.length]
        patches = whole.unflatten(0, (len(grids), -1))[:, 1:].flatten(0, 1)
        return divide(patches, split_of(len(patches), self.config, self.tp_group), self.tp_group)

    def restore_order(self, merged: Tensor, grids: Sequence[Grid]) -> Tensor:
        """The projector's rows are in raster order already; with sequence parallelism from each rank's part."""
        split = split_of(sum(map(self.section.tokens, grids)), self.config, self.tp_group)
        return collect(merged, split, self.tp_group)[: split.length]

    def idle_parameters(self) -> Iterator[nn.Parameter]:
        """Of the layers after the feature layer, and of the last norm."""
        for layer in self.decoder.layers[self.used :]:
            yield from layer.parameters()
        if hasattr(self, "ln_post"):
            yield from self.ln_post.parameters()
