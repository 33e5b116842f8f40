"""Rank of ``test_deterministic``: each way to start a run, up to the first use of a device that is not here."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from tangram.platform import CudaPlatform, current
from tangram.platform.determinism import VARIABLES


class DeviceReached(BaseException):
    """In place of a GPU."""


def settings_when_the_device_is_first_used(commands: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """What each command (``tangram ...``, or a script and its flags) has set by then."""
    import runpy

    from tangram.cli.main import main

    found: list[dict[str, Any]] = []

    def use(self: CudaPlatform, local_rank: int) -> torch.device:
        names = VARIABLES["cuda"]
        found.append({**{name: os.environ.get(name) for name in names}, "algorithms": torch.are_deterministic_algorithms_enabled()})
        raise DeviceReached

    CudaPlatform.is_available = lambda self: True  # type: ignore[method-assign]
    CudaPlatform.use = use  # type: ignore[method-assign]
    current.cache_clear()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        os.environ.pop(name, None)
    for command in commands:
        for name in VARIABLES["cuda"]:
            os.environ.pop(name, None)
        torch.use_deterministic_algorithms(False)
        try:
            if command[0] == "tangram":
                main(list(command[1:]))
            else:
                sys.argv = list(command)
                runpy.run_path(command[0], run_name="__main__")
        except DeviceReached:
            continue
    return found
