"""Public reports whose right behaviour shows only where several parts of the data room work together; docs/public-reports.md lists the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tangram.config.run import RunConfig
from tangram.data.build import build_loader, build_source
from tangram.data.loader import Batch
from tangram.errors import ConfigError
from tangram.families.base import get_family
from tangram.losses.modes import reduce_token_losses
from tests.data.test_loader import take

FAMILY = get_family("qwen2_5_vl")
MakeRun = Callable[..., RunConfig]
WORDS = 50
"""Rows of the small model's tables; ids are taken modulo this."""


def tables() -> list[torch.Tensor]:
    """A model that predicts each token from the one before it."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in ((WORDS, 6), (6, WORDS))]


def token_losses(model: list[torch.Tensor], batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses of the tokens that have a label, and their rows."""
    rows, before = (batch["labels"][:, 1:] != -100).nonzero(as_tuple=True)
    logits = model[0][batch["input_ids"][rows, before] % WORDS] @ model[1]
    return torch.nn.functional.cross_entropy(logits, batch["labels"][rows, before + 1] % WORDS, reduction="none"), rows


@pytest.mark.parametrize(("micro_batch_size", "ranks"), [(1, 2), (2, 1), (4, 1)])
def test_three_samples_in_a_global_batch_of_four_train_as_three(
    make_run: MakeRun, record: Any, write_json: Any, micro_batch_size: int, ranks: int
) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#4943: the place that fills up the batch, -1, was the last sample once more, with full weight."""
    path = write_json([record("one", "a b c d"), record("two", "e f"), record("three", "g h i j k l m")])
    run = make_run(path, loading={"drop_last": False}, micro_batch_size=micro_batch_size, global_batch_size=4)
    step = [batch for rank in range(ranks) for batch in take(build_loader(run, FAMILY, rank, ranks), 1)[0]]
    source = build_source(run, FAMILY)
    alone = [source[[((0, number),)]] for number in range(3)]
    groups = {"per_sample_loss": [[0], [1], [2]], "per_token_loss": [[0, 1, 2]]}
    groups["default"] = {1: groups["per_sample_loss"], 2: [[0, 1], [2]], 4: groups["per_token_loss"]}[micro_batch_size]
    for loss_type, means in groups.items():
        model, wanted = tables(), tables()
        terms = [reduce_token_losses(*token_losses(model, batch), loss_type) for batch in step]
        loss = torch.stack([term.numerator for term in terms]).sum() / sum(term.denominator for term in terms)
        loss.backward()
        samples = [token_losses(wanted, batch)[0] for batch in alone]
        expected = torch.stack([torch.cat([samples[number] for number in group]).mean() for group in means]).mean()
        expected.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6), loss_type
        for one, two in zip(model, wanted, strict=True):
            assert one.grad is not None and two.grad is not None and torch.allclose(one.grad, two.grad, rtol=1e-5, atol=1e-7), loss_type


def test_a_frame_rate_and_a_number_of_frames_exclude_each_other(make_run: MakeRun, mixed_dataset: str) -> None:
    """vllm-project/vllm#35909: both were read, and times and frames did not agree."""
    with pytest.raises(ConfigError, match=r"preprocess_parameters: .*video_fps 2\.0 and video_num_frames 7 exclude each other: give one of them"):
        make_run(mixed_dataset, preprocess={"video_fps": 2.0, "video_num_frames": 7})


def test_an_empty_dataset_is_one_line_and_exit_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """hiyouga/LlamaFactory#7777: it ended in a StopIteration."""
    from tangram.cli.main import main

    path = tmp_path / "empty.json"
    path.write_text("[]")
    assert main(["data", "check", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tangram: error: {path}: ")
