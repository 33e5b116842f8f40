"""Conversion against a plain copy and against a plain implementation, side by side on one machine.

    python bench/convert.py --size 3b --tp 2 --pp 2 --json bench/results/convert-3b-tp2-pp2.json

A random bf16 model directory is written, then, round after round, each of these runs in a process of its own:

- ``cp -r`` of what is converted, then ``sync``
- ``mm-convert`` hf_to_mm and mm_to_hf, then ``sync``
- a plain converter: every tensor loaded with safetensors or torch.load, transformed in memory, saved with torch.save or safetensors; ``sync``

``seconds`` are from the first to the last byte; ``process_seconds`` also hold the interpreter's start and the import of torch. Before
each, the disk is flushed and the input is read once, so that all start with it in the page cache. Medians over the rounds; ratios are to
the copy of the same input in the same round.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OURS, PLAIN = "ours", "plain"
CONVERTER = "Qwen2_5_VLConverter"
FAMILY = "qwen2_5_vl"


def config_of(size: str, tp: int) -> tuple[dict[str, Any], str]:
    """config.json of Qwen2.5-VL-3B or of a small model, and what was changed so that ``tp`` divides it."""
    tiny = size == "tiny"
    groups, vision_ffn, note = (8, 48, "") if tiny else (2, 3420, "")
    if groups % tp or vision_ffn % tp:
        groups, vision_ffn = 8, 3424
        note = f"TP{tp} does not divide the 2 key/value heads and vision ffn 3420 of the published 3B: measured with {groups} and {vision_ffn}"
    text = {
        "model_type": "qwen2_5_vl_text",
        "hidden_size": 128 if tiny else 2048,
        "intermediate_size": 256 if tiny else 11008,
        "num_hidden_layers": 4 if tiny else 36,
        "num_attention_heads": 16,
        "num_key_value_heads": groups,
        "vocab_size": 512 if tiny else 151936,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "rope_scaling": {"mrope_section": [2, 1, 1] if tiny else [16, 24, 24], "type": "mrope"},
    }
    vision = {
        "depth": 4 if tiny else 32,
        "hidden_size": 64 if tiny else 1280,
        "intermediate_size": vision_ffn,
        "num_heads": 8 if tiny else 16,
        "out_hidden_size": text["hidden_size"],
        "fullatt_block_indexes": [3] if tiny else [7, 15, 23, 31],
        "hidden_act": "silu",
        "in_channels": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "tokens_per_second": 2,
        "model_type": "qwen2_5_vl",
    }
    tokens = {"image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652, "vision_end_token_id": 151653}
    if tiny:
        tokens = {key: number - 151656 + 511 for key, number in tokens.items()}
    top = {**text, "model_type": FAMILY, "architectures": ["Qwen2_5_VLForConditionalGeneration"], "torch_dtype": "bfloat16"}
    return {**top, **tokens, "text_config": text, "vision_config": vision}, note


def write_model(path: Path, config: dict[str, Any]) -> int:
    """Write a model of random bits, NaNs among them; returns bytes of tensors."""
    import torch

    from tangram.checkpoints.export import export_hf
    from tangram.checkpoints.reader import TensorInfo, count_elements
    from tangram.families.base import get_family
    from tangram.placement.blocks import canonical_shapes
    from tangram.placement.topology import Topology

    family = get_family(FAMILY)
    model = family.from_hf_config(config)
    topology = Topology.build(vision_layers=config["vision_config"]["depth"], text_layers=config["text_config"]["num_hidden_layers"])
    shapes = canonical_shapes(family.tensor_table(model, model.text_decoder.vocab_size), topology)
    noise = torch.frombuffer(bytearray(os.urandom(96 << 20)), dtype=torch.bfloat16)

    class Noise:
        def names(self) -> Mapping[str, TensorInfo]:
            return {name: TensorInfo(shape, torch.bfloat16) for name, shape in shapes.items()}

        def read(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
            count = count_elements(shape)
            first = zlib.crc32(f"{name}{start}".encode()) % (len(noise) - count)
            return noise[first : first + count].view(shape)

    return export_hf(Noise(), path, family, hf_config=config)


def ours(words: list[str]) -> float:
    """Run ``mm-convert``; seconds."""
    import tangram.checkpoints.convert
    from tangram.cli.mm_convert import main

    assert tangram.checkpoints.convert
    began = time.perf_counter()
    main(words)
    os.sync()
    return time.perf_counter() - began


def plain(direction: str, hf_dir: Path, mm_dir: Path, out: Path) -> float:
    """Convert as converters commonly do, everything in memory; seconds."""
    import tangram.checkpoints.mp_rank

    assert tangram.checkpoints.mp_rank
    began = time.perf_counter()
    _plain(direction, hf_dir, mm_dir, out)
    os.sync()
    return time.perf_counter() - began


def _plain(direction: str, hf_dir: Path, mm_dir: Path, out: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    from tangram.checkpoints.copier import LocalSource, fill, local_dtype
    from tangram.checkpoints.hf_directory import HFDirectory
    from tangram.checkpoints.manifest import read_manifest
    from tangram.checkpoints.mp_rank import RANK_FILE, all_ranks
    from tangram.checkpoints.reader import MemoryReader, read_whole

    hf, manifest = HFDirectory(hf_dir), read_manifest(mm_dir)
    assert manifest is not None
    table, topology = hf.family.tensor_table(hf.model, manifest.padded_vocab), manifest.topology
    if direction == "hf_to_mm":
        loaded = {hf.family.canonical_name(key): tensor for file in hf.shards for key, tensor in load_file(hf_dir / file).items()}
        source = MemoryReader(loaded)
        for rank in all_ranks(topology):
            state = {}
            (placement,) = rank.place(table, topology)
            for name, layout in placement.tensors.items():
                state[name] = torch.empty(layout.shape, dtype=local_dtype(layout, source))
                fill(layout, state[name], source)
            (out / "release" / rank.folder(topology)).mkdir(parents=True)
            torch.save({"model": state, "checkpoint_version": 3.0}, out / "release" / rank.folder(topology) / RANK_FILE)
        return
    parts = []
    for rank in all_ranks(topology):
        file = mm_dir / "release" / rank.folder(topology) / RANK_FILE
        (placement,) = rank.place(table, topology)
        parts.append((placement, torch.load(file, weights_only=True)["model"], str(file)))
    whole = LocalSource(parts, hf.shapes)
    out.mkdir()
    for name, keys in hf.shards.items():
        tensors = {key: read_whole(whole, hf.family.canonical_name(key)).contiguous() for key in keys}
        save_file(tensors, out / name, metadata={"format": "pt"})


def measure(command: list[str], source: Path) -> dict[str, float]:
    """Run a command and ``sync``: wall seconds (its own where it prints them), peak memory, bytes read and written by its calls."""
    os.sync()
    for file in source.rglob("*"):
        if file.is_file():
            with file.open("rb", buffering=0) as stream:
                while stream.read(16 << 20):
                    pass
    peak: dict[str, int] = {"anonymous": 0, "resident": 0}
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    watcher = threading.Thread(target=_watch, args=(process.pid, peak))
    watcher.start()
    assert process.stdout is not None
    printed = process.stdout.read().splitlines()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    watcher.join()
    os.sync()
    seconds = time.perf_counter() - began
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: ended with {process.returncode}")
    return {
        "seconds": float(printed[-1]) if printed else seconds,
        "process_seconds": seconds,
        "user_seconds": usage.ru_utime,
        "system_seconds": usage.ru_stime,
        "peak_anonymous_bytes": peak["anonymous"],
        "peak_resident_bytes": peak["resident"],
        "read_call_bytes": peak.get("rchar", 0),
        "written_call_bytes": peak.get("wchar", 0),
        "disk_read_bytes": usage.ru_inblock * 512,
    }


def _watch(pid: int, peak: dict[str, int]) -> None:
    """Sample a process every 10 ms until it ends."""
    while True:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            sizes = {line.split()[0]: int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(("RssAnon", "VmRSS"))}
            if not sizes:  # a zombie has no memory
                return
            peak["anonymous"] = max(peak["anonymous"], sizes["RssAnon:"])
            peak["resident"] = max(peak["resident"], sizes["VmRSS:"])
            for line in Path(f"/proc/{pid}/io").read_text().splitlines():
                key, value = line.split(": ")
                peak[key] = int(value)
        except (OSError, ValueError):
            return
        time.sleep(0.01)


def machine() -> dict[str, Any]:
    """What was measured on."""
    model = next((line.split(": ")[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "unknown")
    memory = int(Path("/proc/meminfo").read_text().split()[1]) / 2**20
    return {"processor": model, "cores": len(os.sched_getaffinity(0)), "memory_gib": round(memory, 1), "load": round(os.getloadavg()[0], 1)}


def even(layers: int, parts: int) -> list[int]:
    return [layers // parts + (i < layers % parts) for i in range(parts)]


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All rounds; medians per measured thing."""
    config, note = config_of(args.size, args.tp)
    hf, mm, out = folder / "hf", folder / "mm", folder / "out"
    size = write_model(hf, config)
    text = even(config["text_config"]["num_hidden_layers"], args.pp)
    vision = [config["vision_config"]["depth"], *[0] * (args.pp - 1)]
    split = [f"--cfg.parallel_config.llm_pp_layers={text}", f"--cfg.parallel_config.vit_pp_layers={vision}"]
    split = [f"--cfg.parallel_config.tp_size={args.tp}", *(word.replace(" ", "") for word in split)]
    our, theirs = [sys.executable, __file__, OURS, CONVERTER], [sys.executable, __file__, PLAIN]

    def to_mm(target: Path) -> list[str]:
        return [*our, "hf_to_mm", f"--cfg.mm_dir={target}", f"--cfg.hf_config.hf_dir={hf}", *split]

    to_hf = [*our, "mm_to_hf", f"--cfg.mm_dir={mm}", f"--cfg.hf_config.hf_dir={hf}", f"--cfg.save_hf_dir={out}", *split]
    subprocess.run(to_mm(mm), check=True, stdout=subprocess.DEVNULL)
    things: dict[str, tuple[list[str], Path]] = {
        "hf_to_mm cp+sync": (["cp", "-r", str(hf), str(out)], hf),
        "hf_to_mm ours": (to_mm(out), hf),
        "hf_to_mm plain": ([*theirs, "hf_to_mm", str(hf), str(mm), str(out)], hf),
        "mm_to_hf cp+sync": (["cp", "-r", str(mm), str(out)], mm),
        "mm_to_hf ours": (to_hf, mm),
        "mm_to_hf plain": ([*theirs, "mm_to_hf", str(hf), str(mm), str(out)], mm),
    }
    if args.no_plain:
        things = {name: thing for name, thing in things.items() if not name.endswith(PLAIN)}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in things}
    for number in range(args.rounds):
        for name, (command, source) in things.items():
            rounds[name].append(measure(command, source))
            if number == 0 and name.startswith("mm_to_hf ") and not name.endswith("sync"):
                different = [file.name for file in hf.glob("*.safetensors") if not filecmp.cmp(file, out / file.name, shallow=False)]
                assert not different, f"{name}: {different} are not what they were"
            shutil.rmtree(out)
            print(f"round {number + 1}  {name:18} {rounds[name][-1]['seconds']:7.2f} s", file=sys.stderr, flush=True)
    results = {name: {key: statistics.median(m[key] for m in each) for key in each[0]} for name, each in rounds.items()}
    for name, each in rounds.items():
        copies = rounds[f"{name.split()[0]} cp+sync"]
        results[name]["process_ratio"] = statistics.median(m["process_seconds"] / c["process_seconds"] for m, c in zip(each, copies, strict=True))
        results[name]["ratio"] = statistics.median(m["seconds"] / c["seconds"] for m, c in zip(each, copies, strict=True))
        results[name]["all_seconds"] = [round(m["seconds"], 2) for m in each]  # type: ignore[assignment]
    return {
        "model": {"size": args.size, "tensor_bytes": size, "note": note},
        "split": {"tp": args.tp, "llm_pp_layers": text, "vit_pp_layers": vision},
        "files": {"hf_bytes": tree_bytes(hf), "mm_bytes": tree_bytes(mm)},
        "machine": machine() | {"disk": args.disk},
        "cache": "input in the page cache, nothing dirty, before every measurement",
        "rounds": args.rounds,
        "results": results,
    }


