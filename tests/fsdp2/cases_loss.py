"""What ranks do in the tests of losses and packing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tangram.backends.fsdp2.engine import Fsdp2Engine
from tangram.backends.fsdp2.inputs import PackedSegments, forward_arguments
from tangram.errors import DataError
from tests.fsdp2.kit import engine_of, read, write_run
from tests.fsdp2.media import Rows, dealt, unlabelled
from tests.fsdp2.truth import check_step, truth

Batches = list[dict[str, Any]]


def build(hf: Path, folder: Path, name: str, changes: Mapping[str, Any]) -> Fsdp2Engine:
    return engine_of(read(write_run(folder / f"{name}_{os.environ['RANK']}", hf, changes)))


def cuts(hf: Path) -> dict[str, Batches]:
    """Global batches of the same rows, cut into micro-batches in different ways; two ranks get them in turn."""
    rows: list[tuple[str, int, int]] = [("text", 3, 2), ("image", 2, 7), ("text", 5, 0), ("both", 1, 4)]
    made = Rows(hf)
    one = [made.batch(row) for row in rows]
    made = Rows(hf)
    two = [made.batch(*rows[:2]), made.batch(*rows[2:])]
    return {
        "one row, two micro-batches": one,
        "two rows, one micro-batch": two,
        "a rank without labels": [one[0], unlabelled(one[1]), one[3], unlabelled(one[0])],
        "no labels at all": [unlabelled(batch) for batch in one],
    }


def losses(hf: Path, folder: Path) -> None:
    """Every type, every cut, against the loop."""
    for loss_type in ("per_token_loss", "per_sample_loss", "default", "raw"):
        engine = build(hf, folder, loss_type, {"features": {"loss_cfg": {"loss_type": loss_type}}})
        for name, batches in cuts(hf).items():
            mine, what = dealt(batches, engine.data_parallel_rank, 2), f"{loss_type}, {name}"
            check_step(engine, mine, lambda: truth(hf, batches, loss_type), what)  # noqa: B023
        assert engine.evaluate(mine).loss == 0
        result = engine.step(1e-3)
        assert result.grad_norm == 0
        assert not result.skipped


def routers(hf: Path, folder: Path) -> None:
    """The auxiliary loss of routers, times its coefficient, as a mean over micro-batches; not in evaluations."""
    engine = build(hf, folder, "routers", {"features": {"loss_cfg": {"router_aux_loss_coef": 0.3}}})
    batches = [Rows(hf, seed).batch(kind) for seed, kind in enumerate(("text", "image", "both", "text"))]
    mine = dealt(batches, engine.data_parallel_rank, 2)
    evaluated = engine.evaluate(mine).loss
    check_step(engine, mine, lambda: truth(hf, batches, aux=0.3), "routers")
    plain = truth(hf, batches)[0]
    assert abs(evaluated - plain) < 2e-6 * plain
    assert engine._loss is not None
    assert engine._loss - plain > 0.3


def packed(folders: Mapping[str, Path], folder: Path) -> None:
    """Samples that share a row see only themselves, wherever padding lies."""
    rows: list[tuple[str, int, int]] = [("image", 2, 6), ("text", 3, 2), ("both", 1, 5)]
    for number, (family, attention, multiple, loss_type) in enumerate(
        [
            ("qwen2_5_vl", "sdpa", 8, "per_sample_loss"),
            ("qwen2_5_vl", "eager", 1, "per_token_loss"),
            ("qwen2_vl", "sdpa", 1, "per_token_loss"),
            ("qwen3_vl", "sdpa", 8, "per_token_loss"),
        ]
    ):
        hf = folders[family]
        changes = {"features": {"loss_cfg": {"loss_type": loss_type}}, "model": {"attn_implementation": attention}}
        engine = build(hf, folder, str(number), changes)
        one = Rows(hf, dist.get_rank()).batch(*rows, packing=True, multiple=multiple)
        apart = [Rows(hf, seed) for seed in range(2)]
        separate = [rows_of.batch(row) for rows_of in apart for row in rows]
        what = f"{family}, {attention}, padding to {multiple}, {loss_type}"
        check_step(engine, [one], lambda: truth(hf, separate, loss_type, attention=attention), what)  # noqa: B023


def attention_equal(hf: Path, folder: Path) -> None:
    """Eager and sdpa are the same function, and the model can be asked for a tuple."""
    batch = Rows(hf).batch("both", "text")
    found = [build(hf, folder, name, {"model": {"attn_implementation": name}}).evaluate([batch]).loss for name in ("sdpa", "eager")]
    assert abs(found[0] - found[1]) < 1e-6 * found[0]
    engine = build(hf, folder, "tuple", {})
    passed: dict[str, Any] = {}
    hook = engine.module.register_forward_pre_hook(lambda _, __, kwargs: passed.update(kwargs), with_kwargs=True)
    loss = engine.evaluate([batch]).loss
    hook.remove()
    given = engine.module(**passed, return_dict=False)
    assert isinstance(given, tuple)
    # The loss function of the last micro-batch is still in place, and knows the columns that were kept, so the loss is that of the evaluation.
    assert abs(float(given[0]) - loss) < 1e-6 * loss


def unequal_counts(hf: Path, folder: Path) -> str:
    """Ranks with different numbers of micro-batches."""
    engine = build(hf, folder, "unequal", {})
    with pytest.raises(DataError) as error:
        engine.forward_backward([Rows(hf).batch("text")] * (dist.get_rank() + 1))
    return str(error.value)


def plain_positions() -> None:
    """A text model has 2-D positions; packed samples see only themselves there too."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 50}
    model = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="sdpa"))
    ids = torch.randint(50, (1, 11))
    positions = torch.cat([torch.arange(5), torch.arange(6)]).expand(3, 1, -1)
    packed = {"input_ids": ids, "position_ids": positions, "attention_mask": torch.ones_like(ids), "cu_seqlens_padded": torch.tensor([0, 5, 11])}
    together = model(**forward_arguments(model, packed, torch.device("cpu"))).logits
    for part in (slice(0, 5), slice(5, 11)):
        alone = {"input_ids": ids[:, part], "position_ids": positions[..., part], "attention_mask": torch.ones_like(ids[:, part])}
        arguments = forward_arguments(model, alone, torch.device("cpu"))
        assert arguments["position_ids"].shape == arguments["input_ids"].shape
        assert (model(**arguments).logits - together[:, part]).abs().max() < 1e-5


