"""Packed rows over copies of the model, for every loss type and with media of every kind: as unpacked rows, and as transformers. One launch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch

from tangram.align.assemble import assemble
from tangram.align.compare import compare, relative_error
from tangram.align.observation import Observation
from tangram.align.reference import forward_arguments, load_reference
from tangram.align.run import open_subject
from tangram.align.task import Split, Task, TaskList
from tangram.config.model import ModelConfig
from tangram.data.collate import Collator
from tangram.data.encode import EncodedSample
from tangram.data.media import Medium
from tangram.families.base import get_family
from tests.conftest import TinyHF
from tests.trial import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
WORKER = Path(__file__).parents[1] / "workers" / "packing_worker.py"
LOSS_TYPES = ("default", "per_sample_loss", "per_token_loss")
PROCESSES = 4
SPLITS = {"copies": Split(data=4), "two ranks that share tokens, in copies": Split(context=2, data=2)}
"""Where samples are counted over ranks. Loss, logits and gradients of packed rows at every split are ``tests.align.test_matrix``'s."""
Grid = tuple[int, int, int]
MICRO_BATCHES: list[list[list[int | Grid]]] = [
    # Parts of samples: numbers of words, and grids; more than one step is a video.
    [[2, (1, 4, 6), 9], [14], [1, (1, 6, 4), (1, 4, 4), 4]],
    [[1, (4, 4, 4), 5], [(2, 6, 8), 8]],
    [[6], [11], [3]],
    [[3, (2, 4, 4), 2, (1, 8, 4), 7], [5, (1, 4, 4), 4]],
]
"""Four micro-batches: images and text, videos alone, no media, video and image in one sample."""
NO_LOGITS = torch.zeros(1, 1, 1)


