"""Launches from outside: a failing rank, SIGTERM, and a resume at another split."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.trial import run

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


WORKER = str(ROOT / "tests" / "workers" / "failure_worker.py")
ONE_LINE = ["worker: error: [rank 1] sample 7: broken picture; mend it"]


def test_a_fault_of_one_rank_is_one_line_and_ends_all_that_wait_for_it(tmp_path: Path) -> None:
    outcome = run(tmp_path, [WORKER, "collective"], 3)
    assert all(outcome.codes), outcome.output
    assert [line for line in outcome.errors() if "broken picture" in line] == ONE_LINE
    assert "Connection closed" not in outcome.output and "failure_worker.py\", line" not in outcome.output


def test_a_fault_of_one_rank_is_one_line_and_ends_all_that_torchrun_started_though_they_do_not_wait_for_it() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    finished = subprocess.run(
        [*command, WORKER, "asleep"],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    own = [line for line in finished.stderr.splitlines() if "error: " in line and "broken picture" in line]
    assert own == ONE_LINE
    # torchrun reports the processes that ended; the ranks themselves add no traceback of a broken connection.
    assert "Connection closed" not in finished.stderr and "failure_worker.py\", line" not in finished.stderr
    assert finished.returncode != 0


def test_ranks_that_lose_a_killed_one_say_so_in_one_line_instead_of_their_collectives_trace(tmp_path: Path) -> None:
    outcome = run(tmp_path, [WORKER, "killed"], 3)
    assert all(outcome.codes) and outcome.codes[1] == -signal.SIGKILL, outcome.output
    (line,) = [line for line in outcome.errors() if "error: [rank" in line]
    assert "lost the connection to another process, which has ended (killed, or out of memory?)" in line
    assert "failure_worker.py\", line" not in outcome.output


def test_an_interrupt_that_reaches_the_launcher_alone_ends_the_launch(tmp_path: Path) -> None:
    """As ``kill -INT`` and IDEs send it; a terminal sends it to all processes."""
    sleep = ["-n1", "-r1", "-s", f"import pathlib, time; pathlib.Path({str(tmp_path / 'at work')!r}).touch()", "time.sleep(3600)"]
    code = f"import sys; from tangram.training.launch import launch; sys.exit(launch(1, 'timeit', {sleep}))"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not (tmp_path / "at work").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=200) == 130
    finally:
        process.terminate()


def write_run(folder: Path, hf: Path) -> Path:
    records = [
        {"messages": [{"role": "user", "content": f"Say {i}."}, {"role": "assistant", "content": f"It is {i}."}], "images": []} for i in range(8)
    ]
    (folder / "data.json").write_text(json.dumps(records))
    (folder / "run.yaml").write_text(
        f"""
parallel: {{pipeline_model_parallel_size: 2, vit_pp_layers: [1, 0], llm_pp_layers: [1, 1]}}
model: {{hf_dir: {hf}, load: {hf}}}
data:
  dataset_param:
    preprocess_parameters: {{model_name_or_path: {hf}}}
    basic_parameters: {{dataset: {folder}/data.json, dataset_dir: {folder}}}
training: {{lr: 1.0e-3, train_iters: 100000, global_batch_size: 2, seq_length: 64, save: {folder}/ckpt, loss_type: per_token_loss}}
"""
    )
    return folder / "run.yaml"


def steps(folder: Path) -> list[dict[str, Any]]:
    path = folder / "ckpt" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sigterm_saves_and_exits_0_and_another_split_resumes(tiny_hf: Any, tmp_path: Path) -> None:
    hf = tiny_hf("qwen2_5_vl", True, hidden=32, text_layers=2, vision_layers=1, vocab=None)
    command = [sys.executable, "-m", "tangram", "train", str(write_run(tmp_path, hf))]
    process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        while len(steps(tmp_path)) < 2 and process.poll() is None:
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=250)
    finally:
        process.kill()
    assert process.returncode == 0, output[-3000:]
    before = steps(tmp_path)
    last = len(before)
    assert (tmp_path / "ckpt" / f"iter_{last:07}" / "manifest.json").is_file() and f"stopping after step {last}: SIGTERM" in output
    parallel = ["parallel.pipeline_model_parallel_size=1", "parallel.vit_pp_layers=[1]", "parallel.llm_pp_layers=[2]"]
    more = [f"model.load={tmp_path / 'ckpt'}", f"training.train_iters={last + 2}", *parallel]
    finished = subprocess.run([*command, *more], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    after = steps(tmp_path)
    assert after[:last] == before
    assert [(row["step"], row["consumed_samples"]) for row in after] == [(n, 2 * n) for n in range(1, last + 3)]
