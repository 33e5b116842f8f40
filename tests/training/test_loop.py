"""The training loop on a small engine: records, log lines, skipped steps, validation, checkpoints, resume.

Worked by hand (weight 0, rate 0.1, target 2 x). Step 1, x = 1, 2: loss (4 + 16) / 2 = 10, gradient (-4 - 16) / 2 = -10, weight 1.
Step 2, x = 3, 1: loss (9 + 1) / 2 = 5, gradient (-18 - 2) / 2 = -10, weight 2. After that the loss is 0.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch

from tangram.config.run import TrainingConfig
from tangram.errors import CheckpointError, DataError, DivergedError
from tangram.training.loop import HOPELESS, Loop, Outputs, Progress, steps_of
from tangram.training.records import MetricsFile

sys.path.insert(0, str(Path(__file__).parent))

from toy_engine import LinearEngine, batch, endless


def settings(**changes: Any) -> TrainingConfig:
    return TrainingConfig.model_validate({"lr": 0.1, "lr_decay_style": "constant", "train_iters": 3, "weight_decay": 0, **changes})


class Run:
    """A loop with everything that it puts out."""

    def __init__(self, folder: Path, steps: Any = None, progress: Progress | None = None, valid: Any = None, **changes: Any) -> None:
        self.engine, self.lines, self.saves = LinearEngine(), list[str](), list[tuple[int, int]]()
        self.file = folder / "metrics.jsonl"
        self.progress = progress or Progress()
        self.loop = Loop(
            engine=self.engine,
            training=settings(**changes),
            global_batch_size=2,
            steps=endless(self.progress.consumed_samples) if steps is None else steps,
            save=lambda at: self.saves.append((at.step, at.consumed_samples)),
            valid_steps=valid,
            outputs=Outputs(self.lines.append, MetricsFile(self.file, self.progress.step)),
            progress=self.progress,
        )

    def run(self) -> Run:
        self.loop.run()
        return self

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()]


def test_log_line_has_megatrons_form(tmp_path: Path) -> None:
    first, second, _ = Run(tmp_path, log_tps=True).run().lines
    form = (
        r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] iteration        1/       3 \| consumed samples:            2"
        r" \| elapsed time per iteration \(ms\): \d+\.\d \| learning rate: 1\.000000E-01 \| global batch size:     2"
        r" \| tokens per sample: 2\.000000E\+00 \| loss: 1\.000000E\+01 \| loss scale: 1\.0 \| grad norm: 10\.000"
        r" \| number of skipped iterations:   0 \| number of nan iterations:   0 \| tokens/s: \d+\.\d \|"
    )
    assert re.fullmatch(form, first)
    assert "iteration        2/       3 | consumed samples:            4 |" in second and "| loss: 5.000000E+00 |" in second
    assert "tokens per sample" not in Run(tmp_path).run().lines[0]


def test_line_of_an_interval_holds_means_and_counts_of_its_steps(tmp_path: Path) -> None:
    lines = Run(tmp_path, log_interval=2, train_iters=5).run().lines
    assert [re.findall(r"iteration +(\d+)/", line) for line in lines] == [["2"], ["4"], ["5"]]
    assert "| loss: 7.500000E+00 |" in lines[0] and "| loss: 0.000000E+00 |" in lines[1]


def test_metrics_have_one_flat_record_per_step(tmp_path: Path) -> None:
    rows = Run(tmp_path).run().rows
    assert [(row["step"], row["consumed_samples"], row["loss"], row["grad_norm"], row["lr"], row["tokens"]) for row in rows] == [
        (1, 2, 10.0, 10.0, 0.1, 2),
        (2, 4, 5.0, 10.0, 0.1, 2),
        (3, 6, 0.0, 0.0, 0.1, 2),
    ]
    assert all(not row["skipped"] and not row["nan"] and row["step_ms"] > 0 and row["tokens_per_s"] > 0 for row in rows)
    assert not any(isinstance(value, dict | list) for row in rows for value in row.values())


def test_a_packed_row_counts_its_samples(tmp_path: Path) -> None:
    row = {**batch([1.0, 2.0, 3.0], [2.0, 4.0, 6.0]), "attention_mask": torch.tensor([[1, 1, 0, 1]])}
    (record,) = Run(tmp_path, steps=iter([[row]]), train_iters=1).run().rows
    assert (record["samples"], record["tokens"], record["padded_tokens"]) == (3, 3, 4)


def test_empty_places_are_no_samples_and_no_tokens(tmp_path: Path) -> None:
    """Else the numbers of one global batch would differ with the number of rows that fill it up."""
    rows = {**batch([1.0, 2.0, 0.0], [2.0, 4.0, 0.0]), "attention_mask": torch.tensor([[1, 1], [1, 0], [1, 0]]), "sample_ids": [4, 5, -1]}
    (record,) = Run(tmp_path, steps=iter([[rows]]), train_iters=1).run().rows
    assert (record["samples"], record["tokens"], record["padded_tokens"]) == (2, 3, 6)


def test_a_step_that_is_not_finite_is_printed_counted_and_changes_no_weight(tmp_path: Path) -> None:
    run = Run(tmp_path, steps=endless(bad_step=2), log_interval=1).run()
    assert "| loss: NAN |" in run.lines[1] and "| grad norm: nan |" in run.lines[1]
    assert "skipped iterations:   1 | number of nan iterations:   1 |" in run.lines[1]
    assert "skipped iterations:   0 | number of nan iterations:   0 |" in run.lines[2]
    assert (run.rows[1]["loss"], run.rows[1]["skipped"], run.rows[1]["nan"]) == ("nan", True, True)
    # Step 3, x = 2, 3, with the weight 1 of step 1: (4 + 9) / 2. Its samples are those that follow the skipped ones.
    assert run.rows[2]["loss"] == 6.5 and run.engine.seen == [0, 1, 2, 3, 4, 5] and run.progress.consumed_samples == 6


def test_a_run_that_changes_no_weight_ends_with_an_error(tmp_path: Path) -> None:
    def never() -> Iterator[list[Any]]:
        while True:
            yield [batch([1.0, 2.0], [math.nan, 2.0])]

    with pytest.raises(DivergedError, match=r"step 3: 3 steps in a row were skipped, .* \(loss nan, gradient norm nan\)"):
        Run(tmp_path, never()).run()
    with pytest.raises(DivergedError, match="step 2: 2 steps in a row"):
        Run(tmp_path, never(), exit_interval=2).run()
    finite = islice(endless(), 2)
    long = Run(tmp_path, chain(finite, never()), train_iters=1000, log_interval=7)
    with pytest.raises(DivergedError, match=f"step {HOPELESS + 2}: {HOPELESS} steps in a row"):
        long.run()
    assert f"iteration      {HOPELESS + 2}/    1000" in long.lines[-1]
    few = Run(tmp_path, chain(islice(endless(), 2), never()), train_iters=5).run()
    assert few.progress.skipped == 3, "a run that has learnt something ends as any other"


def test_a_skipped_step_does_not_move_the_schedule(tmp_path: Path) -> None:
    """Megatron's scheduler steps by what was trained: warm-up over 4 steps gives 0, 1/4, again 1/4 after the skipped step, 2/4."""
    rows = Run(tmp_path, steps=endless(bad_step=2), lr_warmup_iters=4, train_iters=8, exit_interval=4).run().rows
    assert [row["skipped"] for row in rows] == [False, True, False, False]
    assert [row["lr"] for row in rows] == pytest.approx([0.0, 0.025, 0.025, 0.05])


