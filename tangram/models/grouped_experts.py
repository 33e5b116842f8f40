"""A rank's experts in one grouped product instead of a loop.

Each expert keeps parameters of its own, as the loop has them, so that the tensor table, checkpoints and the optimizer know nothing of it.
"""

from __future__ import annotations

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from tangram.platform.operators import grouped_linear


class HeldColumn(ColumnParallelLinear):
    """Gives its weight [out / TP, in] to the grouped product. It is called for that, since with ``overlap_param_gather`` a weight is up to date only
    after its module's forward hook."""

    def forward(self) -> Tensor:
        weight: Tensor = self.weight
        return weight


class HeldRow(RowParallelLinear):
    """As ``HeldColumn``, [out, in / TP]."""

    def forward(self) -> Tensor:
        weight: Tensor = self.weight
        return weight


GROUPED_LINEARS = MLPSubmodules(linear_fc1=HeldColumn, linear_fc2=HeldRow)


class GroupedExperts(SequentialMLP):
    """megatron-core's loop over experts as two products. Tensor-parallel ranks hold parts of each expert, whose sum is the dispatcher's business."""

    def forward(self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor) -> tuple[Tensor, None]:
        """Tokens in runs by expert, [n, h] -> [n, h], each times its weight.

        Args:
            tokens_per_expert: [experts of this rank], the length of each run.
            permuted_probs: [n], the weights.
        """
        counts = tokens_per_expert.tolist()
        first = [expert.linear_fc1() for expert in self.local_experts]
        second = [expert.linear_fc2() for expert in self.local_experts]
        inner = self._activate(grouped_linear(permuted_local_hidden_states, first, counts))
        weighed = (inner * permuted_probs.unsqueeze(-1)).to(inner.dtype)
        return grouped_linear(weighed, second, counts), None

    def _activate(self, inner: Tensor) -> Tensor:
        activation = self.config.activation_func
        if not self.config.gated_linear_unit:
            return activation(inner)
        gate, up = inner.chunk(2, dim=-1)
        return activation(gate) * up