def tree_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def show(report: dict[str, Any]) -> None:
    if report["model"]["note"]:
        print(report["model"]["note"])
    files = report["files"]
    print(f"HF directory {files['hf_bytes'] / 1e9:.2f} GB, mp_rank directory {files['mm_bytes'] / 1e9:.2f} GB, medians of {report['rounds']} rounds")
    print(f"{'':20}{'wall s':>8}{'x cp+sync':>11}{'anon MiB':>10}{'RSS MiB':>9}{'written GB':>12}")
    for name, m in report["results"].items():
        memory = f"{m['peak_anonymous_bytes'] / 2**20:>10.0f}{m['peak_resident_bytes'] / 2**20:>9.0f}"
        print(f"{name:20}{m['seconds']:>8.2f}{m['ratio']:>11.2f}{memory}{m['written_call_bytes'] / 1e9:>12.2f}")


def main() -> None:
    if sys.argv[1:2] == [OURS]:
        print(ours(sys.argv[2:]))
        return
    if sys.argv[1:2] == [PLAIN]:
        print(plain(sys.argv[2], *map(Path, sys.argv[3:])))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=("3b", "tiny"), default="3b", help="model (3b: Qwen2.5-VL-3B)")
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel size (2)")
    parser.add_argument("--pp", type=int, default=2, help="pipeline stages (2)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of which medians are taken (3)")
    parser.add_argument("--no-plain", action="store_true", help="leave the plain converter out")
    parser.add_argument("--disk", default="unknown", help="kind of disk, for the record")
    parser.add_argument("--dir", type=Path, help="folder for the models (the system's temporary one); about 4 times the model is needed")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="bench-convert-") as folder:
        report = run(args, Path(folder))
    show(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
