"""What ranks tell each other after a step: copies count once, samples have one digest on any ranks, and nothing is lost on the way."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tangram.backends.engine import ForwardResult, RankNorms, StepResult
from tangram.errors import DataError
from tangram.training.agreement import Share, rank_record, totals_of
from tangram.training.rank_records import RankRecord, RanksFile, from_words, to_words


def batch(ids: list[int], tokens: int = 3) -> dict[str, Any]:
    return {"sample_ids": ids, "attention_mask": torch.ones(len(ids), tokens, dtype=torch.long)}


def share(micro_batches: list[dict[str, Any]], data_rank: int = 0, **numbers: Any) -> Share:
    return Share.of(micro_batches, False, data_rank, None, 2**30, **numbers)


def test_the_same_batch_on_one_on_four_and_on_split_ranks_has_the_same_totals() -> None:
    alone = totals_of([share([batch([0, 1]), batch([2, 3])])], 1, step=1)
    split = [share([batch([0, 1]), batch([2, 3])])] * 2
    copies = [share([batch([3])]), share([batch([3])]), share([batch([2, 0, 1])], 1), share([batch([2, 0, 1])], 1)]
    assert totals_of(split, 2, step=1) == totals_of(copies, 2, step=1) == alone
    assert (alone.samples, alone.tokens, alone.stop) == (4, 12, False)
    other = totals_of([share([batch([1, 2]), batch([3, 4])])], 1, step=1)
    assert other.samples_digest != alone.samples_digest and len(str(other.samples_digest)) == 16


def test_empty_places_change_neither_samples_nor_digest() -> None:
    filled = totals_of([share([batch([4, 5])]), share([{**batch([6, -1]), "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])}], 1)], 1, step=1)
    assert filled.samples_digest == totals_of([share([batch([4, 5, 6])])], 1, step=1).samples_digest
    assert (filled.samples, filled.tokens) == (3, 9)


def test_ranks_of_one_copy_that_were_given_different_samples_end_the_run() -> None:
    with pytest.raises(DataError, match="step 7: ranks 1 and 2 are of one copy of the model and were given different samples"):
        totals_of([share([batch([1])], 0), share([batch([2])], 1), share([batch([3])], 1)], 1, step=7)


def test_ranks_of_one_copy_that_were_given_other_tokens_end_the_run() -> None:
    """As where a node has an older copy of the data: the numbers of the samples are the same."""
    tokens = {"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[-100, 6, 7]])}
    swapped, unlearnt = (tokens | {name: torch.tensor([row])} for name, row in (("input_ids", [5, 7, 6]), ("labels", [-100, -100, 7])))
    assert totals_of([share([batch([1]) | tokens])] * 2, 2, step=7).samples == 1
    for other in (swapped, unlearnt):
        with pytest.raises(DataError, match="step 7: ranks 0 and 1 are of one copy of the model and were given different tokens; give every node"):
            totals_of([share([batch([1]) | tokens]), share([batch([1]) | other])], 2, step=7)


def test_data_without_ids_have_no_digest() -> None:
    named, nameless = batch([1, 2]), {"attention_mask": torch.ones(2, 3)}
    assert totals_of([share([named]), share([nameless], 1)], 1, step=1).samples_digest is None
    assert totals_of([share([nameless])], 1, step=1).samples == 2


@pytest.mark.parametrize("value", [None, 0.0, -0.0, 1 / 3, -1e300, 5e-324, math.inf, -math.inf])
def test_numbers_travel_as_whole_ones_without_loss(value: float | None) -> None:
    back = from_words(*to_words(value))
    assert repr(back) == repr(value)
    assert repr(from_words(*to_words(math.nan))) == "nan"


def test_what_each_rank_found_is_kept_by_rank() -> None:
    first = share([batch([1])], forward=ForwardResult(2.0, 1.0, 1), result=StepResult(5.0, False, RankNorms(3.0, 1.0, 0)))
    second = share([batch([1])], forward=ForwardResult(2.0, 1.0, 1, own_loss=2.0), result=StepResult(5.0, False, RankNorms(4.0)))
    assert rank_record([first, second], 3) == RankRecord(3, [None, 2.0], [3.0, 4.0], [1.0, None], [0, 0], [1024.0, 1024.0])


def test_the_file_of_ranks_is_cut_where_a_run_goes_on_and_thinned_when_it_is_long(tmp_path: Path) -> None:
    path = tmp_path / "metrics.ranks.jsonl"
    record = RankRecord(1, [math.nan], [1.0], [None], [0], [2.0])
    first = RanksFile(path, {"seed": 1}, "a: 1\n")
    for step in (1, 2, 3, 100, 101, 199, 200):
        first.write(RankRecord(step, *list(vars(record).values())[1:]))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row.get("step") for row in rows] == [None, 1, 2, 3, 100, 200] and rows[1]["loss"] == ["nan"]
    path.write_text(path.read_text() + '{"step": 201, "lo')
    RanksFile(path, {"seed": 1}, "a: 1\n", resumed_step=2)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row.get("after_step"), row.get("step")) for row in rows] == [(0, None), (None, 1), (None, 2), (2, None)]
    RanksFile(path, {"seed": 1}, "a: 1\n", resumed_step=0)
    assert len(path.read_text().splitlines()) == 1
