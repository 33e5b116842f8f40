"""How closely a run must repeat its baseline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tangram.errors import ConfigError, suggest

METRICS = ("loss", "grad_norm", "time", "memory")


@dataclass(frozen=True)
class Margin:
    """Relative; to both sides, since a run that has become much faster or smaller may have lost a part of its work."""

    size: float
    above_only: bool = False

    @classmethod
    def read(cls, text: str, where: str) -> Margin:
        """``0.05``, or ``+0.05`` where less than the baseline is no fault.

        Raises:
            ConfigError: it is no number from 0 up.
        """
        try:
            size = float(text)
        except ValueError:
            size = math.nan
        if not 0 <= size < math.inf:
            raise ConfigError(f"{where} {text!r} must be a number from 0 up, such as 0.05, or +0.05 where only more is a fault")
        return cls(size, text.startswith("+"))

    def __str__(self) -> str:
        return f"{'+' if self.above_only else ''}{self.size:g}"


DEFAULT_MARGINS = {"loss": Margin(0.01), "grad_norm": Margin(0.05), "time": Margin(0.05), "memory": Margin(0.10)}
"""Those of MindSpeed-MM's system tests for loss, time and memory; norms of gradients move more than losses where sums round."""


@dataclass(frozen=True)
class Mode:
    """How losses and gradient norms are compared: within their margins, to so many significant digits, or bit for bit. Time and memory always have
    margins."""

    name: str = "margin"
    digits: int = 0

    @classmethod
    def read(cls, text: str, where: str = "--mode") -> Mode:
        """``margin``, ``exact``, or ``digits N``.

        Raises:
            ConfigError: none of these.
        """
        words = text.replace("=", " ").replace(":", " ").split()
        if words in (["margin"], ["exact"]):
            return cls(words[0])
        if len(words) == 2 and words[0] == "digits" and words[1].isdecimal() and 1 <= int(words[1]) <= 17:
            return cls("digits", int(words[1]))
        raise ConfigError(f"{where} {text!r}: write margin, exact, or 'digits N' with N from 1 to 17")

    def __str__(self) -> str:
        return f"digits {self.digits}" if self.name == "digits" else self.name


@dataclass(frozen=True)
class Settings:
    """Kept in the baseline, so that a gate needs no options.

    Args:
        warm_up: steps at the start whose times do not count.
    """

    mode: Mode = Mode()
    margins: Mapping[str, Margin] = field(default_factory=lambda: dict(DEFAULT_MARGINS))
    warm_up: int = 1

    def changed(self, mode: str | None, margins: Sequence[str], warm_up: int | None) -> Settings:
        """With what command-line options say.

        Raises:
            ConfigError: one of them cannot be used.
        """
        merged = dict(self.margins)
        for text in margins:
            name, equals, value = text.partition("=")
            if name not in METRICS or not equals:
                raise ConfigError(f"--margin {text!r}{suggest(name, METRICS)}: write METRIC=X with one of {', '.join(METRICS)}, such as loss=0.005")
            merged[name] = Margin.read(value, f"--margin {name}")
        if warm_up is not None and warm_up < 0:
            raise ConfigError(f"--warm-up {warm_up} must be at least 0")
        changed = replace(self, margins=merged, warm_up=self.warm_up if warm_up is None else warm_up)
        return changed if mode is None else replace(changed, mode=Mode.read(mode))

    def as_dict(self) -> dict[str, Any]:
        return {"mode": str(self.mode), "margins": {name: str(margin) for name, margin in self.margins.items()}, "warm_up": self.warm_up}

    @classmethod
    def from_dict(cls, raw: Any, where: str) -> Settings:
        """Of ``as_dict``.

        Raises:
            ConfigError: damaged.
        """
        if not isinstance(raw, dict) or set(raw) != {"mode", "margins", "warm_up"} or not isinstance(raw["margins"], dict):
            raise ConfigError(f"{where}: damaged: settings must hold mode, margins and warm_up; make the baseline again")
        if set(raw["margins"]) != set(METRICS) or isinstance(raw["warm_up"], bool) or not isinstance(raw["warm_up"], int) or raw["warm_up"] < 0:
            raise ConfigError(f"{where}: damaged: settings need margins of {', '.join(METRICS)} and a warm_up from 0 up; make the baseline again")
        margins = {name: Margin.read(str(raw["margins"][name]), f"{where}: margin {name}") for name in METRICS}
        return cls(Mode.read(str(raw["mode"]), f"{where}: mode"), margins, raw["warm_up"])
