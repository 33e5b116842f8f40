"""One instance's forward, replaced. Classes stay as they are, and so do the names of parameters, for no module comes between."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import update_wrapper
from typing import Any

from torch import nn

from tangram.config.patterns import match_each
from tangram.errors import ConfigError


class Wrapped(ABC):
    """Base of what stands in place of ``module.forward``. Hooks of the module, those of FSDP among them, stay outside it.

    Args:
        path: of the module, for messages.
    """

    def __init__(self, path: str, module: nn.Module) -> None:
        forward: Callable[..., Any] = module.forward
        update_wrapper(self, forward, updated=())  # transformers reads the signatures of forwards
        self.path, self.module, self.inner = path, module, forward

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def install(self) -> None:
        """Let the module use it."""
        self.module.forward = self


def chosen(model: nn.Module, patterns: list[str], switch: tuple[str, bool], key: str) -> dict[str, nn.Module]:
    """Modules that a plan names, by path; none where the feature is off.

    Args:
        switch: key and value of what switches the feature on.
        key: of ``patterns``, for messages.

    Raises:
        ConfigError: the feature is on and no module is named; a pattern that matches nothing or what another one matches; a module that is
            never called; a module within another.
    """
    name, on = switch
    if not on:
        return {}
    if not patterns:
        raise ConfigError(f"{name} is on, but {key} is empty; name the modules, such as model.language_model.layers.{{*}}, or switch it off")
    modules = {path: module for path, module in model.named_modules() if path}
    found = [path for paths in match_each(patterns, modules, key).values() for path in paths]
    for path in found:
        if type(modules[path]).forward is nn.Module.forward:
            raise ConfigError(f"{key}: {path} is a {type(modules[path]).__name__}, which is never called itself; name what it holds: {path}.{{*}}")
        for above in _above(path):
            if above in found:
                raise ConfigError(f"{key}: {path} lies within {above}, which is named too; keep one of them")
    return {path: modules[path] for path in found}


def _above(path: str) -> Iterator[str]:
    """Paths of what holds a module, the nearest first."""
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def first_above(path: str, others: dict[str, nn.Module]) -> str | None:
    """The path, among ``others``, of what holds the module at ``path``."""
    return next((above for above in _above(path) if above in others), None)
