"""Training with sequence parallelism, and with a vision encoder in copies: as in one process, with copies of parameters that stay copies, and with
dropout.

That one step is that of transformers is in ``tests/align/test_matrix.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tangram.align.batch import write_batch
from tangram.align.curves import relative
from tangram.align.reference import load_reference, loss_curve
from tangram.align.run import make_task, open_subject, prepare_batch
from tangram.align.task import Curve, Split, TaskList
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
FOUR = Split(tensor=4, sequence_parallel=True)
COPIES = Split(tensor=2, vision_tensor=1, distributed_optimizer=True)
FOUR_IN_COPIES = Split(tensor=4, vision_tensor=2, sequence_parallel=True)
BRIEF, STEPS = (Split(tensor=2), FOUR, FOUR_IN_COPIES), 20
"""Splits that take three steps, and steps of the others."""
SHARED = {str(DIVIDED): 16, str(Split(tensor=2)): 16, str(FOUR): 16, str(COPIES): 31, str(FOUR_IN_COPIES): 46}
"""Parameters, or parts of one, that several ranks hold. A layer has 6 that are split, the projector 3: with one copy of the encoder 16 are not; with
two, 15 more of one part, or 30 of two."""


def tasks_of(hf: Path, splits: Sequence[Split], work: Path, **changes: Any) -> TaskList:
    subject = open_subject(hf, work)
    batch, _ = prepare_batch(subject, None)
    assert batch["input_ids"].shape[1] % 2 and batch["input_ids"].shape[1] % 4, "lengths that do not divide"
    file = write_batch(batch, work)
    tasks = []
    for number, split in enumerate(splits):
        curve = Curve(steps=3 if split in BRIEF else STEPS, lr=1e-3)
        tasks.append(make_task(subject, split, file, work / str(number), micro_batch_size=5, curve=curve))
    return TaskList(tasks=[task.model_copy(update=changes) for task in tasks])


def launch(tasks: TaskList, function: str, work: Path) -> list[Any]:
    file = work / "tasks.json"
    file.write_text(tasks.model_dump_json(), encoding="utf-8")
    return on_ranks(tasks.processes, CASES, function, str(file), patience=PATIENCE)


def _with_dropout(model: ModelConfig) -> ModelConfig:
    assert model.image_encoder is not None
    drop = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
    encoder = model.image_encoder.vision_encoder.model_copy(update=drop)
    image_encoder = model.image_encoder.model_copy(update={"vision_encoder": encoder})
    return model.model_copy(update={"image_encoder": image_encoder, "text_decoder": model.text_decoder.model_copy(update=drop)})


def test_training_is_that_of_one_process_and_copies_stay_bit_equal(tiny_hf: TinyHF, tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM#1446 and #7452: gradients of norms that are not summed over ranks let copies drift; summed twice, or counted on every
    rank, they make the norm too large."""
    hf = tiny_hf("qwen2_5_vl", kv_heads=4, **SMALL)
    tasks = tasks_of(hf, [Split(), DIVIDED, COPIES, *BRIEF], tmp_path)
    ranks = launch(tasks, "train", tmp_path)
    model, batch = load_reference(hf), prepare_batch(open_subject(hf, tmp_path), None)[0]
    expected = loss_curve(model, [batch] * STEPS, 1e-3, (0.9, 0.999), 1e-8, 1.0)
    norms = ranks[0][tasks.tasks[0].name]["norms"]
    assert expected[-1] < 0.9 * expected[0]
    for task in tasks.tasks:
        found = ranks[0][task.name]
        assert len(found["losses"]) == (3 if task.split in BRIEF else STEPS)
        assert max(map(relative, found["losses"], expected)) < 1e-6, task.name
        assert max(map(relative, found["norms"], norms)) < 1e-5, task.name
        held: dict[str, list[str]] = {}
        for rank in ranks[: task.split.processes]:
            for place, digest in rank[task.name]["digests"].items():
                held.setdefault(place, []).append(digest)
        assert all(len(set(digests)) == 1 for digests in held.values()), task.name
        assert sum(len(digests) > 1 for digests in held.values()) == SHARED.get(task.name, 0), task.name


def test_it_needs_ranks_to_divide_over() -> None:
    with pytest.raises(ConfigError, match=r"sequence_parallel .* over tensor-parallel ranks, and there is one; raise the tensor-parallel size"):
        Topology(sequence_parallel=True)


def test_dropout_draws_apart_on_ranks_that_hold_other_tokens(tiny_hf: TinyHF, tmp_path: Path) -> None:
    hf = tiny_hf("qwen2_5_vl", **SMALL)
    subject = open_subject(hf, tmp_path)
    tasks = tasks_of(hf, [DIVIDED], tmp_path, model=_with_dropout(subject.model))
    ranks = launch(tasks, "drop", tmp_path)
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
