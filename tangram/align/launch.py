"""Start the processes of the split model and wait for them."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tangram
from tangram.align.task import Task, TaskList
from tangram.errors import TangramError
from tangram.platform import current

PRELOAD: Mapping[str, Sequence[str]] = {
    "megatron": (
        "tangram.backends.megatron.cpu:adapt",
        "megatron.core.distributed",
        "megatron.core.models.backends",
        "megatron.core.optimizer",
        "megatron.core.pipeline_parallel.schedules",
        "megatron.core.transformer.multi_token_prediction",
        "tangram.align.on_megatron",
        "tangram.backends.megatron.communicator",
        "tangram.backends.megatron.gradients",
        "tangram.models.marks",
        "tangram.models.builtin",
        "tangram.models.vlm",
    ),
    "fsdp2": ("transformers.modeling_utils", "torch.distributed.fsdp", "tangram.align.on_fsdp2"),
}
"""Modules that ranks of a backend import sooner or later, and a function to call first."""
BUILD_VALIDATORS = "tangram.config.parsing:build_validators"


class WorkerError(TangramError):
    """The processes of the split model did not finish."""


class Server:
    """The process of ``tangram.align.server``: one launch of ranks at a time."""

    def __init__(self, log: Path) -> None:
        package = str(Path(tangram.__file__).resolve().parents[1])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))}
        environment.setdefault("OMP_NUM_THREADS", "1")
        with log.open("ab") as output:
            # A session of its own: Ctrl-C reaches this process alone, and all ranks can be ended together.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tangram.align.server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environment,
                start_new_session=True,
            )

    def start(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        # One that has ended cannot read; ``wait`` says so.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def wait(self) -> int:
        """Exit status of the launch, or of the server where that has ended."""
        assert self._process.stdout is not None
        reply = self._process.stdout.readline()
        return int(reply) if reply else self._process.wait() or 1

    def ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """End it and its ranks."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """It ends when its input does."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


_idle: list[Server] = []
"""Servers that wait for the next launch of this process."""


@atexit.register
def _close_idle() -> None:
    while _idle:
        _idle.pop().close()


# The pipes of a forked child are those of its parent.
os.register_at_fork(after_in_child=_idle.clear)


class Launch:
    """Ranks at work."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.status: int | None = None

    def wait(self) -> int:
        """Exit status: 0, or that of the first rank that failed (a signal's number, negative, where it was killed)."""
        if self.status is None:
            self.status = self.server.wait()
        return self.status


@contextlib.contextmanager
def running(tasks: Sequence[Task], work: Path) -> Iterator[Launch]:
    """Processes that work the tasks off while the block runs; they are ended with it if it fails."""
    every = TaskList(tasks=list(tasks))
    for task in tasks:
        task.folder.mkdir(parents=True, exist_ok=True)
    file = work / "tasks.json"
    file.write_text(every.model_dump_json(indent=1), encoding="utf-8")
    server = _idle.pop() if _idle else Server(log_file(work))
    launch = Launch(server)
    try:
        server.start(
            {
                "module": "tangram.align.worker",
                "arguments": [str(file)],
                "processes": every.processes,
                "preload": _preload(tasks),
                "log": str(log_file(work)),
                "environment": {"OMP_NUM_THREADS": "1", **os.environ},
                "folder": str(Path.cwd()),
            }
        )
        yield launch
    finally:
        if launch.status is None or server.ended():
            server.kill()
        else:
            _idle.append(server)


def _preload(tasks: Sequence[Task]) -> list[str]:
    """What the server imports for all ranks. With an accelerator nothing: a process that has touched one cannot fork others that use it."""
    if current().name != "cpu":
        return []
    backends = sorted({task.split.backend for task in tasks})
    return ["tangram.align.worker", "tangram.families.builtin", *(name for backend in backends for name in PRELOAD[backend]), BUILD_VALIDATORS]


def log_file(work: Path) -> Path:
    """Where the processes' output goes."""
    return work / "worker.log"


def finish(launch: Launch, tasks: Sequence[Task], work: Path) -> None:
    """Wait for the processes.

    Raises:
        WorkerError: one failed: one line with the rank's own message. A fault that the user can mend comes first, since other ranks
            then fail for want of their peer.
    """
    status = launch.wait()
    if status == 0:
        return
    faults = [(task, path) for task in tasks for path in sorted(task.folder.glob("fault_*.json"))]
    found = [(task, int(path.stem.removeprefix("fault_")), json.loads(path.read_text(encoding="utf-8"))) for task, path in faults]
    found.sort(key=lambda entry: not entry[2]["mendable"])
    if not found:
        output = log_file(work).read_text(encoding="utf-8", errors="replace")
        reason = re.search(r"^\w[\w.]*(Error|Exception|Interrupt)\b.*$", output, flags=re.MULTILINE)
        why = f": {reason.group()}" if reason else ""
        raise WorkerError(f"the split model's processes ended with status {status}{why}; see {log_file(work)}")
    task, rank, fault = found[0]
    if fault["mendable"]:
        raise WorkerError(f"split model {task.split}, rank {rank}: {fault['message']}")
    raise WorkerError(f"split model {task.split}, rank {rank} failed: {fault['kind']}: {fault['message']}; see {log_file(work)}")
