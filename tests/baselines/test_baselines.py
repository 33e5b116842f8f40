"""Every stored baseline against runs at several topologies, by the gate that users have."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tangram.align.gate.baseline import read_baseline
from tangram.align.gate.compare import hold_against
from tangram.align.gate.render import render
from tangram.align.gate.replay import prepare
from tangram.align.gate.replay_split import Wishes
from tangram.align.gate.settings import Settings
from tangram.cli.main import main
from tests.baselines.recipe import BACKENDS, FAMILIES, INITS, INPUTS, MARGINS, SAMPLES, STEPS, STORED, stored, topologies, write_inputs
from tests.baselines.thirty import deviations, thirty_steps
from tests.trial import Job, run_in_turn

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PLANT = str(Path(__file__).parent.parent / "workers" / "planted_fault.py")
FAULTY = "qwen2_5_vl"
"""The family whose launch has runs with faults and runs of thirty steps besides."""


@dataclass(frozen=True)
class Case:
    """A stored baseline and a topology that it must hold at."""

    family: str
    backend: str
    init: str
    topology: str

    def __str__(self) -> str:
        return f"{self.family}, {self.backend}, {self.init}, {self.topology}"

    @property
    def file(self) -> Path:
        return stored(self.family, self.backend, self.init)

    @property
    def wishes(self) -> Wishes:
        return topologies(self.family, self.backend, self.init)[self.topology]


CASES = [
    Case(family, backend, init, topology)
    for family in FAMILIES
    for backend in BACKENDS
    for init in INITS
    for topology in topologies(family, backend, init)
]
FAULTS = {
    "loss@1": Case(FAULTY, "megatron", "hf", "DP2, distributed optimizer"),
    "norms": Case(FAULTY, "megatron", "random", "TP2 x SP"),
    "order": Case(FAULTY, "fsdp2", "random", "one process"),
}
Launched = Callable[[str], Path]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that paths of stored baselines start from."""
    folder = tmp_path_factory.mktemp("baselines")
    write_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def launched(root: Path) -> Launched:
    """``launched(family)``: the folder of all its runs, which share two processes; they take their run files from the stored baselines."""
    known: dict[str, bool] = {}

    def job(case: Case, name: str, *before: str) -> Job:
        run = prepare(read_baseline(case.file), case.wishes, root / case.family / name, root)
        return Job([*(before or ["tangram"]), "train", str(run.run_file)], run.processes)

    def launch(family: str) -> Path:
        if family not in known:
            jobs = [job(case, str(case)) for case in CASES if case.family == family]
            if family == FAULTY:
                jobs += [job(case, fault, PLANT, fault) for fault, case in FAULTS.items()]
                jobs += [Job(["tangram", "train", str(file)]) for file in thirty_steps(root, root / family)]
            known[family] = False
            run_in_turn(root / family / "log", jobs, 2).succeeded()
            known[family] = True
        assert known[family], f"the launch of {family} failed"
        return root / family

    return launch


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_stored_baseline_holds_at_every_topology(case: Case, launched: Launched, capsys: pytest.CaptureFixture[str]) -> None:
    run = launched(case.family) / str(case)
    status = main(["gate", str(run), str(case.file), *(["--ignore", "topology"] if case.topology != "one process" else [])])
    said = capsys.readouterr().out
    assert status == 0, f"\n{said}"
    compared = {line.split()[0] for line in said.splitlines() if " ok " in line}
    assert compared >= {"seed", "data", "tokenizer", "model", "batch", "settings", "steps", "samples", "loss", "grad_norm"}, said


@pytest.mark.parametrize(
    ("fault", "failed", "words"),
    [
        ("loss@1", {"loss"}, "loss: step 1 is "),
        ("norms", {"loss", "grad_norm", "replicas"}, "step 1: gradient norm of what they share is "),
        ("order", {"samples", "loss", "grad_norm"}, "step 1 and 4 more have other samples"),
    ],
)
def test_a_fault_at_one_topology_is_told(fault: str, failed: set[str], words: str, launched: Launched, capsys: pytest.CaptureFixture[str]) -> None:
    """A loss that is half of a ten-thousandth off, norms whose gradients are not summed over ranks, and samples that come one place too early."""
    case, run = FAULTS[fault], launched(FAULTY) / fault
    report = run / "gate.json"
    assert main(["gate", str(run), str(case.file), "--ignore", "topology", "--json", str(report)]) == 1
    assert words in capsys.readouterr().out
    found = {one["name"] for one in json.loads(report.read_text())["findings"] if one["passed"] is False}
    assert found >= failed and found <= failed | {"grad_norm", "ranks"}, found


def test_loss_in_chunks_and_the_backend_change_thirty_steps_by_rounding_alone(launched: Launched) -> None:
    """The practice notes report 4.77e-7 and, relative, 1.22e-7 of their own chunk loss."""
    folder = launched(FAULTY)
    for one, other in (("megatron, chunks", "megatron, whole"), ("fsdp2, chunks", "fsdp2, whole"), ("fsdp2, whole", "megatron, whole")):
        found = deviations(folder, one, other)
        assert 0 < found["loss"].relative <= 1e-6 and 0 < found["grad_norm"].relative <= 1e-5, f"{one}: {found}"


def test_a_stored_baseline_can_be_replayed_where_its_inputs_lie(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    assert main(["replay", str(stored("llava", "megatron", "hf")), "--tp", "2", "--write-only", "-o", "replayed"]) == 0
    content = yaml.safe_load((root / "replayed" / "run.yaml").read_text())
    assert content["model"]["load"] == content["model"]["hf_dir"] == str(root / INPUTS / "llava")
    assert content["data"]["dataset_param"]["basic_parameters"]["dataset"] == str(root / INPUTS / "data.json")


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_baselines_of_both_backends_agree(family: str, init: str) -> None:
    megatron, fsdp2 = (read_baseline(stored(family, backend, init)) for backend in BACKENDS)
    verdict = hold_against(fsdp2.recorded, megatron, ignore=["topology"])
    assert verdict.passed, f"\n{render(verdict)}"


def test_stored_baselines_are_small_and_of_no_machine() -> None:
    """One of each family, backend and kind of weights, with tight margins, all samples once, and paths that start from the root."""
    files = sorted(STORED.iterdir())
    assert files == sorted(stored(family, backend, init) for family in FAMILIES for backend in BACKENDS for init in INITS)
    for file in files:
        baseline, content = read_baseline(file), file.read_text()
        assert len(content) < 16_000 and '"/' not in content and ": /" not in content, file
        assert baseline.settings == Settings().changed("margin", MARGINS, 0)
        facts, config = baseline.recorded.facts[0], yaml.safe_load(baseline.recorded.config or "")
        assert facts["seed"] == 42 and facts["global_batch_size"] * len(baseline.recorded.steps) == SAMPLES and len(baseline.recorded.steps) == STEPS
        assert config["data"]["dataloader_param"]["shuffle"] is False
        given = config["model"]["load"] if facts["backend"] == "megatron" else config["training"]["load"]
        assert (given is None) == (".random." in file.name)
