"""How a program of Tangram ends: one line for a fault that the user can mend, a traceback for a fault of ours."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable

from tangram.errors import TangramError

USER_FAULT = 2
INTERRUPTED = 130
GRACE_SECONDS = 1.0
"""Other ranks than 0 wait this long before they report: a fault that all ranks share ends the launch meanwhile, and prints once."""


def guarded(program: str, action: Callable[[], int]) -> int:
    """Run ``action`` and return the exit status.

    A TangramError prints ``PROGRAM: error: MESSAGE`` on stderr and gives 2, Ctrl-C gives 130, other exceptions keep their traceback.
    In a torchrun launch a failed rank leaves at once, without the interpreter's shutdown: that can wait for collectives which the
    other ranks never join.
    """
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    try:
        return action()
    except TangramError as error:
        status = USER_FAULT
        rank = int(os.environ.get("RANK", "0"))
        if rank:
            time.sleep(GRACE_SECONDS)
        sys.stderr.write(f"{program}: error: {f'[rank {rank}] ' if rank else ''}{' '.join(str(error).split())}\n")
    except KeyboardInterrupt:
        status = INTERRUPTED
        sys.stderr.write(f"{program}: interrupted\n")
    except Exception:
        if not launched:
            raise
        status = 1
        traceback.print_exc()
    if launched:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status
