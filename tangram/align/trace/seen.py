"""Modules of a running model, and the modules of transformers that they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tangram.align.trace.store import Columns
from tangram.config.patterns import Pattern
from tangram.errors import ConfigError, suggest

Region = Literal["text", "tokens", "head", "patches", "layer", "norm", "merged"]
"""What a module's rows are.

text: hidden states of the text decoder; tokens: whole rows ``[b, s]`` of it; head: those that are learnt; patches: patches as pixels come; layer:
hidden states of the vision encoder; norm: these or merged ones; merged: merged ones.
"""


@dataclass(frozen=True)
class Features:
    """Which features of a module of transformers a local tensor holds.

    Args:
        local: of the local tensor's features, consecutive ones: first and number.
        columns: the same in the whole module's.
        width: of the whole module.
    """

    local: Columns
    columns: Columns
    width: int

    def take(self, rows: Tensor) -> Tensor:
        """Those of ``[n, local features]``."""
        parts = [rows[:, first : first + count] for first, count in self.local]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


@dataclass(frozen=True)
class Port:
    """A module of transformers that a local module is, alone or as one of several.

    Args:
        into, out: None: not recorded. ``ALL``: the local tensor has all features.
    """

    name: str
    into: Features | None
    out: Features | None


ALL = Features((), (), 0)


@dataclass(frozen=True, eq=False)
class Seen:
    """A module that is watched.

    Args:
        region: of its input, and of its output where ``out_region`` says no other.
    """

    module: nn.Module
    ports: tuple[Port, ...]
    region: Region
    out_region: Region | None = None
    rows_of: Callable[[Tensor, bool], Tensor] | None = None
    """Brings a tensor, the output or not, into the form ``[..., features]``; None: it has it."""


class Chosen:
    """Which modules are recorded.

    Args:
        only: patterns (``tangram.config.patterns``) of names; none: all.
    """

    def __init__(self, only: Sequence[str] = ()) -> None:
        self.patterns = [Pattern(text) for text in only]

    def check(self, names: Iterable[str], key: str) -> None:
        """Refuse a pattern that matches none of the model's modules.

        Args:
            key: that the patterns come from.

        Raises:
            ConfigError: naming it.
        """
        known = list(names)
        for pattern in self.patterns:
            if not any(pattern.matches(name) for name in known):
                raise ConfigError(f"{key} {pattern.text!r} matches no module of the model{suggest(pattern.text, known)}; correct or remove it")

    def __contains__(self, name: object) -> bool:
        return not self.patterns or any(pattern.matches(str(name)) for pattern in self.patterns)


def modules_of(tensors: Iterable[str]) -> list[str]:
    """Names of all modules that have some of these tensors, in themselves or in others."""
    found: dict[str, None] = {"lm_head": None}
    for name in tensors:
        while name := name.rpartition(".")[0]:
            found[name] = None
    return list(found)


def composite_name(inside: Mapping[str, str], every: Sequence[str]) -> str | None:
    """The module of transformers that holds just these parameters.

    Args:
        inside: canonical names of the parameters in a local module, as keys.
        every: those of the whole model.

    Returns:
        None: there is none.
    """
    parts = [name.split(".") for name in inside]
    if not parts:
        return None
    common: list[str] = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        common.append(level[0])
    prefix = ".".join(common)
    held = {name for name in every if name.startswith(f"{prefix}.")}
    return prefix if prefix and held == set(inside) else None


def projector_regions(module: nn.Module) -> tuple[Region, Region | None]:
    """Of a module of a projector or merger: its norm, and what has other modules in it, may get rows before they are merged."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor):
        return ("norm", None) if weight.dim() == 1 else ("merged", None)
    return "norm", "merged"


def first_tensor(value: Any) -> Tensor | None:
    """What a module gives or gets first, of a tensor, a tuple, or an output of transformers."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Mapping):
        pooled = value.get("pooler_output")
        return first_tensor(pooled if pooled is not None else list(value.values()))
    if isinstance(value, (tuple, list)):
        return next((one for one in value if isinstance(one, Tensor)), None)
    return None


def convolved_rows(module: nn.Module) -> Callable[[Tensor, bool], Tensor]:
    """For a convolution whose stride is its kernel: a row for each place."""
    kernel: tuple[int, ...] = module.kernel_size  # type: ignore[assignment]

    def rows(tensor: Tensor, output: bool) -> Tensor:
        if tensor.dim() != len(kernel) + 2:
            return tensor
        if output:
            return tensor.movedim(1, -1).flatten(0, -2)
        for axis, size in enumerate(kernel):
            tensor = tensor.unflatten(2 + 2 * axis, (-1, size))
        places, inside = [2 + 2 * axis for axis in range(len(kernel))], [3 + 2 * axis for axis in range(len(kernel))]
        moved = tensor.permute(0, *places, 1, *inside)
        return moved.flatten(len(kernel) + 1).flatten(0, len(kernel))

    return rows
