"""Conversion of LLaVA-Instruct-150K, measured by ``bench/data.py``: ours against a plain script, each in a process of its own.

The input is made up, of the real file's shape: 157,712 records and 204 MB of indented JSON, beside a folder of 118,287 (empty) image files.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

RECORDS, IMAGES, BYTES = 157_712, 118_287, 204_000_000
KINDS = ((5, 128), (1, 549), (1, 853))
"""Question-answer pairs and characters of an answer: conversation, detailed description, reasoning; dealt out as in the real set."""
SHARES = (58, 23, 77)
PROSE = "the a man woman street table sitting standing holding red blue near with and of in on image scene which appears two people bus cat"

TURN = """      {
        "from": "%s",
        "value": "%s"
      }"""
RECORD = """{
    "id": "%s",
    "image": "%s",
    "conversations": [
%s
    ]
  }"""
"""As ``json.dump(..., indent=2)`` writes them."""


def write_input(folder: Path, scale: float = 1.0) -> dict[str, int]:
    """Write ``llava.json`` and ``COCO/train2017``; records, images and bytes of the JSON file."""
    chance = random.Random(0)
    records, images = round(RECORDS * scale), round(IMAGES * scale)
    train = folder / "COCO" / "train2017"
    train.mkdir(parents=True)
    names = [f"{number * 5 + 9:012d}.jpg" for number in range(images)]
    for name in names:
        os.close(os.open(train / name, os.O_CREAT | os.O_WRONLY))
    prose = " ".join(chance.choices(PROSE.split(), k=200_000))

    def text(length: int) -> str:
        start = chance.randrange(len(prose) - 2000)
        return prose[start : start + max(8, round(chance.gauss(length, length / 4)))]

    kinds = chance.choices(KINDS, weights=SHARES, k=records)
    with (folder / "llava.json").open("w", encoding="utf-8") as file:
        file.write("[\n  ")
        for number, (pairs, length) in enumerate(kinds):
            turns = []
            for pair in range(pairs):
                question, answer = ("" if pair else "<image>\\n") + text(55) + "?", text(length) + "."
                turns += [TURN % ("human", question), TURN % ("gpt", answer)]
            name = names[number] if number < images else chance.choice(names)
            file.write((",\n  " if number else "") + RECORD % (name[:-4], name, ",\n".join(turns)))
        file.write("\n]")
    return {"records": records, "images": images, "json_bytes": (folder / "llava.json").stat().st_size}


PLAIN = """
import json, os, sys
coco, source, output = sys.argv[1:]
with open(source) as file:
    items = json.load(file)
written = []
for item in items:
    images = []
    if item.get("image"):
        path = os.path.join("./train2017", item["image"])
        if not os.path.exists(os.path.join(coco, path)):
            continue
        images = [path]
    messages = []
    for turn in item["conversations"]:
        role = {"human": "user", "gpt": "assistant"}[turn["from"]]
        messages.append({"role": role, "content": turn["value"]})
    written.append({"images": images, "messages": messages})
with open(output, "w") as file:
    json.dump(written, file, ensure_ascii=False, indent=4)
"""
"""json.load, a loop with one ``os.path.exists`` a record, json.dump."""


def measure(folder: Path, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Seconds of the whole process, flushed to the disk where the program does so itself, and its largest resident memory, both sides in turn."""
    coco, source, output = (folder / name for name in ("COCO", "llava.json", "out.json"))
    ours = ["-m", "tangram", "data", "llava-to-mllm", "--coco_path", coco, "--llava_json_path", source, "--output_json_path", output]
    sides = {
        "ours": ours,
        "plain": ["-c", PLAIN, coco, source, output],
        "plain compact": ["-c", PLAIN.replace(", indent=4", ""), coco, source, output],
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    expected: Any = None
    for number in range(rounds):
        for name, words in sides.items():
            source.read_bytes()
            os.sync()
            found[name].append(_run([sys.executable, *map(str, words)]))
            if number == 0:
                value = json.loads(output.read_bytes())
                assert expected in (None, value), f"{name} wrote something else"
                expected = value
            output.unlink()
        expected = None
    return found


def _run(command: list[str]) -> dict[str, float]:
    peak = {"anonymous": 0, "resident": 0}
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    watcher = threading.Thread(target=_watch, args=(process.pid, peak))
    watcher.start()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command[:4])} ended with {process.returncode}")
    sizes = {f"{name}_mib": kib / 1024 for name, kib in peak.items()}
    return {"seconds": seconds, "cpu_seconds": usage.ru_utime + usage.ru_stime, **sizes}


def _watch(pid: int, peak: dict[str, int]) -> None:
    """Sample a process every 20 ms until it ends."""
    while True:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            return
        sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "VmHWM"))}
        if not sizes:  # a zombie has no memory
            return
        peak["anonymous"], peak["resident"] = max(peak["anonymous"], sizes["RssAnon"]), sizes["VmHWM"]
        time.sleep(0.02)
