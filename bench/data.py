"""The data room against plain programs, side by side on one machine.

    python bench/data.py --json bench/results/data.json
    python bench/data.py --parts loader,positions

- loader: samples a second with 0, 1 and 2 worker processes, against a plain loop over transformers' image processor, tokenizer and
  ``get_rope_index``. Both read the same photographs (scikit-image's) from the same files and give pixels, ids and 3-D positions; ours make labels
  and batches besides.
- llava: conversion of LLaVA-Instruct-150K, against json.load, a loop and json.dump (``bench/llava.py``).
- packing: tokens a slot of a row holds, by strategy, on lengths as pictures with conversations have them.
- positions: what the 3-D positions cost in collation, in processor seconds.

Sides take turns; medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llava

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

PARTS = ("loader", "llava", "packing", "positions")
MAX_PIXELS = 512 * 512
"""As in examples/qwen2.5vl/data.json."""
PATCH, MERGE = 14, 2
BATCH = 4
IMAGE, VISION_START, VISION_END = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"
SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
CAPACITY, WINDOW, LENGTHS = 4096, 1000, 100_000
PROCESSOR = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": MERGE,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


class Photographs:
    """A dataset of photographs with questions and answers, and both ways of reading it."""

    def __init__(self, folder: Path, samples: int) -> None:
        from tangram.align.default_batch import photo_folder
        from tangram.config.parsing import parse_section
        from tangram.config.run import RunConfig
        from tangram.demo.photos import QUESTIONS
        from tangram.families import get_family
        from tangram.families.tokenizer_files import write_tokenizer

        pairs = [(name, question, answer) for name, talk in QUESTIONS.items() for question, answer in talk]
        self.samples = [(str(photo_folder() / name), q, a) for name, q, a in (pairs[number % len(pairs)] for number in range(samples))]
        write_tokenizer(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
        records = [
            {"images": [path], "messages": [{"role": "user", "content": f"<image>{q}"}, {"role": "assistant", "content": a}]}
            for path, q, a in self.samples
        ]
        (folder / "data.json").write_text(json.dumps(records))
        self.folder, self.family = folder, get_family("qwen2_5_vl")
        self.model = self.family.from_hf_config(_config())
        data = {
            "dataset_param": {
                "preprocess_parameters": {"model_name_or_path": str(folder), "image_max_pixels": MAX_PIXELS, "image_min_pixels": 3136},
                "basic_parameters": {"dataset": str(folder / "data.json"), "dataset_dir": str(folder)},
            }
        }
        training = {"lr": 1e-3, "seq_length": 4096, "micro_batch_size": BATCH, "global_batch_size": BATCH}
        self._raw = {"model": {"config": self.model}, "data": data, "training": training}
        self._parse: Callable[..., Any] = lambda workers: parse_section(
            RunConfig, {**self._raw, "training": {**training, "num_workers": workers}}, "run"
        )

    def loader(self, workers: int) -> Any:
        from tangram.data.build import build_loader

        return build_loader(self._parse(workers), self.family, 0, 1)

    def ours(self, workers: int) -> float:
        """Seconds to read every sample once, from the start of the workers to the last batch, all of them tensors in this process."""
        import torch

        loader = self.loader(workers)
        begin, count, pixels = time.perf_counter(), 0, 0
        for step in loader:
            count += sum(len(batch["sample_ids"]) for batch in step)
            pixels += sum(len(batch["pixel_values"]) for batch in step if batch["pixel_values"].dtype == torch.float32)
            if count >= len(self.samples):
                break
        seconds = time.perf_counter() - begin
        assert count == len(self.samples) and pixels == self.patches, (count, pixels, self.patches)
        return seconds

    patches = 0
    """Of all samples, by transformers' count."""

    def transformers(self) -> float:
        """The same by transformers, one sample after another."""
        import torch
        from PIL import Image

        self._prepare()
        begin, patches = time.perf_counter(), 0
        for path, question, answer in self.samples:
            with Image.open(path) as image:
                processed = self._processor(images=[image.convert("RGB")], return_tensors="pt")
            tokens = int(processed["image_grid_thw"].prod()) // MERGE**2
            media = VISION_START + IMAGE * tokens + VISION_END
            text = f"{SYSTEM}<|im_start|>user\n{media}{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
            ids = torch.tensor([self._tokenizer(text)["input_ids"]])
            positions = hf_positions(ids, processed["image_grid_thw"])
            assert positions.shape == (3, 1, ids.shape[1])
            patches += len(processed["pixel_values"])
        self.patches = patches
        return time.perf_counter() - begin

    def _prepare(self) -> None:
        if hasattr(self, "_processor"):
            return
        from transformers import PreTrainedTokenizerFast

        try:
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil as Processor
        except ImportError:
            from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor as Processor
        self._processor = Processor(min_pixels=3136, max_pixels=MAX_PIXELS)
        self._tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(self.folder / "tokenizer.json"))


