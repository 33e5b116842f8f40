"""Vision encoders of the Qwen-VL families on megatron-core layers: a run of their layers, wherever it is cut over the pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.nn import functional as F

from tangram.config.model import Grid, VisionEncoderConfig, VisionProjectorConfig
from tangram.families.qwen3_vl.config import Qwen3VisionEncoderConfig
from tangram.models.attention import SegmentPlan
from tangram.models.config import BuildOptions, get_model_config
from tangram.models.norms import parameter_device
from tangram.models.position_table import PositionTable
from tangram.models.projector import Projector
from tangram.models.regions import collect, divide, split_of
from tangram.models.registry import find_layer_spec
from tangram.models.rope import vision_angles
from tangram.models.sequence import SequenceSplit
from tangram.models.stack import LayerStack
from tangram.models.windows import frame_lengths, window_order


class PatchProjection(nn.Conv3d):
    """Patches [n, channels * frames * side * side] -> [n, hidden_size].

    A convolution whose stride is its kernel is one matrix product; as such it is several times faster. The parameter keeps the
    convolution's shape.
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input.to(self.weight.dtype), self.weight.flatten(1), self.bias)


class PatchEmbed(nn.Module):
    """The patch projection, called as a module: with ``overlap_param_gather`` a parameter is up to date only after its module's forward hook."""

    def __init__(self, section: VisionEncoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        kernel = (section.temporal_patch_size, section.patch_size, section.patch_size)
        self.proj = nn.utils.skip_init(
            PatchProjection,
            section.in_channels,
            section.hidden_size,
            kernel_size=kernel,
            stride=kernel,
            bias=section.add_bias_conv,
            dtype=dtype,
            device=device,
        )

    def forward(self, pixel_values: Tensor) -> Tensor:
        embedded: Tensor = self.proj(pixel_values)
        return embedded


class VisionEncoder(MegatronModule):
    """Layers ``numbers`` of the encoder of Qwen2-VL and Qwen2.5-VL, with the patch embedding where ``first``.

    Between stages the hidden states stay in window order; the projector's output is put back in raster order by ``restore_order``.
    """

    def __init__(self, section: VisionEncoderConfig, options: BuildOptions, numbers: range, first: bool, groups: ProcessGroupCollection) -> None:
        super().__init__(config=get_model_config(section, options))
        self.section, self.options, self.groups = section, options, groups
        self.pre_process = first
        if first:
            self.patch_embed = PatchEmbed(section, options.dtype, parameter_device(self.config))
        self.blocks = LayerStack(self.config, find_layer_spec(section), numbers, groups)

    def add_mergers(self, projector: VisionProjectorConfig) -> None:
        """Give those of the section's ``deepstack_layers`` that are here mergers, of the projector's sizes."""
        for number in self.section.deepstack_layers:
            if number in self.blocks.numbers:
                self.blocks.add_merger(number, Projector(projector, self.options, self.groups, norm_merged=True))

    def embed(self, pixel_values: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Patches in raster order: [n, channels * frames * side * side] -> [n, hidden_size]."""
        embedded: Tensor = self.patch_embed(pixel_values)
        return embedded

    def forward(self, hidden: Tensor, grids: Sequence[Grid]) -> Tensor | tuple[Tensor, ...]:
        """Encode all images of a micro-batch.

        Args:
            hidden: pixel values [n, channels * frames * side * side] where the encoder starts here, else the previous stage's output.
            grids: (t, h, w) of each image.

        Returns:
            [n, 1, hidden_size], in window order; with sequence parallelism whole cells of them, this rank's part of the padded sequence. With
            mergers here a tuple of it and of each DeepStack feature, [n / merge^2, h_text], whole and in raster order.
        """
        split = split_of(sum(frame_lengths(grids)), self.config, self.groups.tp, unit=self.section.spatial_merge_size**2)
        order, plans = self._plans(grids, split, hidden.device)
        angles = vision_angles(grids, self.section.spatial_merge_size, self.section.head_dim, self.section.rope_theta, hidden.device)
        if self.pre_process:
            hidden = self.embed(hidden, grids)[:, None]
            hidden = divide(hidden if order is None else hidden[order], split, self.groups.tp)
        hidden, made = self.blocks(hidden, split.pad(angles if order is None else angles[order], 0), plans)
        return (hidden, *(self.restore_order(rows, grids)[:, 0] for rows in made)) if made else hidden

    def features(self, hidden: Tensor, grids: Sequence[Grid]) -> Tensor:
        """What the projector gets: all that the last layer gives."""
        return hidden

    def idle_parameters(self) -> Iterator[nn.Parameter]:
        """None: every parameter takes part."""
        return iter(())

    def restore_order(self, merged: Tensor, grids: Sequence[Grid]) -> Tensor:
        """The rows [cells, 1, h] of the projector or a merger, whole and in raster order; with sequence parallelism from each rank's part."""
        split = split_of(sum(frame_lengths(grids)) // self.section.spatial_merge_size**2, self.config, self.groups.tp)
        merged = collect(merged, split, self.groups.tp)[: split.length]
        if self.section.window_attn_size is None:
            return merged
        cells, _ = self._windows(grids)
        return merged[torch.argsort(cells).to(merged.device)]

    def _windows(self, grids: Sequence[Grid]) -> tuple[Tensor, list[int]]:
        section = self.section
        assert section.window_attn_size is not None
        return window_order(grids, section.spatial_merge_size, section.window_attn_size // section.patch_size // section.spatial_merge_size)

    def _plans(self, grids: Sequence[Grid], split: SequenceSplit, device: torch.device) -> tuple[Tensor | None, list[SegmentPlan | None]]:
        """Order of the patches (None: as they come), and the segments of each layer here; padding is a segment of its own."""
        padding = [split.padded - split.length] if split.padded > split.length else []
        frames = SegmentPlan.from_lengths(frame_lengths(grids) + padding, device)
        if self.section.window_attn_size is None:
            return None, [frames] * len(self.blocks.numbers)
        cells, sizes = self._windows(grids)
        square = self.section.spatial_merge_size**2
        order = (cells[:, None] * square + torch.arange(square)).flatten().to(device)
        windows = SegmentPlan.from_lengths([size * square for size in sizes] + padding, device)
        full = set(self.section.fullatt_block_indexes or ())
        return order, [frames if i in full else windows for i in self.blocks.numbers]


class Qwen3VisionEncoder(VisionEncoder):
    """The encoder of Qwen3-VL: a learned position table beside the patch embedding."""

    section: Qwen3VisionEncoderConfig

    def __init__(self, section: Qwen3VisionEncoderConfig, options: BuildOptions, numbers: range, first: bool, groups: ProcessGroupCollection) -> None:
        super().__init__(section, options, numbers, first, groups)
        if first:
            self.pos_embed = PositionTable(section.max_position_embeddings, section.hidden_size, options.dtype, parameter_device(self.config))

    def embed(self, pixel_values: Tensor, grids: Sequence[Grid]) -> Tensor:
        embedded = super().embed(pixel_values, grids)
        return embedded + self.pos_embed(grids, self.section.spatial_merge_size).to(embedded.dtype)
