"""Ports at which processes of this machine meet."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST, FEWEST = 10_000, 1_000


def free_ports(count: int) -> list[int]:
    """So many different ports that nobody listens at now.

    They are drawn below those that the kernel gives out by itself. Of those one that is free now may be taken before a process of ours listens there:
    every process group of gloo takes some.
    """
    below = _kernels_first()
    dice = random.SystemRandom()
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        while len(found) < count:
            probe = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("", dice.randrange(LOWEST, below) if below >= LOWEST + FEWEST else 0))
                found.append(probe.getsockname()[1])
        return found


def _kernels_first() -> int:
    try:
        return int(RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
