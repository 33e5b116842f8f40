"""An operator: one plain implementation, and fused ones by device type."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tangram.errors import ConfigError

log = logging.getLogger(__name__)

SWITCH = "TANGRAM_FUSED_OPS"
"""Environment: 0 turns off all fused operators."""
MINDSPEED_SWITCH = "QWEN25VL_DISABLE_NPU_FUSION"
"""Environment: 1 turns off those of the npu; MindSpeed-MM's name."""


@dataclass(frozen=True)
class Fused:
    """Where a fused implementation is.

    Args:
        module: of ours, imported when it is first wanted; it has a function of the operator's name.
        library: that it calls.
        function: of that library, without which it cannot run.
        repeats: whether it gives the same bits each time, at least where ``torch.use_deterministic_algorithms`` is on: by itself, or since our module
            asks for it.
    """

    module: str
    library: str
    function: str
    repeats: bool = False


@dataclass(frozen=True)
class Operator:
    """Called like its implementations; the first argument is the tensor whose device decides.

    Args:
        fused: by device type; of several the first that is there.
    """

    name: str
    plain: Callable[..., Any]
    fused: Mapping[str, Fused | tuple[Fused, ...]]

    def __call__(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.chosen(tensor)(tensor, *args, **kwargs)

    def chosen(self, tensor: Tensor) -> Callable[..., Any]:
        """The implementation for the device of ``tensor``."""
        return self.fused_for(tensor) or self.plain

    def fused_for(self, tensor: Tensor) -> Callable[..., Any] | None:
        """The fused implementation for the device of ``tensor``, as ``fused_on``."""
        return self.fused_on(device_type(tensor))

    def fused_on(self, device: str) -> Callable[..., Any] | None:
        """The fused implementation on a type of device; None: there is none, it cannot be imported, or it is switched off; or, in deterministic
        mode, none that repeats itself.

        What is found at the first call stays so for the whole process, or until that mode changes.

        Raises:
            ConfigError: the environment's switch is neither 0 nor 1.
        """
        choices = self._choices(device)
        return _load(self.name, device, choices) if choices else None

    def needed_on(self, device: str) -> Callable[..., Any]:
        """As ``fused_on``, for those who asked for it by name.

        Raises:
            ConfigError: it cannot be imported or is switched off, or does not repeat itself in deterministic mode; or as ``fused_on``.
        """
        found = self.fused_on(device)
        if found is not None:
            return found
        fused = self._all(device)[0]
        if not self._choices(device):
            raise ConfigError(f"{fused.library} is asked for, and does not promise the same bits each time; set auto, or deterministic mode off")
        if not _wanted(device):
            raise ConfigError(f"{fused.library} is asked for, and the environment turns off fused operators ({SWITCH}); remove one of the two")
        try:
            return _import(self.name, fused)
        except Exception as error:
            why = " ".join(str(error).split())
            raise ConfigError(f"{fused.library} is asked for, and cannot be used: {type(error).__name__}: {why}; install it, or set auto") from error

    def repeats_on(self, device: str) -> bool:
        """Whether there is a fused implementation that deterministic mode leaves in."""
        return any(fused.repeats for fused in self._all(device))

    def _all(self, device: str) -> tuple[Fused, ...]:
        found = self.fused.get(device, ())
        return found if isinstance(found, tuple) else (found,)

    def _choices(self, device: str) -> tuple[Fused, ...]:
        return tuple(fused for fused in self._all(device) if fused.repeats or not torch.are_deterministic_algorithms_enabled())


def device_type(tensor: Tensor) -> str:
    """What decides."""
    return tensor.device.type


@cache
def _load(name: str, device: str, choices: tuple[Fused, ...]) -> Callable[..., Any] | None:
    if not _wanted(device):
        return None
    reasons = []
    for fused in choices:
        try:
            return _import(name, fused)
        except Exception as error:  # whatever a broken installation raises, the plain implementation is right
            reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())}")
    log.warning("%s is not fused on %s: %s", name, device, "; ".join(reasons))
    return None


def _import(name: str, fused: Fused) -> Callable[..., Any]:
    getattr(importlib.import_module(fused.library), fused.function)
    found: Callable[..., Any] = getattr(importlib.import_module(fused.module), name)
    return found


def _wanted(device: str) -> bool:
    for variable, off, devices in ((SWITCH, "0", None), (MINDSPEED_SWITCH, "1", ("npu",))):
        value = os.environ.get(variable)
        if value not in (None, "", "0", "1"):
            raise ConfigError(f"environment {variable} is {value!r}; give 0 or 1, or leave it out")
        if value == off and (devices is None or device in devices):
            return False
    return True
