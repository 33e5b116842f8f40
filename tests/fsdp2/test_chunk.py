"""Chunk loss in Hugging Face models and over ranks, against transformers' own forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from tangram.align.reference import forward_arguments, load_reference
from tangram.backends.fsdp2.head import LossHead, put_loss_head
from tangram.backends.fsdp2.models import CLASSES, with_chunk_loss
from tangram.backends.fsdp2.registry import model_register
from tangram.config.fsdp2 import Fsdp2Features
from tangram.errors import ConfigError
from tests.fsdp2.kit import real_batch
from tests.fsdp2.media import Rows
from tests.largest import largest
from tests.ranks import on_ranks

SMALL = {"text_layers": 2, "vision_layers": 2, "hidden": 32, "vision_hidden": 16, "heads": 2, "kv_heads": 1, "vision_heads": 2}


def features(chunk_size: int = 5, **more: Any) -> Fsdp2Features:
    plan = {"chunk_size": chunk_size, "total_chunk_size": chunk_size}
    return Fsdp2Features(**{"enable_chunk_loss": True, "chunkloss_plan": plan, "loss_cfg": {"loss_type": "per_token_loss"}, **more})


def served(hf: Path, chosen: Fsdp2Features | None = None) -> Any:
    """The registered class with the weights of ``hf`` and a head that gives the loss."""
    plain = load_reference(hf)
    model_class: Any = model_register.get(plain.config.model_type)
    model = model_class._from_config(plain.config, dtype=torch.float32)
    model.load_state_dict(plain.state_dict(), strict=True)
    put_loss_head(model, chosen or features())
    return model.train()


def inputs(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    return {**forward_arguments(model, batch), "labels": batch["labels"]}


def gradients(model: nn.Module, arguments: Mapping[str, Any]) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**arguments).loss
    loss.backward()
    return float(loss.detach()), {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def worst(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Norm-wise. A gradient that is zero but for rounding (a key's bias shifts all scores of a softmax) is measured by the whole model's."""
    assert set(found) == set(wanted)
    least = 1e-3 * float(torch.stack([gradient.norm() for gradient in wanted.values()]).norm())
    return largest(float((found[name] - wanted[name]).norm() / wanted[name].norm().clamp_min(least)) for name in wanted)


@pytest.mark.compat
@pytest.mark.parametrize(
    ("family", "tied"), [("qwen2_vl", False), ("qwen2_5_vl", True), ("qwen3_vl", True), ("qwen3_vl_moe", False)]
)
def test_loss_and_every_gradient_are_those_of_transformers(tiny_hf: Callable[..., Path], family: str, tied: bool) -> None:
    hf = tiny_hf(family, tied=tied, **SMALL)
    batch, _ = real_batch(hf)
    plain = load_reference(hf).train()
    loss, wanted = gradients(plain, inputs(plain, batch))
    tokens = int((batch["labels"][:, 1:] != -100).sum())
    model = served(hf)
    assert set(model.state_dict()) == set(plain.state_dict())
    head = model.get_output_embeddings()
    for chunk_size, of_each_row in ((1, True), (7, True), (tokens - 1, False), (tokens, False)):
        head.chunk_size, head.of_each_row = chunk_size, of_each_row
        chunked_loss, found = gradients(model, inputs(model, batch))
        assert abs(chunked_loss - loss) < 1e-6 * loss
        assert worst(found, wanted) < 1e-5, chunk_size


@pytest.fixture(scope="module")
def small(tiny_hf: Callable[..., Path]) -> tuple[Path, dict[str, Tensor]]:
    hf = tiny_hf("qwen2_5_vl", **SMALL)
    return hf, real_batch(hf)[0]


@pytest.mark.compat
def test_there_are_no_logits_and_tuples_begin_with_the_loss(small: Any) -> None:
    model = served(small[0])
    arguments = inputs(model, small[1])
    output = model(**arguments)
    assert output.logits is None
    whole = model(**arguments, return_dict=False)
    assert isinstance(whole, tuple)
    assert torch.equal(whole[0], output.loss)
    assert not any(isinstance(one, tuple) and type(one) is not tuple for one in whole)


