"""Twenty steps with a clip that bites, at every split: as in one process and as a plain loop over transformers, and copies stay bit-equal.

Each step has two micro-batches as unlike as public reports had them: pictures with 3 labels, and text with 97. Data-parallel ranks get one each, so
that pictures are on one rank alone; in turn each of the two has no label at all. Labels end a row, so that context-parallel ranks have many or none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tangram.align.batch import write_batch
from tangram.align.curves import relative
from tangram.align.reference import forward_arguments, load_reference, token_loss
from tangram.align.run import Subject, make_task, open_subject, prepare_batch
from tangram.align.task import Curve, Split, Task, TaskList
from tests.backends.cases_training import EPS, SILENT
from tests.conftest import TinyHF
from tests.ranks import on_ranks

pytestmark = pytest.mark.timeout(400)
PATIENCE = 380
CASES = Path(__file__).with_name("cases_training.py")
SMALL = {"hidden": 32, "kv_heads": 4, "text_layers": 2, "vision_layers": 1, "weight_std": 0.05}
STEPS, LR, CLIP = 20, 5e-4, 0.1
LENGTHS, LABELS = (31, 18, 61, 53), (2, 1, 50, 47)
GRIDS = ((1, 4, 6), (1, 4, 4))
"""Of the pictures in the first rows."""
TENSOR = {"tensor": 2, "sequence_parallel": True}
COPIES = {"data": 2, "distributed_optimizer": True}
ALL = {
    "one process": Split(),
    "TP4 x SP": Split(tensor=4, sequence_parallel=True),
    "PP2": Split(pipeline=2),
    "CP2, Ulysses": Split(context=2),
    "CP2, ring": Split(context=2, context_algo="ring"),
    "DP2, distributed optimizer": Split(**COPIES),
}
SPLITS = {
    "qwen2_5_vl": ALL
    | {"TP2": Split(tensor=2), "TP2 x SP x DP2": Split(**TENSOR, data=2)}
    | {"TP2, vision TP1": Split(tensor=2, vision_tensor=1, distributed_optimizer=True)}
    | {"TP4 x SP, vision TP2": Split(tensor=4, vision_tensor=2, sequence_parallel=True)},
    "qwen3_vl": {"one process": Split(), "TP2": Split(tensor=2)},
    "qwen3_vl_moe": ALL | {"EP2": Split(data=2, expert=2), "TP2 x SP x EP2": Split(**TENSOR, **COPIES, expert=2)},
}
"""The embeddings of qwen2_5_vl are tied. Norms of heads, in qwen3, are copies of which each tensor-parallel rank sees some heads."""
BRIEF = {
    *(("qwen2_5_vl", name) for name in ("TP4 x SP", "TP4 x SP, vision TP2")),
    *(("qwen3_vl_moe", name) for name in ("TP4 x SP", "CP2, Ulysses", "CP2, ring")),
}
"""What takes three steps."""


@dataclass(frozen=True)
class Found:
    """What ranks report of each split, and what a plain loop gives."""

    ranks: list[dict[str, dict[str, Any]]]
    losses: list[float]
    norms: list[float]

    def at(self, name: str) -> list[dict[str, Any]]:
        return [rank[name] for rank in self.ranks if name in rank]


def rows_of(subject: Subject) -> dict[str, torch.Tensor]:
    """Random text, padded to the longest row, pictures near the beginning."""
    model, generator = subject.model, torch.Generator().manual_seed(0)
    assert model.image_encoder is not None
    encoder = model.image_encoder.vision_encoder
    ids = torch.randint(0, 140, (len(LENGTHS), max(LENGTHS)), generator=generator)
    for row, grid in enumerate(GRIDS):
        media = torch.tensor([model.vision_start_token_id, *[model.img_context_token_id] * encoder.tokens(grid)])
        ids[row, 1 : 1 + len(media)] = media
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, (length, count) in enumerate(zip(LENGTHS, LABELS, strict=True)):
        mask[row, :length] = 1
        labels[row, length - count : length] = ids[row, length - count : length]
    grids = torch.tensor(GRIDS)
    pixels = torch.randn(int(grids.prod(dim=1).sum()), encoder.patch_width, generator=generator)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask, "pixel_values": pixels, "image_grid_thw": grids}


def plain_loop(hf: Path, batch: dict[str, torch.Tensor]) -> tuple[list[float], list[float]]:
    """Losses and gradient norms with torch's own AdamW and clipping, all rows at once."""
    model = load_reference(hf)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.0)
    losses, norms = [], []
    for step in range(STEPS):
        labels = batch["labels"].clone()
        labels[list(SILENT[step % len(SILENT)])] = -100
        optimizer.zero_grad(set_to_none=False)
        loss = token_loss(model(**forward_arguments(model, batch)).logits, labels)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms


