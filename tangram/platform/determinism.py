"""Deterministic mode: the same run on the same devices gives the same bits. What it needs, and why, is in docs/deterministic.md."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tangram.errors import ConfigError

VARIABLES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "cpu": {},
    "cuda": {
        # https://docs.nvidia.com/cuda/cublas/index.html#results-reproducibility
        "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
        # The order of a ring's sums is that of its ranks; those of trees and of switches (NVLS) are nobody's promise.
        "NCCL_ALGO": ("Ring",),
        # TransformerEngine: attention, and all that it may add up in an order of chance.
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
        # transformers: what it gives flash-attn as ``deterministic``.
        "FLASH_ATTENTION_DETERMINISTIC": ("1",),
    },
    "npu": {
        # Sums over ranks, by HCCL and by LCCL, which takes small ones over; ``strict`` keeps the order of ranks besides.
        "HCCL_DETERMINISTIC": ("true", "strict"),
        "LCCL_DETERMINISTIC": ("1",),
        # CANN: products whose cores begin at different places of the axis that is summed over.
        "CLOSE_MATMUL_K_SHIFT": ("1",),
    },
}
"""What libraries of each platform read before they are first used: the value that is set, and others that will do. Case does not count."""


def check_environment(platform: str) -> None:
    """Find out whether deterministic mode can be had here.

    Raises:
        ConfigError: the environment asks for the opposite.
    """
    for name, allowed in VARIABLES[platform].items():
        given = os.environ.get(name)
        if given is not None and given.lower() not in {value.lower() for value in allowed}:
            raise ConfigError(f"deterministic mode needs {name}={' or '.join(allowed)}, and the environment has {given}; remove it there")


def make_deterministic(platform: str) -> None:
    """Choose algorithms that repeat themselves; to be called before the device and its communication are first used.

    An operation of torch that has no such algorithm raises from now on, and an operator that does not promise the same bits is left out
    (``tangram.platform.operators``). TF32 is left as it is: it is less exact, but repeats itself.

    Raises:
        ConfigError: as ``check_environment``.
    """
    import torch

    check_environment(platform)
    for name, allowed in VARIABLES[platform].items():
        os.environ.setdefault(name, allowed[0])
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
