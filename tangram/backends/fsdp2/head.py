"""A model's output layer that gives the loss in place of logits.

Hidden states become the loss inside the head's own forward, so whatever gathers and frees the head's weight around it (``fully_shard`` of the head
itself, of the root, or of a layer tied to it) does so once per micro-batch, however many chunks a rank has.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from tangram.backends.fsdp2.inputs import Supervised
from tangram.config.fsdp2 import Fsdp2Features
from tangram.config.patterns import match_each
from tangram.errors import ConfigError
from tangram.losses.chunk import chunked_loss


class HeadLoss(NamedTuple):
    """What the head gives where the model expects logits. A model may hand it to its ``loss_function`` and nothing else: it cannot be computed
    with, so a model that does something to its logits first (scales them, caps them) fails rather than trains on another loss."""

    loss: Tensor


class LossHead(nn.Linear):
    """The output layer of a model, sharing its parameters and their names.

    Args:
        head: the layer to stand in for.
        chunk_size: positions at a time.
        of_each_row: ``chunk_size`` counts positions of each row of the micro-batch, not of all rows.

    Attributes:
        learnt: positions that the next call computes the loss of; None: it gives logits.
    """

    def __init__(self, head: nn.Linear, chunk_size: int, of_each_row: bool) -> None:
        super().__init__(head.in_features, head.out_features, bias=head.bias is not None, device="meta")
        self.weight, self.bias = head.weight, head.bias
        self.chunk_size, self.of_each_row = chunk_size, of_each_row
        self.learnt: Supervised | None = None
        self.train(head.training)

    def forward(self, input: Tensor) -> Any:
        """Hidden states [b, s, h] -> ``HeadLoss``, or logits [b, s, V]."""
        if self.learnt is None:
            return super().forward(input)
        learnt, chunk = self.learnt, self.chunk_size * (input.shape[0] if self.of_each_row else 1)
        hidden = input[learnt.rows, learnt.columns]
        return HeadLoss(chunked_loss(hidden, self.weight, learnt.targets, learnt.weights, chunk, bias=self.bias))


def chunked(features: Fsdp2Features) -> bool:
    """Whether the run computes its loss in chunks."""
    return features.enable_chunk_loss or features.enable_dynamic_chunk_loss


def put_loss_head(model: nn.Module, features: Fsdp2Features) -> LossHead:
    """Replace the module that ``chunkloss_plan.apply_module`` names, before the model is sharded.

    With ``enable_chunk_loss`` the head sees ``chunk_size`` positions of each row at a time, with ``enable_dynamic_chunk_loss`` ``total_chunk_size``
    of all rows; only positions with a label count.

    Raises:
        ConfigError: it matches no or several modules, what it matches is not a plain linear output layer, or the loss is the model's own.
    """
    if features.loss_cfg.loss_type == "raw":
        raise ConfigError(
            "features: loss_cfg.loss_type raw is the model's own loss, which needs all logits, and chunk loss makes none; choose default, "
            "per_sample_loss or per_token_loss, or switch chunk loss off"
        )
    plan, key = features.chunkloss_plan, "features.chunkloss_plan.apply_module"
    paths = match_each([plan.apply_module], [path for path, _ in model.named_modules() if path], key)[plan.apply_module]
    if len(paths) > 1:
        raise ConfigError(f"{key}: {plan.apply_module!r} matches {len(paths)} modules ({paths[0]}, {paths[1]}, ...); name the one head")
    head = model.get_submodule(paths[0])
    output_layer = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not output_layer:
        own = [path for path, module in model.named_modules() if module is output_layer]
        raise ConfigError(f"{key}: {paths[0]} is not the model's output layer; name {own[0] if own else 'a model that has one'}")
    # A subclass or a wrapper (LoRA) computes its weight; the loss would be that of the bare one.
    if type(head) is not nn.Linear or head._forward_hooks or head._forward_pre_hooks:
        raise ConfigError(
            f"{key}: {paths[0]} is a {type(head).__name__} that does more than nn.Linear, so its loss cannot be computed from its weight in chunks; "
            "switch chunk loss off, or leave the head plain"
        )
    made = LossHead(head, plan.chunk_size if features.enable_chunk_loss else plan.total_chunk_size, features.enable_chunk_loss)
    model.set_submodule(paths[0], made)
    return made
