"""Every way to split a model over four processes against one process: time of a step, memory and bytes sent per rank.

A small Qwen2.5-VL, eight micro-batches of a picture and some text, of different lengths, a step. All splits are built and stepped in turn,
round after round, one process among them, so that what the machine does besides reaches all. Ratios are medians over the rounds of a split's
time to one process's time in the same round. On a machine with fewer cores than ranks the ratio of times says what the split costs, not what it
gains; what a rank has to do says the processor time of the busiest rank, which is the time of a step where each rank has a device of its own and
never waits.

    python bench/parallel.py [--rounds 3] [--steps 3] [--json bench/results/parallel.json] [--only TP2]

Memory is the growth of a rank's resident pages at their peak, from before its part of the model is built. Bytes sent are counted at the
collectives themselves: what a rank must at least send for each (ring all-reduce: 2 (n-1)/n of the tensor; gather and scatter: (n-1)/n of the
whole; all-to-all: what is not its own; point-to-point: the tensor).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from tangram.align.task import Split, Task
    from tangram.config.model import ModelConfig

warnings.filterwarnings("ignore")

HIDDEN, LAYERS, VOCABULARY, MICRO_BATCHES, LR = 256, 8, 8192, 8, 1e-4
PROCESSES = 4
BASE = "one process"


def splits() -> dict[str, Split]:
    """What is measured, by name."""
    from tangram.align.task import Split

    return {
        BASE: Split(),
        "DP4": Split(data=4),
        "DP4, distributed optimizer": Split(data=4, distributed_optimizer=True),
        "TP2": Split(tensor=2),
        "PP2": Split(pipeline=2),
        "PP4": Split(pipeline=4),
        "PP2 x VPP2": Split(pipeline=2, virtual=2),
        "PP2, vision on both": Split(pipeline=2, vit_pp_layers=[2, 2], llm_pp_layers=[0, 8]),
        "TP2 x PP2": Split(tensor=2, pipeline=2),
        "TP2 x SP": Split(tensor=2, sequence_parallel=True),
        "CP2, Ulysses": Split(context=2),
        "CP2, ring": Split(context=2, context_algo="ring"),
        "TP2 x SP x PP2": Split(tensor=2, sequence_parallel=True, pipeline=2),
        "TP2 x DP2": Split(tensor=2, data=2),
        "PP2 x CP2, ring": Split(pipeline=2, context=2, context_algo="ring"),
    }


SKEWED = ("DP4, large pictures on one rank", "the same, balanced")
"""Every fourth picture has as many patches as sixteen others, and the fourth rank gets them all."""


def skewed() -> dict[str, Split]:
    from tangram.align.task import Split

    return dict(zip(SKEWED, (Split(data=4), Split(data=4, balance=True)), strict=True))


class SentBytes(TorchDispatchMode):
    """Adds up what this rank sends while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func.namespace == "c10d":
            self.total += _sent(func.__name__.split(".")[0], args)
        return func(*args, **(kwargs or {}))


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(_bytes(each) for each in value) if isinstance(value, (list, tuple)) else 0


def _sent(name: str, args: tuple[Any, ...]) -> float:
    from torch.distributed import ProcessGroup

    group = next(ProcessGroup.unbox(each) for each in args if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()))
    others = (group.size() - 1) / group.size()
    if name in ("allreduce_", "allreduce_coalesced_"):
        return 2 * others * _bytes(args[0])
    if name in ("allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_", "reduce_scatter_", "_reduce_scatter_base_"):
        return others * max(_bytes(args[0]), _bytes(args[1]))
    if name in ("alltoall_", "alltoall_base_"):
        return others * _bytes(args[1])
    if name == "broadcast_":
        return _bytes(args[0]) * (group.rank() == int(args[2]))
    return float(_bytes(args[0])) if name == "send" else 0.0


def _resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return 1024 * int(line.split()[1])