def _config() -> dict[str, Any]:
    """config.json of Qwen2.5-VL with few layers; the data needs ids and geometry only."""
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "in_chans": 3, "hidden_act": "silu"}
    vision |= {"patch_size": PATCH, "temporal_patch_size": 2, "spatial_merge_size": MERGE, "window_size": 112, "fullatt_block_indexes": [0]}
    text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"vocab_size": 151936, "max_position_embeddings": 32768, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6}
    ids = {"image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652}
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "tie_word_embeddings": True}
    return {"model_type": "qwen2_5_vl", **text, **ids, **rope, "vision_config": {**vision, "tokens_per_second": 2}}


def hf_positions(ids: Any, grids: Any, mask: Any = None) -> Any:
    """transformers' ``get_rope_index``, called on a stand-in that has the config it reads."""
    import torch
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel as Model

    vision = SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=2)
    config = SimpleNamespace(vision_config=vision, image_token_id=151655, video_token_id=151656, vision_start_token_id=151652)
    this = SimpleNamespace(config=config)
    given = {"image_grid_thw": grids, "attention_mask": torch.ones_like(ids) if mask is None else mask}
    if hasattr(Model, "get_vision_position_ids"):
        this.get_vision_position_ids = lambda *args, **kwargs: Model.get_vision_position_ids(this, *args, **kwargs)
        given["mm_token_type_ids"] = (ids == 151655).int()
    return Model.get_rope_index(this, ids, **given)[0]


