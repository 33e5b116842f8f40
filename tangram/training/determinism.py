"""Deterministic mode: the same run on the same devices gives the same bits."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from tangram.errors import ConfigError

CUBLAS = (":4096:8", ":16:8")
"""Workspaces with which cuBLAS repeats itself: https://docs.nvidia.com/cuda/cublas/index.html#results-reproducibility."""
VARIABLES: Mapping[str, Mapping[str, str]] = {
    "cpu": {},
    "cuda": {"CUBLAS_WORKSPACE_CONFIG": CUBLAS[0], "FLASH_ATTENTION_DETERMINISTIC": "1"},
    "npu": {"HCCL_DETERMINISTIC": "true"},
}
"""What libraries of each platform read, before they are first used: cuBLAS, transformers for flash-attention, and HCCL for sums over ranks."""


def make_deterministic(platform: str) -> None:
    """Choose algorithms that repeat themselves; to be called before the device is first used.

    An operation that has no such algorithm raises. TF32 is left as it is: it is less exact, but repeats itself.

    Raises:
        ConfigError: the environment asks for the opposite.
    """
    for name, value in VARIABLES[platform].items():
        given = os.environ.setdefault(name, value)
        allowed = CUBLAS if name == "CUBLAS_WORKSPACE_CONFIG" else (value,)
        if given not in allowed:
            raise ConfigError(f"deterministic mode needs {name}={' or '.join(allowed)}, and the environment has {given}; remove it there")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