@pytest.mark.compat
def test_without_labels_an_evaluated_model_gives_logits_as_ever(small: Any) -> None:
    model, plain = served(small[0]).eval(), load_reference(small[0]).eval()
    arguments = forward_arguments(plain, small[1])
    with torch.no_grad():
        assert torch.equal(model(**arguments).logits, plain(**arguments).logits)


@pytest.mark.compat
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": None}, "there are no labels"),
        ({"logits_to_keep": 1}, "no logits to keep; leave logits_to_keep 1 out"),
        ({"use_cache": True}, "give neither use_cache nor past_key_values"),
        ({"past_key_values": transformers.DynamicCache()}, "give neither use_cache nor past_key_values"),
        ({"shift_labels": torch.zeros(1)}, "give labels and no shift_labels"),
    ],
)
def test_what_needs_logits_is_refused(small: Any, change: dict[str, Any], message: str) -> None:
    model = served(small[0])
    with pytest.raises(ConfigError, match=message):
        model(**{**inputs(model, small[1]), **change})


def test_a_loss_function_of_the_users_is_refused(small: Any) -> None:
    model = served(small[0])
    model.loss_function = lambda logits, labels, **_: logits.sum()
    with pytest.raises(ConfigError, match="needs logits"):
        model(**inputs(model, small[1]))


@pytest.mark.compat
def test_losses_summed_over_a_number_of_items_are_divided_by_it(small: Any) -> None:
    model, plain = served(small[0]), load_reference(small[0]).train()
    arguments = {**inputs(plain, small[1]), "num_items_in_batch": 1000}
    assert model(**arguments).loss.item() == pytest.approx(plain(**arguments).loss.item(), rel=1e-6)


@pytest.mark.compat
def test_the_auxiliary_loss_of_routers_is_added(tiny_hf: Callable[..., Path]) -> None:
    hf = tiny_hf("qwen3_vl_moe", **SMALL)
    batch, _ = real_batch(hf)
    plain, model = load_reference(hf).train(), served(hf)
    for one in (plain, model):
        one.config.text_config.router_aux_loss_coef = 0.5
    arguments = {**inputs(plain, batch), "output_router_logits": True}
    loss, wanted = gradients(plain, arguments)
    found, given = gradients(model, arguments)
    assert found == pytest.approx(loss, rel=1e-6)
    assert worst(given, wanted) < 1e-5
    assert loss > 0.1 + gradients(plain, {**arguments, "output_router_logits": False})[0]


@pytest.mark.parametrize("frozen", ["lm_head", "model", "model.visual"])
def test_frozen_parts_get_no_gradient_and_the_others_the_same(small: Any, frozen: str) -> None:
    model, plain = served(small[0]), load_reference(small[0]).train()
    for one in (model, plain):
        one.get_submodule(frozen).requires_grad_(False)
    _, wanted = gradients(plain, inputs(plain, small[1]))
    _, found = gradients(model, inputs(model, small[1]))
    assert worst(found, wanted) < 1e-5


def test_recomputed_layers_give_the_same(small: Any) -> None:
    model = served(small[0])
    loss, wanted = gradients(model, inputs(model, small[1]))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again, found = gradients(model, inputs(model, small[1]))
    assert again == loss
    assert worst(found, wanted) == 0


def test_thirty_steps_follow_those_of_whole_logits(small: Any) -> None:
    """The practice notes report 4.77e-7 at most of their own chunk loss, over 30 steps from seed 42: one unit in the last place of a loss
    between 4 and 8."""
    batch = Rows(small[0], 42).batch(("image", 2, 3), ("text", 3, 5))
    curves = []
    for model in (served(small[0]), load_reference(small[0]).train()):
        torch.manual_seed(42)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
        curves.append([])
        for _ in range(30):
            optimizer.zero_grad()
            loss = model(**inputs(model, batch)).loss
            loss.backward()
            optimizer.step()
            curves[-1].append(loss.item())
    assert curves[1][-1] < curves[1][0] - 2
    assert largest(abs(a - b) for a, b in zip(*curves, strict=True)) < 5e-7


def test_any_class_of_transformers_can_be_served() -> None:
    config = transformers.Qwen2Config(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=40, pad_token_id=0
    )
    model: Any = with_chunk_loss(transformers.Qwen2ForCausalLM)(config)
    ids = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(0))
    loss, wanted = gradients(model, {"input_ids": ids, "labels": ids})
    put_loss_head(model, features())
    found, given = gradients(model, {"input_ids": ids, "labels": ids})
    assert found == pytest.approx(loss, rel=1e-6)
    assert worst(given, wanted) < 1e-5