def test_metrics_stay_json_with_infinities(tmp_path: Path) -> None:
    def steps() -> Iterator[Any]:
        yield [batch([1.0], [math.inf])]
        yield [batch([1.0], [1.0])]

    row = Run(tmp_path, steps=steps(), train_iters=2).run().rows[0]
    assert row["loss"] == "inf" and row["nan"]


def test_nan_inside_an_interval_shows_in_its_mean(tmp_path: Path) -> None:
    (line,) = Run(tmp_path, steps=endless(bad_step=2), log_interval=3).run().lines
    assert "| loss: NAN |" in line and "skipped iterations:   1 | number of nan iterations:   1 |" in line


def test_time_to_get_the_data_counts(tmp_path: Path) -> None:
    def slow() -> Iterator[Any]:
        for step in endless():
            time.sleep(0.05)
            yield step

    assert all(row["step_ms"] >= 50 for row in Run(tmp_path, steps=slow()).run().rows)


def test_validation_is_the_mean_over_all_its_samples(tmp_path: Path) -> None:
    passes = []

    def valid() -> Iterator[Any]:
        passes.append(0)
        yield [batch([1.0], [4.0])]
        yield [batch([1.0, 1.0, 1.0], [3.0, 3.0, 3.0])]
        yield [batch([1.0], [99.0])]

    run = Run(tmp_path, valid=valid, eval_interval=2, eval_iters=2, train_iters=4).run()
    # With weight 2 after step 2: one sample at (2 - 4)^2 = 4 and three at 1 make 7 / 4; the mean of means would be 2.5.
    assert [row.get("valid_loss") for row in run.rows] == [None, 1.75, None, 1.75] and len(passes) == 2
    assert " validation loss at iteration 2: 1.750000E+00 | supervised tokens: 4 |" in run.lines


