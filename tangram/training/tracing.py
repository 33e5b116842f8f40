"""One iteration of a run, recorded module by module (``tools.trace``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tangram.align.trace.run_trace import trace_of
from tangram.backends.engine import Batch, ForwardResult, RunnableEngine
from tangram.config.tools import StepTrace
from tangram.training.logs import LOGGER


class StepTracer:
    """Runs iterations, and records the one that is asked for."""

    def __init__(self, engine: RunnableEngine, settings: StepTrace) -> None:
        self.engine, self.settings = engine, settings

    def forward_backward(self, step: int, micro_batches: Sequence[Batch]) -> ForwardResult:
        """``engine.forward_backward`` of iteration ``step`` (the first is 1).

        Raises:
            ConfigError: a pattern of ``tools.trace.only`` matches no module.
        """
        if step != self.settings.step:
            return self.engine.forward_backward(micro_batches)
        folder = Path(self.settings.save_path)
        trace = trace_of(self.engine, folder, self.settings.only, f"step {step}", "tools.trace.only")
        trace.begin(micro_batches)
        result = self.engine.forward_backward(micro_batches)
        trace.finish(result)
        LOGGER.info("step %d is recorded in %s; compare it with another run's by tangram align --trace", step, folder)
        return result