def loader_part(folder: Path, rounds: int, scale: float) -> dict[str, Any]:
    """Samples a second."""
    photographs = Photographs(folder, max(BATCH, round(320 * scale) // BATCH * BATCH))
    sides: dict[str, Callable[[], float]] = {"transformers": photographs.transformers}
    sides |= {f"workers {workers}": lambda workers=workers: photographs.ours(workers) for workers in (0, 1, 2)}
    for side in sides.values():  # imports, page cache, tokenizer
        side()
    seconds = take_turns(sides, rounds)
    count = len(photographs.samples)
    rates = {name: count / statistics.median(times) for name, times in seconds.items()}
    ratios = {
        name: statistics.median(base / own for base, own in zip(seconds["transformers"], times, strict=True)) for name, times in seconds.items()
    }
    return {"samples": count, "samples_per_second": rates, "ratio_to_transformers": ratios, "all_seconds": seconds}


def take_turns(sides: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            found[name].append(side())
    return found


def llava_part(folder: Path, rounds: int, scale: float) -> dict[str, Any]:
    """Seconds and memory."""
    written = llava.write_input(folder, scale)
    found = llava.measure(folder, rounds)
    medians = {name: {key: statistics.median(each[key] for each in runs) for key in runs[0]} for name, runs in found.items()}
    ratios = {
        key: {
            f"to {name}": statistics.median(ours[key] / theirs[key] for ours, theirs in zip(found["ours"], found[name], strict=True))
            for name in found
            if name != "ours"
        }
        for key in ("seconds", "cpu_seconds")
    }
    return {**written, "medians": medians, "ratio": ratios, "all": found}


def packing_part(scale: float) -> dict[str, Any]:
    """Share of slots that hold a token: rows of ``CAPACITY`` tokens packed within windows, or micro-batches padded to their longest row."""
    from tangram.data.orders.packing import PACKERS

    lengths = sample_lengths(round(LENGTHS * scale))
    windows = [lengths[start : start + WINDOW] for start in range(0, len(lengths), WINDOW)]
    found: dict[str, Any] = {}
    for name, pack in PACKERS.items():
        begin = time.perf_counter()
        rows = sum(len(pack(window, CAPACITY)) for window in windows)
        seconds = time.perf_counter() - begin
        found[name] = {"efficiency": sum(lengths) / (rows * CAPACITY), "rows": rows, "seconds": seconds}
    padded = sum(BATCH * max(lengths[start : start + BATCH]) for start in range(0, len(lengths), BATCH))
    found["none"] = {"efficiency": sum(lengths) / padded, "rows": len(lengths), "micro_batch_size": BATCH}
    return {"samples": len(lengths), "capacity": CAPACITY, "window": WINDOW, "mean_length": statistics.fmean(lengths), "strategies": found}


def sample_lengths(count: int) -> list[int]:
    """Tokens of made-up samples: three quarters have a picture of up to ``MAX_PIXELS`` (COCO's sides), all a log-normal text."""
    import numpy as np

    random = np.random.Generator(np.random.Philox(key=0))
    text = np.exp(random.normal(5.2, 0.8, count)).clip(20, CAPACITY // 2).astype(int)
    sides = random.integers(240, 641, (count, 2))
    sides[np.arange(count), random.integers(0, 2, count)] = 640
    pictures = (np.minimum(sides.prod(1), MAX_PIXELS) / (PATCH * MERGE) ** 2).astype(int) + 2
    return (text + pictures * (random.random(count) < 0.75) + 25).tolist()


def positions_part(folder: Path, rounds: int) -> dict[str, Any]:
    """Processor seconds of collation, of the positions inside it, and of transformers' positions of the same rows.

    Collation goes from samples up to the tensors that a model takes. It works in this process alone, so that other programs do not count.
    """

    photographs = Photographs(folder, 4 * BATCH)
    source = photographs.loader(0).source
    rows = [[source.encoder(source.dataset[number])] for number in range(4 * BATCH)]
    batches = [rows[start : start + BATCH] for start in range(0, len(rows), BATCH)]
    made = [source.collator(batch) for batch in batches]
    index = source.collator.rope_index
    calls: list[list[Any]] = []
    source.collator.rope_index = lambda *given: calls[-1].append(given) or index(*given)
    for batch in batches:
        calls.append([])
        source.collator(batch)
    source.collator.rope_index = index

    def timed(call: Callable[[Any, Any, Any], object]) -> Callable[[], float]:
        def run() -> float:
            begin = time.process_time()
            for batch, result, asked in zip(batches, made, calls, strict=True):
                call(batch, result, asked)
            return (time.process_time() - begin) / len(batches)

        return run

    sides = {
        "collation": timed(lambda batch, _, __: source.collator(batch)),
        "positions": timed(lambda _, __, asked: [index(*given) for given in asked]),
        "positions of transformers": timed(lambda _, b, __: hf_positions(b["input_ids"], b["image_grid_thw"], b["attention_mask"])),
        "encoding": timed(lambda batch, _, __: [source.encoder(source.dataset[row[0].id]) for row in batch]),
    }
    for side in sides.values():
        side()
    seconds = {name: statistics.median(times) for name, times in take_turns(sides, 5 * rounds).items()}
    share = seconds["positions"] / seconds["collation"]
    of_all = seconds["positions"] / (seconds["collation"] + seconds["encoding"])
    return {"micro_batch_size": BATCH, "seconds_per_micro_batch": seconds, "share_of_collation": share, "share_of_encoding_and_collation": of_all}


def machine() -> dict[str, Any]:
    """What was measured on."""
    import torch
    import transformers

    model = next((line.split(": ")[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "unknown")
    memory = int(Path("/proc/meminfo").read_text().split()[1]) / 2**20
    facts = {"processor": model, "cores": len(os.sched_getaffinity(0)), "memory_gib": round(memory, 1), "load": round(os.getloadavg()[0], 1)}
    return {**facts, "torch": torch.__version__, "transformers": transformers.__version__}


def show(report: dict[str, Any]) -> None:
    """The figures, a line each."""
    machine_facts = report["machine"]
    print(f"{machine_facts['processor']}, {machine_facts['cores']} cores, load at the start {machine_facts['load']}; {report['rounds']} rounds")
    for name, rate in report.get("loader", {}).get("samples_per_second", {}).items():
        print(f"loader     {name:28} {rate:8.1f} samples/s  {report['loader']['ratio_to_transformers'][name]:6.2f} x transformers")
    for name, found in report.get("llava", {}).get("medians", {}).items():
        memory = f"{found['resident_mib']:7.0f} MiB, {found['anonymous_mib']:.0f} of them anonymous"
        print(f"llava      {name:28} {found['seconds']:8.2f} s, {found['cpu_seconds']:.2f} of processor {memory}")
    for name, found in report.get("packing", {}).get("strategies", {}).items():
        print(f"packing    {name:28} {100 * found['efficiency']:8.1f} % of {found['rows']} rows")
    for name, seconds in report.get("positions", {}).get("seconds_per_micro_batch", {}).items():
        print(f"positions  {name:28} {1000 * seconds:8.2f} ms a micro-batch")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), help=f"what to measure, separated by commas ({','.join(PARTS)})")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of which medians are taken (3)")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the samples and records, for a trial (1)")
    parser.add_argument("--dir", type=Path, help="folder for the inputs (the system's temporary one); about 1 GB")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args(argv)
    parts = args.parts.split(",")
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; known: {', '.join(PARTS)}")
    report: dict[str, Any] = {"machine": machine(), "rounds": args.rounds, "scale": args.scale}
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="bench-data-") as name:
        run: dict[str, Callable[[Path], dict[str, Any]]] = {
            "loader": lambda folder: loader_part(folder, args.rounds, args.scale),
            "llava": lambda folder: llava_part(folder, args.rounds, args.scale),
            "packing": lambda folder: packing_part(args.scale),
            "positions": lambda folder: positions_part(folder, args.rounds),
        }
        for part in PARTS:
            if part in parts:
                folder = Path(name, part)
                folder.mkdir()
                report[part] = run[part](folder)
    show(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
