"""Offload of activations over ranks: with sequence parallelism, dropout and recomputation, and with virtual pipeline stages, no bit changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tangram.align.batch import write_batch
from tangram.align.run import make_task, open_subject, prepare_batch
from tangram.align.task import Split, TaskList
from tests.backends.test_sequence_parallel import _with_dropout
from tests.conftest import TinyHF
from tests.ranks import on_ranks

CASES = Path(__file__).with_name("cases_offload.py")
SPLITS = (
    Split(tensor=2, sequence_parallel=True),
    Split(pipeline=2, virtual=2, vit_pp_layers=[[3, 1], [0, 0]], llm_pp_layers=[[0, 1], [1, 2]]),
)


@pytest.mark.timeout(400)
def test_gradients_are_bit_equal_and_activations_leave(tiny_hf: TinyHF, tmp_path: Path) -> None:
    hf = tiny_hf("qwen2_5_vl", hidden=32, weight_std=0.1)
    subject = open_subject(hf, tmp_path)
    batch, _ = prepare_batch(subject, None)
    file = write_batch(dict(batch), tmp_path)
    tasks = [make_task(subject, split, file, tmp_path / str(number), micro_batch_size=1) for number, split in enumerate(SPLITS)]
    tasks = [task.model_copy(update={"model": _with_dropout(subject.model)}) for task in tasks]
    (tmp_path / "tasks.json").write_text(TaskList(tasks=tasks).model_dump_json(), encoding="utf-8")
    for rank in on_ranks(2, CASES, "offload", str(tmp_path / "tasks.json"), patience=380):
        for split, found in rank.items():
            plain = found.pop("plain")
            assert plain["sent"] == 0
            for name, one in found.items():
                assert (one["loss"], one["digest"]) == (plain["loss"], plain["digest"]), (split, name)
                assert one["sent"] > 0, (split, name)
            assert found["selective"]["sent"] > found["full"]["sent"], split
