"""loss.png."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tangram.errors import ConfigError

SMOOTHING = 20
"""Steps of the running mean."""


def read_losses(metrics: Path) -> list[float]:
    """Loss per step of a metrics.jsonl."""
    return [float(json.loads(line)["loss"]) for line in metrics.read_text(encoding="utf-8").splitlines()]


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of the last ``width`` values at each place; of fewer at the beginning."""
    return [sum(values[max(0, end - width) : end]) / min(end, width) for end in range(1, len(values) + 1)]


def plot_losses(losses: Sequence[float], path: Path) -> None:
    """Draw the curve.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("the demo draws its curve with matplotlib, which is not installed: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 3.6), dpi=110)
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, color="#2f6fde", alpha=0.3, linewidth=1, label="each step")
    axes.plot(steps, running_mean(losses, SMOOTHING), color="#2f6fde", linewidth=2, label=f"mean of {SMOOTHING} steps")
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("loss per supervised token")
    axes.grid(True, which="both", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