def work_off(rank: int, tasks: Sequence[Task], rounds: int, steps: int, out: Path) -> None:
    """One process: its part in every split, round after round."""
    import tangram.align.on_megatron  # noqa: F401  what the forked processes need is imported once

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    # A process of its own for each, so that memory which one has freed is not there for the next.
    fresh = multiprocessing.get_context("fork")
    found: list[dict[str, Any]] = []
    for number in range(rounds):
        for task in tasks:
            if rank < task.split.processes:
                mine, theirs = fresh.Pipe(duplex=False)
                process = fresh.Process(target=lambda task=task, number=number, pipe=theirs: pipe.send(_measure(task, rank, number, steps)))
                process.start()
                theirs.close()
                found.append({"name": task.name, **mine.recv()})
                process.join()
    (out / f"rank_{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def _measure(task: Task, rank: int, number: int, steps: int) -> dict[str, float]:
    import torch.distributed as dist

    from tangram.align.batch import micro_batches, read_batch
    from tangram.align.on_megatron import OnMegatron
    from tangram.checkpoints.hf_directory import HFDirectory
    from tangram.checkpoints.load_hf import load_hf

    before, size = _resident("VmRSS"), task.split.processes
    os.environ["WORLD_SIZE"] = str(size)
    meeting = f"file://{task.folder}/meeting_{number}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=timedelta(minutes=10))
    runner = OnMegatron(task, task.run_config())
    engine = runner.engine
    load_hf(
        HFDirectory(task.hf_dir),
        [chunk.placement for chunk in engine.chunks],
        [chunk.parameters for chunk in engine.chunks],
        cast=True,
        shapes=engine.canonical_shapes,
    )
    engine.weights_changed()
    mine = runner.share(micro_batches(read_batch(Path(task.batch), task.model), task.model, 1))

    def step() -> float:
        loss = engine.forward_backward(mine).loss
        engine.step(LR)
        return loss

    with SentBytes() as sent:
        loss = step()
    began, worked = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    seconds, worked = (time.perf_counter() - began) / steps, (time.process_time() - worked) / steps
    peak = _resident("VmHWM") - before
    runner.close()
    return {"seconds": seconds, "processor": worked, "loss": loss, "memory": float(peak), "sent": sent.total}


def summarise(names: Sequence[str], found: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """By split: ratio of time to one process's, of each rank's processor time to one process's, memory and bytes sent of each rank, and how far its
    loss lies from one process's; of the skewed batch, times and loss against the run without balance, processor time against its busiest rank."""
    table = {}
    for name in names:
        base = [row for row in found[0] if row["name"] == (SKEWED[0] if name in SKEWED else BASE)]
        rows = _of(found, name)
        busiest = [max(row["processor"] for row in ranks) for ranks in zip(*_of(found, base[0]["name"]).values(), strict=True)]
        table[name] = {
            "processor": [round(statistics.median(a["processor"] / b for a, b in zip(each, busiest, strict=True)), 3) for each in rows.values()],
            "time": statistics.median(a["seconds"] / b["seconds"] for a, b in zip(rows[0], base, strict=True)),
            "memory_MiB": [round(statistics.median(row["memory"] for row in each) / 2**20, 1) for each in rows.values()],
            "sent_MiB": [round(statistics.median(row["sent"] for row in each) / 2**20, 2) for each in rows.values()],
            "loss_deviation": abs(rows[0][0]["loss"] - base[0]["loss"]) / base[0]["loss"],
        }
    return table


def _of(found: Mapping[int, Sequence[Mapping[str, Any]]], name: str) -> dict[int, list[Mapping[str, Any]]]:
    """The rows of one split, of each rank that has a part in it."""
    rows = {rank: [row for row in rows if row["name"] == name] for rank, rows in found.items()}
    return {rank: each for rank, each in rows.items() if each}


def make_batch(model: ModelConfig, sides: Sequence[int]) -> dict[str, torch.Tensor]:
    """Rows of 150 to 325 words with a picture of ``side * side`` patches, 0 for none, behind the first 50; what comes after it is learnt.

    Args:
        sides: one after the other, again and again.
    """
    generator = torch.Generator().manual_seed(0)
    assert model.image_encoder is not None and model.vision_start_token_id is not None
    encoder = model.image_encoder.vision_encoder
    rows, pixels, grids = [], [], []
    for number in range(MICRO_BATCHES):
        words = torch.randint(0, VOCABULARY // 2, (150 + 25 * number,), generator=generator).tolist()
        side, picture = sides[number % len(sides)], []
        if side:
            picture = [model.vision_start_token_id, *[model.img_context_token_id] * encoder.tokens((1, side, side))]
            pixels.append(torch.randn(side * side, encoder.patch_width, generator=generator))
            grids.append((1, side, side))
        rows.append((words[:50] + picture + words[50:], 50 + len(picture)))
    longest = max(len(ids) for ids, _ in rows)
    ids, mask = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, (tokens, first) in enumerate(rows):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = torch.tensor(tokens), 1
        labels[row, first : len(tokens)] = ids[row, first : len(tokens)]
    return {"input_ids": ids, "labels": labels, "attention_mask": mask, "pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor(grids)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="timed steps a round")
    parser.add_argument("--only", action="append", metavar="NAME", help="this split and one process")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    from tangram.align.batch import write_batch
    from tangram.align.run import make_task, open_subject, prepare_batch
    from tangram.families.base import get_family
    from tangram.families.tiny import TinySpec

    chosen = {name: split for name, split in {**splits(), **skewed()}.items() if not args.only or name in (BASE, *args.only)}
    with tempfile.TemporaryDirectory() as name:
        work, hf = Path(name), Path(name, "hf")
        get_family("qwen2_5_vl").tiny(hf, 0, True, TinySpec(hidden=HIDDEN, text_layers=LAYERS, vocab=VOCABULARY))
        subject = open_subject(hf, work)
        files = {}
        for kind, sides in (("even", (24, 24, 24, 0)), ("skewed", (8, 8, 8, 32))):
            batch, _ = prepare_batch(subject, write_batch(make_batch(subject.model, sides), work / f"given {kind}"))
            files[kind] = write_batch(batch, work / kind)
        tasks = []
        for number, (label, split) in enumerate(chosen.items()):
            folder = work / str(number)
            folder.mkdir()
            file = files["skewed" if label in SKEWED else "even"]
            tasks.append(make_task(subject, split, file, folder, micro_batch_size=1).model_copy(update={"name": label}))
        starter = multiprocessing.get_context("spawn")
        ranks = [starter.Process(target=work_off, args=(rank, tasks, args.rounds, args.steps, work)) for rank in range(PROCESSES)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        if any(each.exitcode for each in ranks):
            raise SystemExit("a process failed; its trace stands above")
        found = {rank: json.loads((work / f"rank_{rank}.json").read_text()) for rank in range(PROCESSES)}
    table = summarise(list(chosen), found)
    print(f"hidden {HIDDEN}, {LAYERS} layers, {MICRO_BATCHES} micro-batches a step, {os.cpu_count()} cores")
    print("times as ratios to one process's, of the skewed batch to no balance; of the rank with the most of it: processor time, MiB, sent")
    print(f"{'':32} {'time':>6} {'processor':>9} {'MiB':>7} {'MiB sent':>8} {'loss off by':>11}")
    for label, row in table.items():
        most = f"{max(row['processor']):9.2f} {max(row['memory_MiB']):7.1f} {max(row['sent_MiB']):8.2f}"
        print(f"{label:32} {row['time']:6.2f} {most} {row['loss_deviation']:11.1e}")
    if args.json is not None:
        sizes = {"hidden": HIDDEN, "layers": LAYERS, "vocabulary": VOCABULARY, "micro_batches": MICRO_BATCHES, "cores": os.cpu_count()}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"sizes": sizes, "rounds": args.rounds, "splits": table}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
