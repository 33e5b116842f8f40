"""Whether two numbers agree."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tangram.align.gate.recorded import is_finite
from tangram.align.gate.settings import Margin, Mode, Settings


@dataclass(frozen=True)
class Tolerance:
    """Of one metric."""

    mode: Mode
    margin: Margin

    @classmethod
    def of(cls, settings: Settings, metric: str) -> Tolerance:
        return cls(settings.mode, settings.margins[metric])

    def holds(self, base: float, value: float, base_unit: float = 0.0, unit: float = 0.0) -> bool:
        """Whether ``value`` agrees with ``base``. Numbers that are not finite agree with those that are not either.

        Args:
            base_unit, unit: of the last digit that was printed, 0 where the number is whole. A printed number may be half of it away from the
                one it stands for; two that were printed alike are compared as they stand if they are to be exact.
        """
        if not (is_finite(base) and is_finite(value)):
            return not is_finite(base) and not is_finite(value)
        rounding = 0.5 * (base_unit + unit) * (1 + 1e-9)
        if self.mode.name == "exact":
            return base == value if bool(base_unit) == bool(unit) else abs(value - base) <= rounding
        allowed = half_of_digit(base, self.mode.digits) if self.mode.name == "digits" else self.margin.size * abs(base)
        if self.mode.name == "margin" and self.margin.above_only:
            return value - base <= allowed + rounding
        return abs(value - base) <= allowed + rounding

    def __str__(self) -> str:
        return str(self.mode) if self.mode.name != "margin" else in_percent(self.margin)


def half_of_digit(value: float, digits: int) -> float:
    """Half a unit of the last of ``digits`` significant digits: 0.005 for 9.436 and three. 0 for 0."""
    return 0.5 * 10.0 ** (math.floor(math.log10(abs(value))) - digits + 1) if value else 0.0


def in_percent(margin: Margin) -> str:
    """``5 %``, or ``+5 %`` where less is no fault."""
    return f"{'+' if margin.above_only else ''}{100 * margin.size:g} %"


def shown(value: float | None) -> str:
    """Seven significant digits."""
    return "none" if value is None else f"{value:.7g}"


def by_percent(deviation: float, sign: str = "") -> str:
    """``1.25%``, with two digits of what would be 0.00%; ``sign`` "+" writes one before positive numbers too."""
    return f"{deviation:{sign}.2%}" if deviation == 0 or not abs(deviation) < 5e-5 else f"{100 * deviation:{sign}.2g}%"
