"""Norm-wise comparison of two observations, and the report on it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from tangram.align.observation import Observation
from tangram.errors import name_some

Kind = Literal["loss", "logits", "gradient", "replicas"]

TOLERANCES = {"fp32": 1e-5, "bf16": 2e-1, "fp16": 5e-2}
"""Largest accepted norm-wise relative error per compute type, against the reference in fp32 on the same (rounded) weights.

fp32: rounding of a few hundred additions in another order stays near 1e-6. bf16 keeps 8 bits of a number (rounding error 2^-9 = 2e-3) and
fp16 11 bits (2.4e-4), and a gradient passes some tens of such roundings, so these two only tell a wrong model from a right one.
"""

ROUTER = ".mlp.gate.weight"
"""How canonical names of experts' routers end."""
ROUTER_SLACK = 2.0
"""How many times the tolerance a router's gradient may be off in 16 bits.

A token whose experts are nearly equal goes to another one where its hidden state is rounded. Of 80 tokens 2 or 3 a layer do so in bf16, on small
random models, which puts router gradients 0.01 to 0.29 off; with the reference's choices they are 0.01 to 0.04 off. transformers' own bf16 is up to
0.20 off.
"""


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """``||actual - expected|| / ||expected||`` over all elements, in fp64; where ``expected`` is exactly zero, ``||actual||``."""
    difference = torch.linalg.vector_norm(actual.double() - expected.double())
    reference = torch.linalg.vector_norm(expected.double())
    return float(difference / reference) if reference > 0 else float(difference)


@dataclass(frozen=True)
class Row:
    """One compared tensor.

    Args:
        error: relative error, or the norm itself where ``absolute``.
        absolute: the reference is exactly zero, so there is nothing to relate to.
        norm: of the reference.
        rounding: a difference whose norm is not larger is rounding, whatever it is relative to.
        slack: how many times the tolerance the error may be.
    """

    name: str
    kind: Kind
    error: float
    norm: float
    shape: tuple[int, ...] = ()
    absolute: bool = False
    rounding: float = 0.0
    slack: float = 1.0

    def within(self, tolerance: float) -> bool:
        """False also for NaN."""
        difference = self.error if self.absolute else self.error * self.norm
        return self.error <= tolerance * self.slack or difference <= self.rounding


@dataclass(frozen=True)
class Report:
    """Outcome of a comparison.

    Args:
        rows: worst first; NaN counts as worst.
        missing: canonical gradients of the reference that the split model did not give.
        unexpected: the reverse.
        problems: gradients that cannot be compared, one line each.
    """

    tolerance: float
    rows: tuple[Row, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def failures(self) -> list[str]:
        """Why the comparison failed, one line per reason; empty where it passed."""
        found = []
        if self.missing:
            found.append(f"{len(self.missing)} canonical gradients missing: {name_some(self.missing)}")
        if self.unexpected:
            found.append(f"{len(self.unexpected)} gradients that the reference does not have: {name_some(self.unexpected)}")
        found.extend(self.problems)
        bad = [row for row in self.rows if not row.within(self.tolerance)]
        if bad:
            found.append(f"{len(bad)} of {len(self.rows)} tensors past tolerance {self.tolerance:g}; worst: {bad[0].name} with {bad[0].error:.2e}")
        return found

    @property
    def passed(self) -> bool:
        return not self.failures

    def worst(self, kind: Kind) -> Row | None:
        """The row of this kind with the largest error."""
        return next((row for row in self.rows if row.kind == kind), None)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON types. A non-finite error is written as its name, which JSON has no number for."""

        def number(value: float) -> float | str:
            return value if math.isfinite(value) else str(value)

        rows = [
            {"name": r.name, "kind": r.kind, "error": number(r.error), "absolute": r.absolute, "norm": number(r.norm), "shape": list(r.shape)}
            for r in self.rows
        ]
        return {
            "passed": self.passed,
            "tolerance": self.tolerance,
            "failures": self.failures,
            "missing": list(self.missing),
            "unexpected": list(self.unexpected),
            "tensors": rows,
        }


def build_report(rows: Iterable[Row], tolerance: float, **findings: Any) -> Report:
    """A report with its rows in order, worst first."""
    ordered = sorted(rows, key=lambda row: (not math.isnan(row.error), -row.error if not math.isnan(row.error) else 0.0, row.name))
    return Report(tolerance=tolerance, rows=tuple(ordered), **findings)


def compare(
    actual: Observation,
    expected: Observation,
    attention_mask: torch.Tensor,
    tolerance: float,
    extra: Iterable[Row] = (),
    sixteen_bits: bool = False,
) -> Report:
    """Compare the split model with the reference.

    Args:
        attention_mask: ``[B, S]``; logits are compared where it is 1.
        extra: further rows that the report holds to the same tolerance.
        sixteen_bits: the split model computes in them; see ``ROUTER_SLACK``.
    """
    rows = [*extra, _row("loss", "loss", torch.tensor(actual.loss, dtype=torch.float64), torch.tensor(expected.loss, dtype=torch.float64))]
    problems = []
    if actual.logits.shape == expected.logits.shape:
        rows.append(logits_row("logits", actual.logits, expected.logits, attention_mask))
    else:
        problems.append(f"logits have shape {tuple(actual.logits.shape)} instead of {tuple(expected.logits.shape)}")
    rounding = _rounding(expected.gradients.values())
    for name in sorted(actual.gradients.keys() & expected.gradients.keys()):
        ours, theirs = actual.gradients[name], expected.gradients[name]
        if ours.shape == theirs.shape:
            slack = ROUTER_SLACK if sixteen_bits and name.endswith(ROUTER) else 1.0
            rows.append(replace(_row(name, "gradient", ours, theirs), rounding=rounding, slack=slack))
        else:
            problems.append(f"gradient of {name} has shape {tuple(ours.shape)} instead of {tuple(theirs.shape)}")
    return build_report(
        rows,
        tolerance,
        missing=tuple(sorted(expected.gradients.keys() - actual.gradients.keys())),
        unexpected=tuple(sorted(actual.gradients.keys() - expected.gradients.keys())),
        problems=tuple(problems),
    )


def logits_row(name: str, actual: torch.Tensor, expected: torch.Tensor, attention_mask: torch.Tensor) -> Row:
    """Compare logits ``[B, S, V]`` where ``attention_mask`` ``[B, S]`` is 1."""
    real = attention_mask.bool()
    return _row(name, "logits", actual[real], expected[real], tuple(expected.shape))


def _rounding(gradients: Iterable[torch.Tensor]) -> float:
    """fp32's epsilon times the median norm of the gradients that are not zero.

    Some gradients vanish by cancellation (keys and queries where a token sees itself alone, biases of keys), and what is left of them is the
    rounding of terms as large as the others.
    """
    norms = [norm for gradient in gradients if (norm := float(torch.linalg.vector_norm(gradient.double()))) > 0]
    return torch.finfo(torch.float32).eps * statistics.median(norms) if norms else 0.0


def _row(name: str, kind: Kind, actual: torch.Tensor, expected: torch.Tensor, shape: tuple[int, ...] | None = None) -> Row:
    norm = float(torch.linalg.vector_norm(expected.double()))
    return Row(name, kind, relative_error(actual, expected), norm, tuple(expected.shape) if shape is None else shape, absolute=norm == 0)
