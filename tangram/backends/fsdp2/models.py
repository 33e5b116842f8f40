"""Hugging Face models that can give their loss without logits, and the ids that they are registered under."""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from typing import Any

from torch import Tensor

from tangram.backends.fsdp2.head import HeadLoss, LossHead
from tangram.backends.fsdp2.inputs import Supervised
from tangram.backends.fsdp2.loss import SupervisedLoss
from tangram.backends.fsdp2.registry import model_register
from tangram.errors import ConfigError

CLASSES = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
}
"""Ids, which are also the ``model_type`` of config.json, and classes of transformers."""


class ChunkLossMixin:
    """Marks classes made by ``with_chunk_loss``."""


def with_chunk_loss(model_class: Any) -> Any:
    """A subclass of ``model_class`` that serves chunk loss; also a decorator for classes of plug-ins.

    Its forward is the model's own. Only where the output layer is a ``LossHead`` and labels are given, that layer gives the loss, which the
    model's forward then hands to ``loss_function`` and adds to as it likes (auxiliary losses); ``logits`` is None. It suits every
    model whose forward ends in ``logits = lm_head(hidden)`` and ``loss = self.loss_function(logits=logits, labels=labels, ...)``. A run sets
    ``loss_function``; by default the loss is the mean over labels, or their sum over ``num_items_in_batch``, as in transformers.
    """
    if issubclass(model_class, ChunkLossMixin):
        return model_class
    whole = model_class.forward
    names = list(inspect.signature(whole).parameters)[1:]

    @functools.wraps(whole)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        head = self.get_output_embeddings()
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if not isinstance(head, LossHead) or (given.get("labels") is None and not self.training):
            return whole(self, *args, **kwargs)
        return _loss_alone(self, whole, head, given)

    attributes = {"forward": forward, "__module__": model_class.__module__, "__doc__": model_class.__doc__}
    # transformers looks classes up by name and module, and writes the name into config.json.
    return type(model_class.__name__, (ChunkLossMixin, model_class), attributes)


def _loss_alone(model: Any, whole: Any, head: LossHead, given: dict[str, Any]) -> Any:
    _check(given)
    tuples = not _pop_return_dict(model, given)
    before = model.loss_function
    chosen = before if isinstance(before, SupervisedLoss) else _default(before, given)
    head.learnt, model.loss_function = chosen.supervised, chosen
    try:
        output = whole(model, **given, use_cache=False, return_dict=True)
    except (TypeError, AttributeError) as error:
        if HeadLoss.__name__ not in str(error):
            raise
        raise ConfigError(f"{type(model).__name__} computes with its logits ({error}), and chunk loss makes none; switch chunk loss off") from error
    finally:
        head.learnt, model.loss_function = None, before
    if not isinstance(output.get("logits"), HeadLoss) or output.get("loss") is None:
        raise ConfigError(f"{type(model).__name__} does not hand what its output layer gives to its loss_function; switch chunk loss off")
    # Made anew it would lose what a class hangs on it besides its fields, as router logits are in transformers 4.57.
    OrderedDict.__delitem__(output, "logits")
    output.logits = None
    return output.to_tuple() if tuples else output


def _check(given: dict[str, Any]) -> None:
    if given.get("labels") is None:
        raise ConfigError("chunk loss is on and there are no labels: the model gives its loss and no logits; give labels, or call model.eval()")
    keep = given.pop("logits_to_keep", 0)
    if isinstance(keep, Tensor) or keep:
        raise ConfigError(f"chunk loss is on, so there are no logits to keep; leave logits_to_keep {keep if isinstance(keep, int) else ''} out")
    if given.pop("use_cache", None) or given.get("past_key_values") is not None:
        raise ConfigError("chunk loss is on, and it computes the loss of whole samples: give neither use_cache nor past_key_values")
    if given.get("shift_labels") is not None:
        raise ConfigError("chunk loss is on, and it shifts labels itself: give labels and no shift_labels")


def _pop_return_dict(model: Any, given: dict[str, Any]) -> bool:
    chosen = given.pop("return_dict", None)
    return bool(getattr(model.config, "return_dict", True) if chosen is None else chosen)


def _default(loss_function: Any, given: dict[str, Any]) -> SupervisedLoss:
    """What ``ForCausalLMLoss`` of transformers computes."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    if loss_function is not ForCausalLMLoss:
        raise ConfigError(f"chunk loss is on, and loss_function {loss_function} needs logits; leave it as it was, or switch chunk loss off")
    labels, count = given["labels"], given.pop("num_items_in_batch", None)
    learnt = Supervised.of({"labels": labels}, "per_token_loss", labels.device)
    return SupervisedLoss(learnt.scaled(1 / max(learnt.denominator if count is None else int(count), 1)))


def _register() -> None:
    import transformers

    for model_id, name in CLASSES.items():
        model_register.register(model_id, with_chunk_loss(getattr(transformers, name)))


_register()
