"""The package's one logger: rank 0 speaks for all, and other ranks only when something is wrong."""

from __future__ import annotations

import logging
import sys

LOGGER = logging.getLogger("tangram")


def set_up_logging(rank: int) -> None:
    """Send the package's messages to stdout: everything from rank 0, warnings and errors with their rank from the others."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s" if rank == 0 else f"[rank {rank}] %(message)s"))
    LOGGER.handlers[:] = [handler]
    LOGGER.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    LOGGER.propagate = False
