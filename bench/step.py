"""A training step of either backend on one process, against a plain loop over transformers with torch's AdamW, on the same batch.

A tiny Qwen2.5-VL with the real vocabulary of 151,936, four micro-batches of a picture or text each. The three are stepped in turn, so that what
the machine does besides reaches all; medians of the repeats, and their ratios to the plain loop. Goal: at most 1.0.

    python bench/step.py [--repeats 9] [--json bench/results/step.json] [--only fsdp2]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

warnings.filterwarnings("ignore")

GOAL = 1.0
HIDDEN, LAYERS, MICRO_BATCHES = 256, 4, 4
LR, CLIP = 1e-4, 1.0
Step = Callable[[], float]
"""One optimizer step; gives its loss."""


def plain(hf: Path, parts: list[dict[str, Any]]) -> Step:
    """What a user writes without any framework: the model's own loss per micro-batch, accumulated, clipped, AdamW."""
    from tangram.align.reference import forward_arguments, load_reference

    model = load_reference(hf).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for part in parts:
            loss = model(**forward_arguments(model, part), labels=part["labels"]).loss / len(parts)
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return total

    return step


def on_backend(backend: str, hf: Path, parts: list[dict[str, Any]], work: Path) -> Step:
    """The same by an engine: the loss that is a mean over micro-batches, which the plain loop's is."""
    from tangram.align.run import make_task, open_subject
    from tangram.align.sharded import Sharded
    from tangram.align.task import Curve, Split
    from tangram.checkpoints.hf_directory import HFDirectory
    from tangram.checkpoints.load_hf import load_hf
    from tangram.training.entry import build_engine

    subject, split = open_subject(hf, work / backend, backends=[backend]), Sharded() if backend == "fsdp2" else Split()
    how: Mapping[str, Any] = {"micro_batch_size": 1, "curve": Curve(steps=1, lr=LR, clip_grad=CLIP)}
    run = make_task(subject, split, work / "batch.safetensors", work / backend, **how).run_config()
    engine = build_engine(run.model_copy(update={"training": run.training.model_copy(update={"loss_type": "default"})}))
    chunks = engine.chunks
    load_hf(HFDirectory(hf), [chunk for _, chunk, _ in chunks], [held for _, _, held in chunks], cast=True, shapes=engine.canonical_shapes)
    engine.weights_changed()

    def step() -> float:
        loss = engine.forward_backward(parts).loss
        engine.step(LR)
        return loss

    return step


def measure(steps: Mapping[str, Step], repeats: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds and losses of each step of each, in turn; the first, which makes moments and warms up, is not timed."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [step()] for name, step in steps.items()}
    for _ in range(repeats):
        for name, step in steps.items():
            began = time.perf_counter()
            losses[name].append(step())
            seconds[name].append(time.perf_counter() - began)
    return seconds, losses


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, metavar="N")
    parser.add_argument("--only", choices=("fsdp2", "megatron"), help="one backend")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    from tangram.align.batch import micro_batches, write_batch
    from tangram.align.run import open_subject, prepare_batch
    from tangram.families.base import get_family
    from tangram.families.tiny import TinySpec

    with tempfile.TemporaryDirectory() as name:
        work, hf = Path(name), Path(name, "hf")
        get_family("qwen2_5_vl").tiny(hf, 0, True, TinySpec(hidden=HIDDEN, text_layers=LAYERS))
        subject = open_subject(hf, work)
        batch, note = prepare_batch(subject, None)
        write_batch(batch, work)
        parts = micro_batches(batch, subject.model, 1)[:MICRO_BATCHES]
        backends = [args.only] if args.only else ["fsdp2", "megatron"]
        steps = {"plain": plain(hf, parts), **{backend: on_backend(backend, hf, parts, work) for backend in backends}}
        seconds, losses = measure(steps, args.repeats)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    ratios = {name: statistics.median(a / b for a, b in zip(seconds[name], seconds["plain"], strict=True)) for name in backends}
    apart = {name: max(abs(a - b) / b for a, b in zip(losses[name], losses["plain"], strict=True)) for name in backends}
    tokens = sum(int(part["attention_mask"].sum()) for part in parts)
    learnt = sum(int((part["labels"][:, 1:] != -100).sum()) for part in parts)
    print(f"{note}; {len(parts)} micro-batches, {tokens} tokens, {learnt} of them learnt; {args.repeats} repeats in turn")
    for name, median in medians.items():
        more = "" if name == "plain" else f", {ratios[name]:.2f} x plain (goal: at most {GOAL}); losses within {apart[name]:.1e} of its"
        print(f"{name}: {1000 * median:.0f} ms{more}")
    if args.json is not None:
        sizes = {"hidden": HIDDEN, "layers": LAYERS, "vocabulary": subject.model.text_decoder.vocab_size, "tokens": tokens, "learnt": learnt}
        found = {"sizes": sizes, "repeats": args.repeats, "median_seconds": medians, "ratios": ratios, "largest_loss_deviation": apart}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return all(ratio <= GOAL for ratio in ratios.values())


if __name__ == "__main__":
    raise SystemExit(not main())