def tasks_of(family: str, subject: Subject, batch: Path, work: Path) -> TaskList:
    """Copies and stages get two micro-batches of two rows; others, but for one process, all rows in one."""
    tasks: list[Task] = []
    for name, split in SPLITS[family].items():
        curve = Curve(steps=3 if (family, name) in BRIEF else STEPS, lr=LR, clip_grad=CLIP)
        rows = 4 if split.data == split.pipeline == 1 < split.processes else 2
        task = make_task(subject, split, batch, work / str(len(tasks)), micro_batch_size=rows, curve=curve)
        tasks.append(task.model_copy(update={"name": name}))
    return TaskList(tasks=tasks)


@pytest.fixture(scope="module")
def found(tiny_hf: TinyHF, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Found]:
    """``found(family)``: one launch of all its splits."""
    known: dict[str, Found] = {}

    def of(family: str) -> Found:
        if family not in known:
            work, hf = tmp_path_factory.mktemp(family), tiny_hf(family, tied=family == "qwen2_5_vl", **SMALL)
            subject = open_subject(hf, work)
            batch, _ = prepare_batch(subject, write_batch(rows_of(subject), work / "rows"))
            tasks, file = tasks_of(family, subject, write_batch(batch, work), work), work / "tasks.json"
            file.write_text(tasks.model_dump_json(), encoding="utf-8")
            known[family] = Found(on_ranks(tasks.processes, CASES, "train", str(file), patience=PATIENCE), *plain_loop(hf, batch))
        return known[family]

    return of


def assembled(ranks: list[dict[str, Any]], steps: int) -> tuple[dict[str, np.ndarray], set[str]]:
    """Whole parameters after so many steps, and the names of those that several ranks hold, in part at least; all hold the same bits."""
    whole: dict[str, np.ndarray] = {}
    copied = set()
    for rank in ranks:
        for (name, start), (shape, value) in rank["parameters"][steps].items():
            place = tuple(slice(first, first + size) for first, size in zip(start, value.shape, strict=True))
            window = whole.setdefault(name, np.full(shape, np.nan, value.dtype))[place]
            if np.isnan(window).all():
                window[...] = value
                continue
            assert np.array_equal(window, value), f"copies of {name} at {start} differ after {steps} steps"
            copied.add(name)
    assert not any(np.isnan(value).any() for value in whole.values())
    return whole, copied


def copies_of(split: Split, names: set[str]) -> set[str]:
    """Parameters that at least must be on several ranks."""
    if split.data * split.context > 1:
        return {name for name in names if split.expert == 1 or ".experts." not in name}
    if split.tensor > 1:
        return {name for name in names if "norm" in name or (split.vision_tensor and ".visual.blocks." in name)}
    return names & {"model.language_model.embed_tokens.weight"} if split.pipeline > 1 and "lm_head.weight" not in names else set()


@pytest.mark.compat
@pytest.mark.parametrize("family", SPLITS)
def test_one_process_is_a_plain_loop_over_transformers(family: str, found: Callable[[str], Found]) -> None:
    (this, one) = found(family), found(family).at("one process")[0]
    assert min(this.norms) > 2 * CLIP, "the clip is meant to bite in every step"
    assert max(map(relative, one["losses"], this.losses)) < 1e-6
    assert max(map(relative, one["norms"], this.norms)) < 1e-6


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, splits in SPLITS.items() for name in splits if name != "one process"])
def test_losses_norms_and_weights_are_those_of_one_process_and_copies_are_bit_equal(family: str, name: str, found: Callable[[str], Found]) -> None:
    ranks, one = found(family).at(name), found(family).at("one process")
    steps, split = 3 if (family, name) in BRIEF else STEPS, SPLITS[family][name]
    assert len(ranks) == split.processes and len(ranks[0]["losses"]) == steps
    assert all((rank["losses"], rank["norms"]) == (ranks[0]["losses"], ranks[0]["norms"]) for rank in ranks)
    assert max(map(relative, ranks[0]["losses"], one[0]["losses"])) < 1e-6
    assert max(map(relative, ranks[0]["norms"], one[0]["norms"])) < 1e-6
    expected, _ = assembled(one, steps)
    values, copied = assembled(ranks, steps)
    assert values.keys() == expected.keys() and copied >= copies_of(split, set(values)), copies_of(split, set(values)) - copied
    for tensor, value in values.items():
        assert np.linalg.norm(value - expected[tensor]) <= 1e-6 * np.linalg.norm(expected[tensor]), tensor
