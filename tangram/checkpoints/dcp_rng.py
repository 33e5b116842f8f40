"""Random state of one rank as a checkpoint entry: python, numpy, torch, and named generators of the backend."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from tangram.errors import CheckpointError


class Generators(Protocol):
    """Random generators that a backend keeps besides torch's own, such as Megatron's per-region device generators."""

    def get(self) -> dict[str, torch.Tensor]:
        """Name -> state, uint8."""

    def set(self, states: Mapping[str, torch.Tensor]) -> None:
        """Restore them."""


def rng_key(rank: int) -> str:
    return f"rng.{rank:05}"


def capture(generators: Generators | None = None) -> torch.Tensor:
    """Random state of this process as a uint8 tensor that holds JSON."""
    kind, words, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(words).tolist(), position, has_gauss, gauss],
        "torch": _pack(torch.get_rng_state()),
        "cuda": _pack(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
        "backend": {name: _pack(value) for name, value in (generators.get() if generators else {}).items()},
    }
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


def restore(tensor: torch.Tensor, generators: Generators | None = None) -> None:
    """Put this process into the state that ``capture`` saw.

    Raises:
        CheckpointError: not what ``capture`` wrote.
    """
    try:
        state = json.loads(tensor.cpu().numpy().tobytes())
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        kind, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(_unpack(state["torch"]))
        if state["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(_unpack(state["cuda"]))
        if generators is not None:
            generators.set({name: _unpack(value) for name, value in state["backend"].items()})
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"random state cannot be read ({error}); start with no_load_rng") from None


def _pack(state: torch.Tensor) -> str:
    return state.cpu().numpy().tobytes().hex()


def _unpack(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
