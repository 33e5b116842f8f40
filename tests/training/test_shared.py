"""What one rank makes for all: the sizes of the samples, without a cache that ranks share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trial import Trial, metrics, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PACKED = ["data.dataset_param.basic_parameters.packing=true", "training.micro_batch_size=1", "training.global_batch_size=2", "training.train_iters=3"]
WORKERS = "data.dataset_param.basic_parameters.preprocessing_num_workers=2"
SCRIPT = """
import os, signal, sys
from tangram.data import build, encode_all
from tangram.data.encode import SampleEncoder

encode_all.REPORT_SECONDS = 0.0
compute, tokens = build.compute_sizes, SampleEncoder.tokens

def told(*arguments):
    print(f"sizes on rank {os.environ['RANK']}", flush=True)
    return compute(*arguments)

def deadly(self, sample):
    if sample.id == 17:
        os.kill(os.getpid(), signal.SIGKILL)
    return tokens(self, sample)

build.compute_sizes = told
if "deadly" in sys.argv[0]:
    SampleEncoder.tokens = deadly

if __name__ == "__main__":
    from tangram.cli.main import main
    sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def script(folder: Path) -> Path:
    folder.mkdir()
    for name in ("told.py", "deadly.py"):
        (folder / name).write_text(SCRIPT)
    return folder / "told.py"


def test_one_rank_tokenises_and_says_how_far_it_is(trial: Trial, script: Path, folder: Path) -> None:
    command = [str(script), "train", str(trial.run_file), f"training.metrics_file={folder}/m", *PACKED]
    outcome = run(folder / "log", command, 2).succeeded()
    assert outcome.output.count("sizes on rank") == 1 == outcome.outputs[0].count("sizes on rank 0")
    assert outcome.output.count("tokenised 32 of 40 samples") == 1 and "tokenised 40 of 40 samples" in outcome.outputs[0]
    assert len(metrics(folder / "m")) == 3


def test_the_death_of_what_tokenises_ends_all_ranks_with_one_line(trial: Trial, script: Path, folder: Path) -> None:
    """The other rank has no such process: it waits for the sizes."""
    command = [
        str(script.with_name("deadly.py")),
        "train",
        str(trial.run_file),
        *PACKED,
        "data.dataset_param.basic_parameters.preprocessing_num_workers=2",
    ]
    outcome = run(folder / "log", command, 2)
    assert all(outcome.codes) and "Traceback" not in outcome.output, outcome.output[-3000:]
    (line,) = outcome.errors()
    assert "error: a process that tokenises was killed while samples 0 to 39 were in work; out of memory? lower preprocessing_num_workers" in line
