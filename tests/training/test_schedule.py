"""The learning rate against megatron-core's own OptimizerParamScheduler."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tangram.config.run import TrainingConfig
from tangram.training.schedule import LearningRate


def theirs(steps: int, batch: int, **settings: Any) -> list[float]:
    """Rates of ``steps`` steps of Megatron's scheduler, which counts samples: a step moves it by the global batch size."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings["lr"],
        min_lr=settings["min_lr"],
        lr_warmup_steps=settings["warmup"] * batch,
        lr_decay_steps=settings["decay"] * batch,
        lr_decay_style=settings["style"],
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=steps * batch,
        wd_incr_style="constant",
    )
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(increment=batch)
    return rates


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("warmup", "decay"), [(0, 12), (3, 12), (3, 8)])
@pytest.mark.parametrize("batch", [1, 8])
def test_equals_megatron_core(style: str, warmup: int, decay: int, batch: int) -> None:
    training = TrainingConfig.model_validate(
        {"lr": 3e-4, "min_lr": 1e-5, "lr_decay_style": style, "lr_warmup_iters": warmup, "lr_decay_iters": decay, "train_iters": 12}
    )
    rate = LearningRate(training)
    expected = theirs(12, batch, lr=3e-4, min_lr=1e-5, warmup=warmup, decay=decay, style=style)
    assert [rate(step) for step in range(12)] == pytest.approx(expected, rel=1e-12)


def test_warm_up_as_a_fraction_of_the_decay() -> None:
    training = TrainingConfig.model_validate({"lr": 1.0, "lr_decay_style": "cosine", "lr_warmup_fraction": 0.25, "train_iters": 10})
    rate = LearningRate(training)
    assert [rate(step) for step in range(10)] == pytest.approx(theirs(10, 1, lr=1.0, min_lr=0.0, warmup=2.5, decay=10, style="cosine"), rel=1e-12)


def test_six_steps_with_two_of_warm_up() -> None:
    """Half a cosine from 1 to 0 over steps 2..6, by hand: 0, 1/2, 1, (1 + sqrt(1/2)) / 2, 1/2, (1 - sqrt(1/2)) / 2."""
    rate = LearningRate(TrainingConfig.model_validate({"lr": 1.0, "lr_warmup_iters": 2, "train_iters": 6}))
    assert [rate(step) for step in range(6)] == pytest.approx([0, 0.5, 1, 0.8535533905932737, 0.5, 0.14644660940672627])