def test_checkpoints_at_the_interval_and_at_the_end_once(tmp_path: Path) -> None:
    assert Run(tmp_path, save="ckpt", save_interval=2, train_iters=5).run().saves == [(2, 4), (4, 8), (5, 10)]
    assert Run(tmp_path, save="ckpt", save_interval=2, train_iters=4).run().saves == [(2, 4), (4, 8)]


def test_exit_interval_saves_and_stops(tmp_path: Path) -> None:
    run = Run(tmp_path, exit_interval=2, train_iters=9).run()
    assert run.saves == [(2, 4)] and run.progress.step == 2


def test_resume_goes_on_with_rate_data_and_file(tmp_path: Path) -> None:
    schedule = {"lr_decay_style": "cosine", "lr_warmup_iters": 2, "train_iters": 6}
    whole = Run(tmp_path / "whole", **schedule).run()
    first = Run(tmp_path, exit_interval=3, **schedule).run()
    # A step after the checkpoint, and half a line of one more: both are cut off.
    with first.file.open("a") as file:
        file.write('{"step": 4, "loss": 7.0}\n{"step": 5, "lo')
    second = Run(tmp_path, progress=Progress(3, 6), **schedule)
    second.engine.weight.data.copy_(first.engine.weight.data)
    second.run()
    assert first.engine.rates + second.engine.rates == whole.engine.rates
    assert first.engine.seen + second.engine.seen == whole.engine.seen
    timed = ("step_ms", "tokens_per_s")
    bare = [[{k: v for k, v in row.items() if k not in timed} for row in rows] for rows in (second.rows, whole.rows)]
    assert bare[0] == bare[1]


def test_a_fresh_run_starts_the_file_anew(tmp_path: Path) -> None:
    Run(tmp_path).run()
    assert len(Run(tmp_path).run().rows) == 3


def test_sigterm_ends_after_the_step_at_hand_with_a_checkpoint(tmp_path: Path) -> None:
    def steps() -> Iterator[Any]:
        for number, step in enumerate(endless(), 1):
            if number == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            yield step

    before = signal.getsignal(signal.SIGTERM)
    run = Run(tmp_path, steps=steps(), train_iters=9).run()
    assert run.progress.step == 2 and run.saves == [(2, 4)] and len(run.rows) == 2
    assert signal.getsignal(signal.SIGTERM) is before