def flash_segments(hf: Path) -> None:
    """Attention of the text model is told where packed samples lie; the tower is not."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(hf)
    told: dict[str, Any] = {}
    for name in ("model.visual.blocks.0.attn", "model.language_model.layers.1.self_attn"):
        model.get_submodule(name).register_forward_pre_hook(lambda _, args, kwargs, name=name: told.update({name: dict(kwargs)}), with_kwargs=True)
    segments = PackedSegments(model.get_decoder())
    batch = Rows(hf).batch("image", ("text", 1, 2), packing=True)
    segments.set(batch, torch.device("cpu"))
    model(**forward_arguments(model, batch, torch.device("cpu")))
    assert torch.equal(told["model.language_model.layers.1.self_attn"]["cu_seq_lens_k"], batch["cu_seqlens_padded"])
    assert told["model.language_model.layers.1.self_attn"]["max_length_q"] == int(batch["cu_seqlens_padded"].diff().max())
    assert "cu_seq_lens_q" not in told["model.visual.blocks.0.attn"]
    segments.set(Rows(hf).batch("text"), torch.device("cpu"))
    model(**forward_arguments(model, Rows(hf).batch("text"), torch.device("cpu")))
    assert "cu_seq_lens_q" not in told["model.language_model.layers.1.self_attn"]


def alone(hf: Path, folder: Path) -> None:
    """What needs one rank only."""
    attention_equal(hf, folder)
    plain_positions()
    flash_segments(hf)
