"""How a program of Tangram ends: one line for a fault that the user can mend, a traceback for a fault of ours."""

from __future__ import annotations

import atexit
import errno
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from tangram.errors import TangramError

USER_FAULT = 2
INTERRUPTED = 130
READER_GONE = 141
"""What a shell gives for a program that SIGPIPE ended."""
GRACE_SECONDS = 1.0
"""Other ranks than 0 wait this long before they report: a fault that all ranks share ends the launch meanwhile, and prints once."""

MACHINE_FAULTS = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
        errno.ENOENT,
        errno.EEXIST,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
    }
)
"""System errors whose mend is another path, its permissions, or free space."""

TRACEBACK = "TANGRAM_TRACEBACK"
"""Environment switch: 1 prints the stack trace before the line of a fault that the user can mend, as for an error in a plug-in."""

before_leaving: list[Callable[[], object]] = []
"""Called between the report of a fault and the end of a launched process."""


def guarded(program: str, action: Callable[[], int], user_fault: int = USER_FAULT) -> int:
    """Run ``action`` and return the exit status.

    A TangramError, or a system error of ``MACHINE_FAULTS``, prints ``PROGRAM: error: MESSAGE`` on stderr and gives ``user_fault``, Ctrl-C
    gives 130, output that nobody reads any more (``| head``) quietly 141, other exceptions keep their traceback.
    In a torchrun launch a failed rank leaves at once, without the interpreter's shutdown: that can wait for collectives which the
    other ranks never join.
    """
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # the caller closed it; a file that is written must not get its number
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115
    try:
        status = action()
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        status = READER_GONE
        # Else the interpreter tries to write the rest when it ends, and complains.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except TangramError as error:
        status = user_fault
        _report(program, str(error))
    except KeyboardInterrupt:
        status = INTERRUPTED
        sys.stderr.write(f"{program}: interrupted\n")
    except Exception as error:
        if isinstance(error, OSError) and error.errno in MACHINE_FAULTS:
            status = user_fault
            place = f"{error.filename}: " if error.filename is not None else ""
            _report(program, f"{place}{error.strerror}; check the path, its permissions and the free space")
        elif not launched:
            raise
        else:
            status = 1
            traceback.print_exc()
    if launched:
        sys.stdout.flush()
        sys.stderr.flush()
        for call in before_leaving:
            call()
        os._exit(status)
    return status


def leave(status: int) -> NoReturn:
    """End this process with ``status``. In a torchrun launch what is to be done at exit is done, and the interpreter's shutdown left out.

    A thread of gloo that still has to let go of a tensor waits for the interpreter, and one that gets there during the shutdown ends the process
    with SIGABRT ("terminate called without an active exception"; pytorch issue 190489): a run that was good would be told as failed.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _report(program: str, message: str) -> None:
    if os.environ.get(TRACEBACK) == "1":
        traceback.print_exc()
    rank = int(os.environ.get("RANK", "0"))
    if rank:
        time.sleep(GRACE_SECONDS)
    sys.stderr.write(f"{program}: error: {f'[rank {rank}] ' if rank else ''}{' '.join(message.split())}\n")
