"""Sequence parallelism with dropout.

That one step is that of transformers is in ``tests/align/test_matrix.py``, and that twenty are in ``test_training_at_every_split``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tangram.align.batch import write_batch
from tangram.align.run import make_task, open_subject, prepare_batch
from tangram.align.task import Split, TaskList
from tangram.config.model import ModelConfig
from tangram.errors import ConfigError
from tangram.placement.topology import Topology
from tests.conftest import TinyHF
from tests.ranks import on_ranks

pytestmark = pytest.mark.timeout(400)
PATIENCE = 380
CASES = Path(__file__).with_name("cases_sequence.py")
SMALL = {"hidden": 32, "text_layers": 2, "vision_layers": 2, "weight_std": 0.1}
DIVIDED = Split(tensor=2, sequence_parallel=True)


def _with_dropout(model: ModelConfig) -> ModelConfig:
    assert model.image_encoder is not None
    drop = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
    encoder = model.image_encoder.vision_encoder.model_copy(update=drop)
    image_encoder = model.image_encoder.model_copy(update={"vision_encoder": encoder})
    return model.model_copy(update={"image_encoder": image_encoder, "text_decoder": model.text_decoder.model_copy(update=drop)})


def test_it_needs_ranks_to_divide_over() -> None:
    with pytest.raises(ConfigError, match=r"sequence_parallel .* over tensor-parallel ranks, and there is one; raise the tensor-parallel size"):
        Topology(sequence_parallel=True)


def test_dropout_draws_apart_on_ranks_that_hold_other_tokens(tiny_hf: TinyHF, tmp_path: Path) -> None:
    hf = tiny_hf("qwen2_5_vl", **SMALL)
    subject = open_subject(hf, tmp_path)
    batch, _ = prepare_batch(subject, None)
    assert batch["input_ids"].shape[1] % 2, "a length that does not divide"
    task = make_task(subject, DIVIDED, write_batch(batch, tmp_path), tmp_path, micro_batch_size=5)
    tasks, file = TaskList(tasks=[task.model_copy(update={"model": _with_dropout(subject.model)})]), tmp_path / "tasks.json"
    file.write_text(tasks.model_dump_json(), encoding="utf-8")
    ranks = on_ranks(tasks.processes, CASES, "drop", str(file), patience=PATIENCE)
    for found in ranks:
        drawn = [mask for _, mask in found["masks"]]
        assert len(drawn) > 12 and len(set(drawn)) == len(drawn), "attention and hidden states must not share their draws"
        assert found["plain"]["loss"] == found["full"]["loss"] == found["selective"]["loss"]
        assert found["plain"]["digest"] == found["full"]["digest"] == found["selective"]["digest"]
        assert found["again"] != found["plain"]["loss"]
        norm, slope = found["slope"]
        assert slope == pytest.approx(norm, rel=1e-2)
    first, second = (found["masks"] for found in ranks)
    shared = [shape for (shape, mine), (_, theirs) in zip(first, second, strict=True) if mine == theirs]
    assert shared == [(39, 5, 32)], "the embedding's, before tokens are divided"
