"""Start the processes of the split model and wait for them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import tangram
from tangram.align.task import Task, TaskList
from tangram.errors import TangramError


class WorkerError(TangramError):
    """The processes of the split model did not finish."""


@contextlib.contextmanager
def running(tasks: Sequence[Task], work: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Processes that work the tasks off while the block runs; they are ended with it if it fails."""
    every = TaskList(tasks=list(tasks))
    for task in tasks:
        task.folder.mkdir(parents=True, exist_ok=True)
    file = work / "tasks.json"
    file.write_text(every.model_dump_json(indent=1), encoding="utf-8")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(every.processes), "-m", "tangram.align.worker", str(file)]
    package = str(Path(tangram.__file__).resolve().parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))}
    environment.setdefault("OMP_NUM_THREADS", "1")
    with log_file(work).open("wb") as log:
        # A session of its own, so that all processes can be ended together.
        process = subprocess.Popen([sys.executable, *command], stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def log_file(work: Path) -> Path:
    """Where the processes' output goes."""
    return work / "worker.log"


def finish(process: subprocess.Popen[bytes], tasks: Sequence[Task], work: Path) -> None:
    """Wait for the processes.

    Raises:
        WorkerError: one failed: one line with the rank's own message. A fault that the user can mend comes first, since other ranks
            then fail for want of their peer.
    """
    if process.wait() == 0:
        return
    faults = [(task, path) for task in tasks for path in sorted(task.folder.glob("fault_*.json"))]
    found = [(task, int(path.stem.removeprefix("fault_")), json.loads(path.read_text(encoding="utf-8"))) for task, path in faults]
    found.sort(key=lambda entry: not entry[2]["mendable"])
    if not found:
        output = log_file(work).read_text(encoding="utf-8", errors="replace")
        reason = re.search(r"^\w[\w.]*(Error|Exception|Interrupt)\b.*$", output, flags=re.MULTILINE)
        why = f": {reason.group()}" if reason else ""
        raise WorkerError(f"the split model's processes ended with status {process.returncode}{why}; see {log_file(work)}")
    task, rank, fault = found[0]
    if fault["mendable"]:
        raise WorkerError(f"split model {task.split}, rank {rank}: {fault['message']}")
    raise WorkerError(f"split model {task.split}, rank {rank} failed: {fault['kind']}: {fault['message']}; see {log_file(work)}")
