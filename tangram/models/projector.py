"""Projectors: from the vision encoder's width to the text decoder's, with or without a merge of neighbouring patches."""

from __future__ import annotations

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from tangram.config.model import VisionProjectorConfig
from tangram.models.config import BuildOptions, get_model_config
from tangram.models.norms import NORMS


class MLPProjector(MegatronModule):
    """Two linears: [n, 1, input_size] -> [n, 1, hidden_size]."""

    def __init__(self, section: VisionProjectorConfig, options: BuildOptions, groups: ProcessGroupCollection) -> None:
        super().__init__(config=get_model_config(section, options))
        self.encoder = MLP(
            self.config,
            MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
            input_size=self.width_in(section),
            ffn_hidden_size=section.ffn_hidden_size,
            tp_group=groups.tp,
        )

    @staticmethod
    def width_in(section: VisionProjectorConfig) -> int:
        """Width of what the first linear gets."""
        return section.input_size

    def forward(self, hidden: Tensor) -> Tensor:
        out, bias = self.encoder(hidden)
        return out if bias is None else out + bias


class Projector(MLPProjector):
    """Norm over a patch, concatenation of each square of patches, two linears: [n * merge^2, 1, width] -> [n, 1, hidden_size].

    Args:
        norm_merged: the norm comes after the concatenation and goes over the whole square, as in the mergers of DeepStack.
    """

    def __init__(self, section: VisionProjectorConfig, options: BuildOptions, groups: ProcessGroupCollection, *, norm_merged: bool = False) -> None:
        super().__init__(section, options, groups)
        self.merged_size = section.ffn_hidden_size
        self.norm_size = section.ffn_hidden_size if norm_merged else section.input_size
        assert section.normalization is not None
        self.layernorm = NORMS[section.normalization](self.config, self.norm_size, section.layernorm_epsilon)

    @staticmethod
    def width_in(section: VisionProjectorConfig) -> int:
        return section.ffn_hidden_size

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(self.layernorm(hidden.view(-1, 1, self.norm_size)).view(-1, 1, self.merged_size))
