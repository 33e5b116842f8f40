"""One rank's ``model_optim_rng.pt``, read without running what it holds.

Files of a training run keep the arguments, the random states and more beside the weights, as objects of argparse, numpy and Megatron.
They are of no use here, and are replaced by empty objects; an object of any other origin makes the file refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from tangram.errors import CheckpointError

BOOKKEEPING = frozenset(
    {"_codecs", "argparse", "collections", "datetime", "enum", "megatron", "mindspeed", "mindspeed_mm", "numpy", "pathlib", "types"}
)
"""Packages whose objects the files of training runs hold."""


MODEL_KEY = re.compile(r"model\d*")
"""Key of a model chunk: ``model``, or ``model0``, ``model1``, ... with virtual stages."""


class _Nothing:
    """Stands for an object that is not read; takes whatever a pickle gives it."""

    def __new__(cls, *_: Any, **__: Any) -> _Nothing:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


def load_rank_file(path: Path) -> Mapping[str, Any]:
    """Content of a rank's file; tensors are mapped, not loaded.

    Raises:
        CheckpointError: the file is missing, damaged, or holds objects that are neither plain values nor a training run's bookkeeping.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; convert again")
    try:
        with _tensors_alone():
            try:
                state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except UnpicklingError as error:
                with torch.serialization.safe_globals(_stand_ins(path, error)):
                    state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UnpicklingError as error:
        raise CheckpointError(f"{path}: holds more than tensors and plain values, which is not loaded: {str(error).split('.')[0]}") from None
    except Exception as error:  # a damaged pickle can fail in any way
        said = (str(error).splitlines() or [""])[0] if isinstance(error, (RuntimeError, OSError, ValueError)) else "its contents are damaged"
        raise CheckpointError(f"{path}: cannot be read, {path.stat().st_size} bytes: {said}; copy or convert it again") from None
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path}: holds a {type(state).__name__} instead of a mapping with the model's tensors; convert again")
    for key, value in state.items():
        if not isinstance(key, str) or (MODEL_KEY.fullmatch(key) and not _is_named(value)):
            raise CheckpointError(f"{path}: {key!r} is a {type(value).__name__} instead of a mapping from names to tensors; convert again")
    return state


def _is_named(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


@contextmanager
def _tensors_alone() -> Iterator[None]:
    """Forget what else may be loaded: megatron-core allows some of numpy's objects, which cannot be built from stand-ins for the others."""
    allowed = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        yield
    finally:
        torch.serialization.add_safe_globals(allowed)


def _stand_ins(path: Path, error: UnpicklingError) -> list[Any]:
    """Replacements of the names that torch refused, or the refusal again."""
    names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    foreign = sorted(name for name in names if name.partition(".")[0] not in BOOKKEEPING)
    if foreign:
        raise UnpicklingError(f"an object of {foreign[0].replace('.', ' ')}")
    if not names:
        raise error
    return [(_Nothing, name) for name in names]