def test_a_model_that_computes_with_its_logits_fails_rather_than_train_on_another_loss() -> None:
    config = transformers.GemmaConfig().to_dict() | {"num_hidden_layers": 1, "final_logit_softcapping": 30.0}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 40}
    model: Any = with_chunk_loss(transformers.Gemma2ForCausalLM)(transformers.Gemma2Config(**{"num_hidden_layers": 1, **sizes}))
    assert model.config.final_logit_softcapping == config["final_logit_softcapping"]
    put_loss_head(model, features())
    ids = torch.arange(9)[None]
    with pytest.raises(ConfigError, match="Gemma2ForCausalLM computes with its logits"):
        model(input_ids=ids, labels=ids)


class Adapted(nn.Linear):
    """A head whose weight is not all there is to it, as with LoRA."""


def test_only_a_plain_linear_output_layer_is_replaced(small: Any) -> None:
    def refused(message: str, change: Callable[[Any], None] = lambda model: None, **more: Any) -> None:
        model = load_reference(small[0])
        change(model)
        with pytest.raises(ConfigError, match=message):
            put_loss_head(model, features(**more))

    refused("'lm_hed' matches no module", chunkloss_plan={"apply_module": "lm_hed"})
    refused(
        "matches 2 modules", chunkloss_plan={"apply_module": "model.visual.merger.mlp.{0-2}"} | {"apply_module": "model.language_model.layers.{0-1}"}
    )
    refused("is not the model's output layer; name lm_head", chunkloss_plan={"apply_module": "model.visual.merger.mlp.0"})
    refused("loss_type raw is the model's own loss", loss_cfg={"loss_type": "raw"})
    refused("lm_head is a Adapted that does more than nn.Linear", lambda model: model.set_submodule("lm_head", Adapted(4, 4)))
    refused("does more than nn.Linear", lambda model: model.lm_head.register_forward_hook(lambda *_: None))


def test_registered_classes_bear_the_names_of_transformers_and_are_theirs_with_chunk_loss_off(small: Any) -> None:
    for model_id, name in CLASSES.items():
        made = model_register.get(model_id)
        assert made.__name__ == name
        assert issubclass(made, getattr(transformers, name))
    plain: Any = load_reference(small[0])
    model: Any = model_register.get("qwen2_5_vl")._from_config(plain.config, dtype=torch.float32)
    model.load_state_dict(plain.state_dict(), strict=True)
    assert not isinstance(model.lm_head, LossHead)
    arguments = inputs(plain, small[1])
    mine, theirs = model(**arguments), plain(**arguments)
    assert torch.equal(mine.loss, theirs.loss)
    assert torch.equal(mine.logits, theirs.logits)


CASES = Path(__file__).with_name("cases_chunk.py")


@pytest.mark.parametrize("tied", [False, True])
def test_ranks_with_different_numbers_of_chunks_gather_as_often_and_learn_the_same(tiny_hf: Callable[..., Path], tmp_path: Path, tied: bool) -> None:
    """Rank 1 has no label in its first micro-batch and fewer in its second; a head that is gathered for each chunk would hang."""
    names = ["root owns the head"] if tied else ["head is a unit", "norm and head are units, recomputed layers"]
    hf = tiny_hf("qwen2_5_vl", tied=tied, **SMALL)
    for found in on_ranks(2, CASES, "run_variants", hf, tmp_path, names, "per_sample_loss" if tied else "default"):
        for case, one in found.items():
            for kind in ("losses", "evaluated"):
                chunked_one, whole = one[kind]
                assert abs(chunked_one - whole) < 1e-6 * whole, (case, kind)
            assert one["gathers"][0] == one["gathers"][1] > 0, case
            assert one["error"] < 1e-5, case


def test_bf16_gradients_are_no_further_from_those_in_fp32_than_with_whole_logits(tiny_hf: Callable[..., Path], tmp_path: Path) -> None:
    for chunked_error, whole_error in on_ranks(2, CASES, "bf16_errors", tiny_hf("qwen2_5_vl", **SMALL), tmp_path):
        assert chunked_error < 1.05 * whole_error < 0.05