def make_samples(model: ModelConfig) -> list[list[EncodedSample]]:
    generator = torch.Generator().manual_seed(0)
    found: list[list[EncodedSample]] = []
    number = 0
    for micro_batch in MICRO_BATCHES:
        found.append([])
        for parts in micro_batch:
            sample = EncodedSample(number, image_pixels=[], video_pixels=[])
            for part in parts:
                if isinstance(part, int):
                    words = torch.randint(0, 100, (part,), generator=generator).tolist()
                    sample.input_ids += words
                    sample.labels += [word if word % 3 else -100 for word in words]
                    continue
                t, h, w = part
                media, pixels = (sample.images, sample.image_pixels) if t == 1 else (sample.videos, sample.video_pixels)
                token = model.img_context_token_id if t == 1 else model.video_token_id
                media.append(Medium(part, None if t == 1 else 1.5))
                pixels.append(torch.randn(t * h * w, 1176, generator=generator).numpy())
                sample.input_ids += [model.vision_start_token_id, *[token] * (t * h * w // 4)]
                sample.labels += [-100] * (1 + t * h * w // 4)
            found[-1].append(sample)
            number += 1
    return found


def reference(hf_dir: Path, micro_batches: list[dict[str, Any]]) -> dict[str, Observation]:
    """Loss and gradients by each loss type's definition, from transformers' logits of the unpacked rows."""
    model = load_reference(hf_dir)
    losses: list[list[torch.Tensor]] = []
    for batch in micro_batches:
        logits = model(**forward_arguments(model, batch)).logits
        pairs = [(scores[row != -100], row[row != -100]) for scores, row in zip(logits[:, :-1], batch["labels"][:, 1:], strict=True)]
        losses.append([torch.nn.functional.cross_entropy(scores, row, reduction="none") for scores, row in pairs if len(row)])
    rows = [row for batch in losses for row in batch]
    totals = {
        "default": torch.stack([torch.cat(batch).mean() for batch in losses]).mean(),
        "per_sample_loss": torch.stack([row.mean() for row in rows]).mean(),
        "per_token_loss": torch.cat(rows).mean(),
    }
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = {}
    for name, total in totals.items():
        gradients = torch.autograd.grad(total, parameters, retain_graph=True)
        found[name] = Observation(float(total.detach()), NO_LOGITS, dict(zip(names, gradients, strict=True)))
    return found


@dataclass(frozen=True)
class Findings:
    """What the worker found by (split, loss type, step), what transformers finds by loss type, and how many labels there are."""

    runs: dict[tuple[str, str, str], tuple[dict[str, Any], Observation]]
    reference: dict[str, Observation]
    labels: list[int]
    """Of each sample, those that a token before them predicts."""


@pytest.fixture(scope="module")
def findings(tiny_hf: TinyHF, tmp_path_factory: pytest.TempPathFactory) -> Findings:
    folder, hf_dir = tmp_path_factory.mktemp("packing"), tiny_hf("qwen2_5_vl", hidden=32, text_layers=2, vision_layers=2, weight_std=0.1)
    model = open_subject(hf_dir, folder).model
    samples, rope_index = make_samples(model), get_family("qwen2_5_vl").rope_index
    apart, together = Collator(rope_index, model, 0), Collator(rope_index, model, 0, pad_to_multiple_of=5, packing=True)
    steps = {"apart": [apart([[one] for one in batch]) for batch in samples], "together": [together([batch]) for batch in samples]}
    assert {batch["input_ids"].shape[1] % 2 for batch in steps["together"]} == {0, 1}, "context ranks must pad some rows"
    torch.save(steps, folder / "steps.pt")
    tasks = {
        name: Task(name=name, hf_dir=str(hf_dir), model=model, split=split, batch="", micro_batch_size=1, out=str(folder / name))
        for name, split in SPLITS.items()
    }
    (folder / "tasks.json").write_text(TaskList(tasks=list(tasks.values())).model_dump_json(), encoding="utf-8")
    run(folder / "log", [str(WORKER), str(folder)], PROCESSES).succeeded()
    runs = {}
    for name, loss_type, step in product(tasks, LOSS_TYPES, steps):
        out = folder / name / f"{loss_type}_{step}"
        result = json.loads((out / "result.json").read_text(encoding="utf-8"))
        gradients = {one.name: one.tensor for one in assemble(sorted(out.glob("gradients_*")))}
        runs[name, loss_type, step] = (result, Observation(result["loss"], NO_LOGITS, gradients))
    labels = [sum(label != -100 for label in sample.labels[1:]) for batch in samples for sample in batch]
    return Findings(runs, reference(hf_dir, steps["apart"]), labels)


def flat(observed: Observation) -> torch.Tensor:
    return torch.cat([observed.gradients[name].flatten() for name in sorted(observed.gradients)])


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_packed_rows_train_as_unpacked_ones(findings: Findings, loss_type: str) -> None:
    tokens, learnt = sum(findings.labels), sum(count > 0 for count in findings.labels)
    assert learnt == 9, "ten samples, and one that teaches nothing"
    weight = {"default": 4, "per_sample_loss": learnt, "per_token_loss": tokens}[loss_type]
    for split in SPLITS:
        (apart, wanted), (together, found) = (findings.runs[split, loss_type, step] for step in ("apart", "together"))
        assert apart["tokens"] == together["tokens"] == tokens
        assert apart["weight"] == together["weight"] == weight, "samples count, not rows"
        assert together["loss"] == pytest.approx(apart["loss"], rel=1e-6), split
        assert relative_error(flat(found), flat(wanted)) < 1e-6, split


@pytest.mark.parametrize("step", ["apart", "together"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_type_is_that_of_transformers(findings: Findings, loss_type: str, step: str) -> None:
    for split in SPLITS:
        report = compare(findings.runs[split, loss_type, step][1], findings.reference[loss_type], torch.ones(1, 1), 1e-5)
        assert report.passed, (split, report.failures)


def test_the_loss_types_differ_on_these_samples(findings: Findings) -> None:
    """Else the comparisons above would say less than they seem to."""
    losses = [observed.loss for observed in findings.reference.values()]
    assert min(abs(a - b) for a, b in combinations(losses, 2)) > 1e-3
