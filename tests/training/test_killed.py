"""SIGKILL in the middle of a save of the real command: the run goes on from a whole checkpoint."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest

from tests.trial import PATIENCE, Trial, run, running, split

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_killed_during_a_save_it_resumes_from_a_whole_checkpoint(trial: Trial, folder: Path) -> None:
    """The tests of the manager kill at every file operation."""
    checkpoints = folder / "ckpt"
    tracker = checkpoints / "latest_checkpointed_iteration.txt"
    endless = ["training.train_iters=100000", "training.save_interval=1", f"training.save={checkpoints}"]
    with running(folder / "first", ["tangram", "train", str(trial.run_file), *endless, *split(2, use_distributed_optimizer=True)], 2) as launch:
        launch.wait_for("saved ")
        deadline = time.monotonic() + PATIENCE
        while not list(checkpoints.glob("iter_*.tmp-*")):
            assert time.monotonic() < deadline and all(process.is_alive() for process in launch.processes)
        time.sleep(random.Random(1).uniform(0, 0.1))
        launch.signal(signal.SIGKILL)
        assert launch.finish().codes == [-signal.SIGKILL] * 2
    step = int(tracker.read_text())
    manifest = json.loads((checkpoints / f"iter_{step:07}" / "manifest.json").read_text())
    assert manifest["step"] == step and manifest["consumed_samples"] == 8 * step
    resumed = [f"model.load={checkpoints}", "training.train_iters=100000", f"training.exit_interval={step + 1}", f"training.save={checkpoints}"]
    output = run(folder / "second", ["tangram", "train", str(trial.run_file), *resumed]).succeeded().output
    assert f"resumed {checkpoints} at step {step}" in output
    assert int(tracker.read_text()) == step + 1 and not list(checkpoints.glob("*.tmp-*")), "the next save removes what the killed one left"
