"""Offload of activations in the assembled model: tensors really leave, come back in time, and change no bit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tangram.models.stack import LayerStack
from tangram.models.vlm import VLMModel, build_model_chunk
from tangram.platform.offload.chain import Chain, Stretch
from tangram.platform.offload.transfer import HostTransfer
from tests.models.conftest import make_hf
from tests.models.test_against_hf import assemble
from tests.models.test_packing_and_videos import collate, gradients_of, mixed

RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "each layer": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "two together": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "the first": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
}


class Counting(HostTransfer):
    """Copies, and counts bytes by the call that they belong to."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def to_host(self, flat: Tensor) -> tuple[Tensor, None]:
        self.sent.append(flat.nbytes)
        return super().to_host(flat)


def changed(built: VLMModel, **keys: Any) -> VLMModel:
    """The same model with other keys in both components."""
    model = built.model
    assert model.image_encoder is not None
    vision = model.image_encoder.vision_encoder.model_copy(update=keys)
    encoder = model.image_encoder.model_copy(update={"vision_encoder": vision})
    update = {"text_decoder": model.text_decoder.model_copy(update=keys), "image_encoder": encoder}
    again = build_model_chunk(model.model_copy(update=update), built.chunk, built.topology, torch.float32, model.text_decoder.vocab_size)
    again.load_state_dict(built.state_dict())
    return again.train()


def stacks(model: VLMModel) -> list[LayerStack]:
    """Vision and text."""
    found = [module for module in model.modules() if isinstance(module, LayerStack)]
    assert len(found) == 2
    return found


def count(model: VLMModel) -> list[tuple[Counting, list[int]]]:
    """Let both stacks count: of each its transfer, and how many tensors had been sent when each call began."""
    counts = []
    for stack in stacks(model):
        transfer, begun = Counting(), []

        class Marked(Chain):
            def begin(self, begun: list[int] = begun, transfer: Counting = transfer) -> Any:
                begun.append(len(transfer.sent))
                return super().begin()

        stack.offload = Marked(lambda _, transfer=transfer: transfer)
        counts.append((transfer, begun))
    return counts


def by_call(transfer: Counting, begun: Sequence[int]) -> list[int]:
    return [sum(transfer.sent[a:b]) for a, b in zip(begun, [*begun[1:], len(transfer.sent)], strict=True)]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_gradients_are_bit_equal_and_every_layer_sends(one_process: None, family: str) -> None:
    from tangram.backends.megatron.cpu import adapt

    adapt()
    built, _ = assemble(make_hf(family), family)
    batch = collate(built.model, mixed(), packing=True, multiple=8)
    tokens, patches = batch["input_ids"].numel(), len(batch["pixel_values"]) + len(batch["pixel_values_videos"])
    sizes = {"vision": patches * 32 * 4, "text": tokens * 64 * 4}
    loss, _, wanted = gradients_of(changed(built), batch, "per_token_loss")
    for name, keys in RECOMPUTE.items():
        model = changed(built, activation_offload=True, **keys)
        counts = count(model)
        found_loss, _, found = gradients_of(model, batch, "per_token_loss")
        assert torch.equal(found_loss, loss), name
        assert all(torch.equal(found[key], wanted[key]) for key in wanted), name
        for (transfer, begun), layers, hidden in zip(counts, (4, 3), sizes.values(), strict=True):
            sent = by_call(transfer, begun)
            assert len(sent) == (-(-layers // 2) if name == "two together" else layers), name
            if name in ("none", "selective"):
                assert min(sent) > 6 * hidden, (name, sent, hidden)
            elif name in ("each layer", "two together"):
                # A recomputed layer keeps its hidden states; a text layer of Qwen3-VL the feature that is added to it besides.
                assert all(hidden <= bytes_ < 2 * hidden for bytes_ in sent), (name, sent, hidden)
            else:
                assert sent[0] < 2 * hidden < 6 * hidden < min(sent[1:]), (name, sent, hidden)


def test_what_layers_saved_is_gone_from_the_device_until_it_is_wanted(one_process: None) -> None:
    """The last two layers of each stack stay."""
    built, _ = assemble(make_hf("qwen2_5_vl"), "qwen2_5_vl")
    batch = collate(built.model, mixed(), packing=True, multiple=8)
    for offload in (False, True):
        model = changed(built, activation_offload=offload)
        inner: list[weakref.ref[Tensor]] = []
        for stack in stacks(model):
            for layer in stack.layers:
                layer.mlp.linear_fc2.register_forward_pre_hook(lambda _, inputs, inner=inner: inner.append(weakref.ref(inputs[0])))
        loss = model(**batch)["loss_dict"]["token_losses"].sum()
        assert [ref() is not None for ref in inner] == [not offload] * 7
        on_device = [thing.on_device is not None for thing in gc.get_objects() if type(thing) is Stretch]
        assert bool(on_device) == offload
        if offload:
            assert 0.3 < sum(on_device) / len(on_device) < 0.7, "four layers of seven"
        loss.backward()
        assert not [thing for thing in gc.get_objects() if type(thing) is Stretch]


def test_without_gradients_nothing_is_sent(one_process: None) -> None:
    built, _ = assemble(make_hf("qwen2_5_vl"), "qwen2_5_vl")
    model = changed(built, activation_offload=True)
    counts = count(model)
    with torch.no_grad():
        model.eval()(**collate(built.model, mixed(), packing=False))
    assert [transfer.sent for transfer, _ in counts] == [[], []]
