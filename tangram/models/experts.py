"""Experts in place of a layer's MLP, on megatron-core's router and dispatchers, and its expert loop or a grouped product.

What a router must know of the micro-batch travels to it as a ``Routing``, which megatron-core hands through as ``padding_mask``, as it does a
``SegmentPlan`` as ``packed_seq_params``: pipeline stages and recomputation then cannot mix up micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    clear_aux_losses_tracker,
    get_moe_layer_wise_logging_tracker,
    save_to_aux_losses_tracker,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from tangram.config.model import ExpertKeys, TextDecoderConfig
from tangram.errors import ConfigError
from tangram.models.grouped_experts import GROUPED_LINEARS, GroupedExperts
from tangram.models.sequence import SequenceSplit


@dataclass(frozen=True)
class Routing:
    """A micro-batch as routers see it that add to the loss.

    Args:
        padding: bool [b, s of this rank], True where no real token stands.
        weight: scalar int64, what the micro-batch adds to the loss's denominator. None: outside of training.
    """

    padding: Tensor
    weight: Tensor | None


def routing_of(
    text: TextDecoderConfig,
    split: SequenceSplit,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_padded: Tensor | None,
    loss_weight: Tensor | None,
) -> Routing | None:
    """What the decoder's routers must know of this rank's tokens; None where they add nothing to the loss.

    Args:
        split: which tokens these are; the others as ``VLMModel.forward`` has them.
    """
    if not isinstance(text, ExpertKeys) or not text.has_router_loss:
        return None
    padding = padding_of(input_ids, attention_mask, cu_seqlens, cu_seqlens_padded)
    # A mean over no token is no number. A micro-batch of nothing but padding weighs nothing, so any tokens will do.
    padding = padding & ~padding.all()
    return Routing(split.take(split.pad(padding, -1, True), -1), loss_weight)


def padding_of(input_ids: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None, cu_seqlens_padded: Tensor | None) -> Tensor:
    """Bool [b, s], True where no real token stands; arguments as ``VLMModel.forward`` has them."""
    if cu_seqlens is not None and cu_seqlens_padded is not None:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        sample = torch.bucketize(places, cu_seqlens_padded[1:].long(), right=True).clamp(max=len(cu_seqlens) - 2)
        ends = cu_seqlens_padded[:-1] + cu_seqlens.diff()
        return (places >= ends[sample])[None]
    if attention_mask is None:
        return torch.zeros_like(input_ids, dtype=torch.bool)
    real = attention_mask.bool()
    return ~(real if real.dim() == 2 else real.any(dim=-1))


class Router(TopKRouter):
    """megatron-core's router, whose losses are averaged over micro-batches as the loss itself is.

    Core multiplies a micro-batch's router loss by its number of tokens, since all gradients are divided by a count in the end. Here that count
    is the loss's denominator: of labelled tokens, of samples or of micro-batches (``tangram.losses.modes``), so the factor is the
    micro-batch's share of it. Every rank of a micro-batch has the same factor; where they divide its tokens, core gives each a part of the sum.
    """

    routing_of_batch: Routing | None = None
    """Of the micro-batch whose layer is being run."""

    def gating(self, input: Tensor) -> Tensor:
        """Logits in fp32. Core's own product names a kernel of TransformerEngine, which is not always there."""
        return nn.functional.linear(input.float(), self.weight.float())

    def attach_and_log_load_balancing_loss(
        self, activation: Tensor, aux_loss_coeff: float, aux_loss: Tensor, aux_loss_name: str, *args: Any, **kwargs: Any
    ) -> Tensor:
        weighted = aux_loss * self._weight()
        save_to_aux_losses_tracker(aux_loss_name, weighted / aux_loss_coeff, self.layer_number, self.config.num_layers)
        return MoEAuxLossAutoScaler.apply(activation, weighted)

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """The mean squared log-sum-exp of real tokens' logits (Zoph et al. 2022), weighed as the load-balancing loss."""
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None or not (self.training and torch.is_grad_enabled()):
            return logits
        assert padding_mask is not None, "routers that add to the loss know of padding"
        count = (~padding_mask).sum()
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(count, group=self.tp_cp_group)
        loss = coefficient * (logits.logsumexp(dim=-1) ** 2)[~padding_mask].sum() / count
        return MoEAuxLossAutoScaler.apply(logits, loss * self._weight())

    def _weight(self) -> Tensor:
        if self.routing_of_batch is None or self.routing_of_batch.weight is None:
            raise ConfigError("moe_aux_loss_coeff and moe_z_loss_coeff need loss_weight in model(**batch); megatron.forward.get_batch passes it on")
        return self.routing_of_batch.weight


def take_load_balancing() -> float:
    """What this rank's routers made of load-balancing losses since the last call, without their weight, times what their micro-batches count."""
    values = get_moe_layer_wise_logging_tracker().get("load_balancing_loss", {}).get("values")
    total = 0.0 if values is None else float(values.sum())
    clear_aux_losses_tracker()
    return total


class PaddedAllGather(MoEAllGatherTokenDispatcher):
    """megatron-core's dispatcher that shows every rank all tokens, for ranks whose micro-batches differ in length.

    Core gathers equal parts, but expert-parallel ranks hold different micro-batches; each is filled up to the longest with rows that go to
    no expert.
    """

    routing_map: Tensor

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        hidden, probs = super().dispatch_preprocess(hidden_states, routing_map, probs)
        count = torch.tensor(len(hidden), device=hidden.device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=self.tp_ep_group)
        fill = int(count) - len(hidden)
        self.routing_map = nn.functional.pad(self.routing_map, (0, 0, 0, fill))
        return nn.functional.pad(hidden, (0, 0, 0, fill)), nn.functional.pad(probs, (0, 0, 0, fill))

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        return super().combine_postprocess(hidden_states[: self.hidden_shape[:-1].numel()])


class Experts(MoELayer):
    """Router and this rank's experts: [s, b, h] -> [s, b, h]."""

    def __init__(self, config: TransformerConfig) -> None:
        experts, linears = SequentialMLP, MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        if config.moe_grouped_gemm:
            experts, linears = GroupedExperts, GROUPED_LINEARS
        groups = ProcessGroupCollection.use_mpu_process_groups()
        parts = MoESubmodules(experts=ModuleSpec(module=experts, submodules=linears), router=Router)
        super().__init__(config, parts, pg_collection=groups)
        if config.moe_token_dispatcher_type == "allgather" and self.ep_group.size() > 1:
            self.token_dispatcher = PaddedAllGather(self.num_local_experts, self.local_expert_indices, config, groups)

    def forward(self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Routing | None = None) -> tuple[Tensor, Tensor | None]:
        """``padding_mask`` is the micro-batch's ``Routing``."""
        self.router.routing_of_batch = padding_mask
        made = super().forward(hidden_states, intermediate_tensors, None if padding_mask is None else padding_mask.padding)
        # megatron-core's dispatchers keep the weights that they have dispatched by. Their graph leads to the hooks of gradients, and those to
        # the model: a circle that no garbage collector sees, so that a model nobody uses any more would stay, with all its process groups.
        for name, value in list(vars(self.token_dispatcher).items()):
            if isinstance(value, Tensor) and value.requires_grad:
                setattr(self.token_dispatcher, name, None)
        return made
