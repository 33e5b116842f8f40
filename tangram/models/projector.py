"""The projector: merges neighbouring patches and maps them to the text decoder's width."""

from __future__ import annotations

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from tangram.config.model import VisionProjectorConfig
from tangram.models.config import BuildOptions, get_model_config
from tangram.models.norms import NORMS


class Projector(MegatronModule):
    """Norm over a patch, concatenation of each square of patches, two linears: [n * merge^2, 1, width] -> [n, 1, hidden_size].

    Args:
        norm_merged: the norm comes after the concatenation and goes over the whole square, as in the mergers of DeepStack.
    """

    def __init__(self, section: VisionProjectorConfig, options: BuildOptions, groups: ProcessGroupCollection, *, norm_merged: bool = False) -> None:
        super().__init__(config=get_model_config(section, options))
        self.merged_size = section.ffn_hidden_size
        self.norm_size = section.ffn_hidden_size if norm_merged else section.input_size
        assert section.normalization is not None
        self.layernorm = NORMS[section.normalization](self.config, self.norm_size, section.layernorm_epsilon)
        self.encoder = MLP(
            self.config,
            MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
            input_size=section.ffn_hidden_size,
            ffn_hidden_size=section.ffn_hidden_size,
            tp_group=groups.tp,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.layernorm(hidden.view(-1, 1, self.norm_size))
        out, bias = self.encoder(normed.view(-1, 1, self.merged_size))
        return out if bias is None else out + bias