def test_data_that_ends_early_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path, steps=[[batch([1.0], [2.0])]])
    with pytest.raises(DataError, match="the training data ended after step 1 of 3; give more data or lower train_iters"):
        run.run()


def test_evaluation_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="eval_interval 1 needs validation data"):
        Run(tmp_path, eval_interval=1, eval_iters=1).run()


def test_single_micro_batches_are_gathered_into_steps() -> None:
    single = [batch([float(i)], [0.0]) for i in range(5)]
    assert list(steps_of(single, 2)) == [single[0:2], single[2:4]]
    assert list(steps_of([single[:2], single[2:4]], 2)) == [single[:2], single[2:4]]


def test_a_step_without_a_label_is_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be a silent step with loss zero, which also moves the moments."""
    run = Run(tmp_path)
    forward = run.engine.forward_backward

    def without_labels(micro_batches: Any) -> Any:
        result = forward(micro_batches)
        return result if run.progress.step < 1 else replace(result, loss=0.0, weight=0.0, tokens=0)

    monkeypatch.setattr(run.engine, "forward_backward", without_labels)
    with pytest.raises(DataError, match=r"step 2: its global batch of 2 places has 0 supervised tokens \(0 samples are skipped\)"):
        run.run()
    assert run.progress.step == 1 and len(run.rows) == 1 and run.engine.weight.item() == 1.0


def test_skipped_samples_are_counted_in_the_line_the_file_and_the_progress(tmp_path: Path) -> None:
    def steps() -> Iterator[Any]:
        for number, step in enumerate(endless()):
            yield [{**step[0], "skipped_samples": [7, 9]}, step[1]] if number == 1 else step

    run = Run(tmp_path, steps=steps(), log_interval=3, progress=Progress(skipped_samples=3)).run()
    assert run.lines[0].endswith("| number of skipped samples:   2 |") and run.progress.skipped_samples == 5
    assert [row["skipped_samples"] for row in run.rows] == [0, 2, 0]


class Background:
    """A save in the background that fails while step ``bad`` runs, and what was called."""

    def __init__(self, run: Run, bad: int | None = None) -> None:
        self.run, self.bad, self.waits = run, bad, list[int]()

    def failed(self) -> bool:
        return self.run.progress.step + 1 == self.bad

    def wait(self) -> None:
        self.waits.append(self.run.progress.step)
        if self.bad is not None:
            raise CheckpointError("the disk is full")


def test_the_last_save_is_waited_for_however_the_loop_ends(tmp_path: Path) -> None:
    for changes, steps in (({}, 3), ({"exit_interval": 2}, 2)):
        run = Run(tmp_path, **changes)
        run.loop.background = background = Background(run)
        run.run()
        assert background.waits == [steps] and run.saves[-1][0] == steps


def test_sigterm_waits_for_the_save_it_asks_for(tmp_path: Path) -> None:
    def steps() -> Iterator[Any]:
        yield from islice(endless(), 1)
        os.kill(os.getpid(), signal.SIGTERM)
        yield from endless(2)

    run = Run(tmp_path, steps=steps(), train_iters=9)
    run.loop.background = background = Background(run)
    run.run()
    assert run.saves == [(2, 4)] and background.waits == [2]


def test_a_save_that_fails_in_the_background_ends_the_run_at_the_step_it_is_seen_in(tmp_path: Path) -> None:
    run = Run(tmp_path, train_iters=9)
    run.loop.background = Background(run, bad=4)
    with pytest.raises(CheckpointError, match="the disk is full"):
        run.run()
    assert run.progress.step == 4


def test_directories_of_weights_come_at_their_interval_and_at_the_end(tmp_path: Path) -> None:
    run = Run(tmp_path, train_iters=5, save="x", save_hf_interval=2)
    exports: list[int] = []
    run.loop.export = lambda at: exports.append(at.step)
    run.run()
    assert exports == [2, 4, 5]
