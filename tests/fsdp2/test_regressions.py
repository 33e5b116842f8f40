"""What the practice notes list as regressions of chunk loss in a Hugging Face model, and the tests that hold each of them here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tangram.align.reference import load_reference
from tangram.backends.fsdp2.inputs import Supervised
from tangram.backends.fsdp2.loss import SupervisedLoss
from tests.fsdp2.media import Rows
from tests.fsdp2.test_chunk import features, gradients, inputs, served, worst
from tests.fsdp2.truth import truth

ROOT = Path(__file__).parent.parent.parent
CHUNK, HERE = "tests/fsdp2/test_chunk.py::", "tests/fsdp2/test_regressions.py::"
REGISTERED = f"{CHUNK}test_registered_classes_bear_the_names_of_transformers_and_are_theirs_with_chunk_loss_off"
REGRESSIONS = {
    "the model id is registered and built from a directory": REGISTERED,
    "keys are those of Hugging Face": "tests/fsdp2/test_engine_start.py::test_the_model_has_the_keys_of_transformers_and_is_tied_on_the_meta_device",
    "without chunks loss and logits are transformers'": REGISTERED,
    "chunks of text alone": f"{HERE}test_chunks_give_loss_and_gradients_of_whole_logits",
    "chunks with pictures": f"{HERE}test_chunks_give_loss_and_gradients_of_whole_logits",
    "default and per_sample_loss": f"{HERE}test_chunks_give_loss_and_gradients_of_whole_logits",
    "unequal lengths and runs without labels": f"{HERE}test_chunks_give_loss_and_gradients_of_whole_logits",
    "chunks and recomputation": f"{CHUNK}test_recomputed_layers_give_the_same",
    "no logits": f"{CHUNK}test_there_are_no_logits_and_tuples_begin_with_the_loss",
    "a frozen tower has no gradients": f"{CHUNK}test_frozen_parts_get_no_gradient_and_the_others_the_same",
    "a trained tower has finite gradients other than zero": f"{HERE}test_a_trained_tower_has_finite_gradients_other_than_zero",
    "sdpa is eager": "tests/fsdp2/test_engine_loss.py::test_attention_kinds_tuples_plain_positions_and_segments",
    "tuples": f"{CHUNK}test_there_are_no_logits_and_tuples_begin_with_the_loss",
    "dynamic chunks": f"{CHUNK}test_loss_and_every_gradient_are_those_of_transformers",
    "refused: no labels": f"{CHUNK}test_what_needs_logits_is_refused",
    "refused: logits_to_keep": f"{CHUNK}test_what_needs_logits_is_refused",
    "refused: a cache": f"{CHUNK}test_what_needs_logits_is_refused",
    "refused: raw in chunks": f"{CHUNK}test_only_a_plain_linear_output_layer_is_replaced",
    "refused: chunks of a micro-batch": "tests/fsdp2/test_memory_chunk_mbs.py::test_models_with_3d_positions_are_refused_before_they_run",
    "fused operators: twice, elsewhere, switched off": "tests/platform/test_operators.py::test_fusing_twice_and_copies",
    "paths of the published plans": "tests/fsdp2/test_entry.py::test_every_example_passes_every_check",
    "thirty steps": f"{CHUNK}test_thirty_steps_follow_those_of_whole_logits",
}


def test_every_regression_has_a_test() -> None:
    for what, test in REGRESSIONS.items():
        file, name = test.split("::")
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), what


@pytest.fixture(scope="module")
def hf(tiny_hf: Callable[..., Path]) -> Path:
    return tiny_hf("qwen2_5_vl", text_layers=2, vision_layers=2)


@pytest.mark.parametrize("loss_type", ["default", "per_sample_loss"])
@pytest.mark.parametrize("kind", ["text", "image"])
def test_chunks_give_loss_and_gradients_of_whole_logits(hf: Path, kind: str, loss_type: str) -> None:
    """Two rows with 9 and 3 learnt tokens, the longer with a gap; chunks of 1, an odd number, less than all, all and more."""
    batch: dict[str, Any] = Rows(hf).batch((kind, 2, 11), (kind, 5, 3))
    batch["labels"][0, -8:-6] = -100
    loss, wanted = truth(hf, [batch], loss_type)
    model = served(hf, features(enable_chunk_loss=False, enable_dynamic_chunk_loss=True))
    learnt = Supervised.of(batch, loss_type, torch.device("cpu"))
    assert len(learnt.targets) == 12
    model.loss_function = SupervisedLoss(learnt.scaled(1 / learnt.denominator))
    head = model.get_output_embeddings()
    for head.chunk_size in (1, 7, 11, 12, 13):
        found, given = gradients(model, inputs(model, batch))
        assert found == pytest.approx(loss, rel=1e-6)
        assert worst(given, wanted) < 1e-5, head.chunk_size


def test_a_trained_tower_has_finite_gradients_other_than_zero(hf: Path) -> None:
    batch: dict[str, Any] = Rows(hf).batch("image")
    model = served(hf)
    _, found = gradients(model, inputs(model, batch))
    tower = {name for name, _ in load_reference(hf).named_parameters() if name.startswith("model.visual.")}
    assert tower <= set(found)
    assert all(0 < float(found[name].norm()) < float("inf") for name in tower)
