"""Honest runs that are really repeated pass the gate; copies of parameters that come apart on one rank do not, and are named."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tangram.align.gate.baseline import Baseline, make_baseline
from tangram.align.gate.compare import hold_against
from tangram.align.gate.read_run import read_run
from tangram.align.gate.replay import prepare
from tangram.align.gate.replay_split import Wishes
from tangram.align.gate.settings import Settings
from tangram.align.gate.verdict import Verdict
from tests.trial import Job, Trial, run_in_turn, write_trial

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
PLANT = Path(__file__).parent.parent / "workers" / "planted_fault.py"
RANKS = 2
REPEATED = {"run": (RANKS, 5), "alone": (1, 17)}
"""Names of runs: their ranks, and how many there are of one kind, of which the first is the baseline."""
ZERO = ["parallel.use_distributed_optimizer=true"]
OVERLAP = [*ZERO, "parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"]
OF_THE_MACHINE = ["time", "memory"]
"""Other tests run beside this one."""


REPLAYS = {
    "pipeline": ("run0", Wishes(pipeline=2, data=1)),
    "tensor": ("run0", Wishes(tensor=2, data=1)),
    "pipeline_of_fsdp2": ("hsdp", Wishes(backend="megatron", pipeline=2, data=1)),
    "tensor_of_fsdp2": ("hsdp", Wishes(backend="megatron", tensor=2, data=1)),
}
"""Replays on other splits and backends, by name, with the runs that they repeat."""


def fsdp2_of(trial: Trial) -> Path:
    """The trial's run on the other backend, in two copies of one shard each."""
    replay = prepare(baseline(trial.folder / "run0"), Wishes(data=RANKS, backend="fsdp2"), trial.folder / "fsdp2")
    content = yaml.safe_load(replay.run_file.read_text())
    content["parallel"]["fully_shard_parallel_size"] = 1
    replay.run_file.write_text(yaml.safe_dump(content))
    return replay.run_file


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs, in three launches; repeats, and by name those with other splits and faults."""
    trial = write_trial(tmp_path_factory.mktemp("trial"), layers=2, train_iters=3, global_batch_size=4, micro_batch_size=1)
    folder = trial.folder

    def job(name: str, *options: str, file: Path = trial.run_file, ranks: int = RANKS, fault: str | None = None) -> Job:
        command = ["train", str(file), f"training.metrics_file={folder / name}/metrics.jsonl", *options]
        return Job(["tangram" if fault is None else str(PLANT), *([] if fault is None else [fault]), *command], ranks)

    jobs = [job(f"{name}{number}", ranks=ranks) for name, (ranks, count) in REPEATED.items() for number in range(count)]
    jobs += [job("nudge", fault="nudge@1"), job("unsummed", fault="unsummed@1")]
    jobs += [job("zero", *ZERO), job("zero_nudge", *ZERO, fault="nudge@1"), job("zero_unsummed", *ZERO, fault="unsummed@1")]
    run_in_turn(folder / "megatron", [*jobs, job("overlap", *OVERLAP)], RANKS).succeeded()
    file = fsdp2_of(trial)
    jobs = [job("hsdp", file=file), job("hsdp_nudge", file=file, fault="nudge@0"), job("hsdp_unsummed", file=file, fault="unsummed@1")]
    run_in_turn(folder / "fsdp2", jobs, RANKS).succeeded()
    replays = [prepare(baseline(folder / of), wishes, folder / name) for name, (of, wishes) in REPLAYS.items()]
    assert [replay.processes for replay in replays] == [RANKS] * len(REPLAYS)
    run_in_turn(folder / "replays", [Job(["tangram", "train", str(replay.run_file)], RANKS) for replay in replays], RANKS).succeeded()
    return folder


def baseline(folder: Path) -> Baseline:
    return make_baseline(read_run(folder), Settings())


def gate(folder: Path, base: Baseline) -> dict[str, str]:
    return {one.name: one.found for one in verdict_of(folder, base).failures}


def verdict_of(folder: Path, base: Baseline) -> Verdict:
    return hold_against(read_run(folder), base, ignore=OF_THE_MACHINE)


@pytest.mark.parametrize("name", REPLAYS)
def test_a_replay_at_another_split_or_on_the_other_backend_passes(name: str, runs: Path) -> None:
    base = baseline(runs / REPLAYS[name][0])
    verdict = hold_against(read_run(runs / name), base, base.settings.changed("digits 5", [], None), ignore=["topology"])
    assert verdict.passed and verdict.compared >= 10, verdict.line


def test_twenty_repeats_of_a_run_raise_no_alarm(runs: Path) -> None:
    assert sum(count - 1 for _, count in REPEATED.values()) == 20
    for kind, (ranks, count) in REPEATED.items():
        base = baseline(runs / f"{kind}0")
        for number in range(1, count):
            verdict = verdict_of(runs / f"{kind}{number}", base)
            assert verdict.passed and verdict.compared == 11 + ranks, verdict.line
    for name in ("zero", "hsdp", "overlap"):
        assert gate(runs / name, baseline(runs / name)) == {}
        assert next(one for one in verdict_of(runs / name, baseline(runs / name)).findings if one.name == "replicas").run == "groups of 2", name


@pytest.mark.parametrize(
    ("name", "of", "check", "text"),
    [
        ("nudge", "run0", "replicas", "step 3: parameters on rank 1 are no longer those on rank 0"),
        ("zero_nudge", "zero", "replicas", "step 3: parameters on rank 1 are no longer those on rank 0"),
        ("hsdp_nudge", "hsdp", "replicas", "step 3: parameters on rank 1 are no longer those on rank 0"),
        ("unsummed", "run0", "replicas", "step 1: norm of the summed gradients is "),
        ("hsdp_unsummed", "hsdp", "replicas", "step 1: norm of the summed gradients is "),
        # Each rank updates its own part and hands it to the others, so copies stay alike.
        ("zero_unsummed", "zero", "ranks", "rank 1, step 1: grad_norm "),
    ],
)
def test_a_copy_that_comes_apart_is_caught_and_named(name: str, of: str, check: str, text: str, runs: Path) -> None:
    found = gate(runs / name, baseline(runs / of))
    assert text in found[check], found
