"""The learning rate as a function of optimizer steps alone."""

from __future__ import annotations

import math

from tangram.config.run import TrainingConfig


class LearningRate:
    """Warm-up from ``lr_warmup_init``, then a decay from ``lr`` to ``min_lr``, as Megatron's OptimizerParamScheduler gives it.

    As there, the first step of a warm-up is taken with the rate that it starts from, by default 0.
    """

    def __init__(self, training: TrainingConfig) -> None:
        self.largest, self.smallest, self.style = training.lr, training.min_lr, training.lr_decay_style
        self.decay_steps = training.lr_decay_iters or training.train_iters
        self.first = training.lr_warmup_init
        fraction = training.lr_warmup_fraction
        self.warmup_steps = training.lr_warmup_iters if fraction is None else fraction * self.decay_steps

    def __call__(self, step: int) -> float:
        """Rate of the step that follows ``step`` finished ones."""
        if self.warmup_steps > 0 and step <= self.warmup_steps:
            return self.first + (self.largest - self.first) * step / self.warmup_steps
        if self.style == "constant":
            return self.largest
        if step > self.decay_steps:
            return self.smallest
        ratio = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        share = 1 - ratio if self.style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1)
        return self.smallest + share * (self.largest - self.smallest)

    def facts(self) -> dict[str, float | str]:
        """What a checkpoint records of the schedule."""
        return {
            "lr": self.largest,
            "min_lr": self.smallest,
            "lr_decay_style": self.style,
            "lr_decay_steps": self.decay_steps,
            "lr_warmup_steps": self.warmup_steps,
            **({"lr_warmup_init": self.first} if self.first else {}),
        }
