"""Real training runs, small and cheap: a tiny model with a byte tokenizer, pictures, a run file, and ranks forked from a warm server.

A launch costs a second instead of the ten that each fresh interpreter spends on importing torch, megatron-core and transformers.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from tangram.platform.ports import free_ports

VOCABULARY = 320
SPECIAL = {"<|endoftext|>": 306, "<|im_start|>": 307, "<|im_end|>": 308, "<|vision_start|>": 315, "<|vision_end|>": 316}
SPECIAL |= {"<|vision_pad|>": 317, "<|image_pad|>": 318, "<|video_pad|>": 319}
SAMPLES = 40
PICTURES = 6
BATCH = 8
PATIENCE = 240
"""Seconds after which a launch that should have ended is killed. A busy machine is slow."""

Record = dict[str, Any]


def write_byte_tokenizer(folder: Path, special: Mapping[str, int] = SPECIAL) -> None:
    """A tokenizer.json of the 256 bytes and the special tokens, by default at the ids of a Qwen-VL with 320 rows."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, **special}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))


def records(count: int = SAMPLES) -> list[Record]:
    """Questions and answers: one picture, none, or two, with answers of different lengths."""
    made = []
    for i in range(count):
        pictures = [[f"{i % PICTURES}.png"], [], [f"{i % PICTURES}.png", f"{(i + 1) % PICTURES}.png"]][i % 4 % 3]
        turns = [("user", "<image>" * len(pictures) + f"What is {i}?"), ("assistant", f"{i} " * (1 + i % 5))]
        made.append({"images": pictures, "messages": [{"role": role, "content": content} for role, content in turns]})
    return made


def write_pictures(folder: Path) -> None:
    for i in range(PICTURES):
        pixels = np.random.default_rng(i).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        size = (56 + 28 * (i % 2), 56 + 28 * (i % 3))
        Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).save(folder / f"{i}.png")


@dataclass
class Trial:
    """A folder with ``hf``, ``data.json``, pictures and ``run.yaml``."""

    folder: Path

    @property
    def hf(self) -> Path:
        return self.folder / "hf"

    @property
    def run_file(self) -> Path:
        return self.folder / "run.yaml"

    def edit(self, change: Mapping[str, Any], name: str = "run.yaml") -> Path:
        """Write the run file again, with the sections of ``change`` laid over it."""
        content = yaml.safe_load(self.run_file.read_text())
        for section, values in change.items():
            content[section] = {**content.get(section, {}), **values}
        path = self.folder / name
        path.write_text(yaml.safe_dump(content))
        return path


def write_trial(
    folder: Path, *, family: str = "qwen2_5_vl", tied: bool = False, count: int = SAMPLES, layers: int = 4, **training: Any
) -> Trial:
    """Write everything that a run needs; vision encoder and text decoder have so many ``layers`` each."""
    from tangram.families.base import get_family
    from tangram.families.tiny import TinySpec

    folder.mkdir(parents=True, exist_ok=True)
    spec = TinySpec(
        hidden=32, vision_hidden=16, text_layers=layers, vision_layers=layers, vocab=VOCABULARY, max_pixels=84 * 84, weight_std=0.1
    )
    get_family(family).tiny(folder / "hf", 0, tied, spec)
    write_byte_tokenizer(folder / "hf")
    write_pictures(folder)
    (folder / "data.json").write_text(json.dumps(records(count)))
    content = {
        "backend": "megatron",
        "model": {"hf_dir": "hf", "load": "hf"},
        "data": {
            "dataset_param": {
                "preprocess_parameters": {"model_name_or_path": "hf", "image_max_pixels": 84 * 84, "image_min_pixels": 56 * 56},
                "basic_parameters": {"dataset": "data.json", "dataset_dir": "."},
            },
            "dataloader_param": {"shuffle": True},
        },
        "training": {
            "micro_batch_size": 2,
            "global_batch_size": BATCH,
            "train_iters": 6,
            "lr": 1e-3,
            "lr_warmup_iters": 2,
            "seq_length": 256,
            "loss_type": "per_token_loss",
            **training,
        },
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return Trial(folder)


_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["tests.preload"])


def _be_a_rank(command: Sequence[str], environment: Mapping[str, str], log: str) -> None:
    """What torchrun gives a process: its place in the environment, its output in a file, and a program."""
    _take_place(environment, log)
    sys.exit(_do(command))


def _do(command: Sequence[str]) -> int | str | None:
    """``tangram ...``, or a script and its arguments; the exit status."""
    sys.argv = list(command)
    if command[0] == "tangram":
        from tangram.cli.main import main

        return main(command[1:])
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        return end.code
    return 0


def _take_place(environment: Mapping[str, str], log: str) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.environ.update(environment)
    # As with torchrun: data workers are forked from this process, not from another server, which would import everything once more.
    multiprocessing.set_start_method("fork", force=True)


@dataclass
class Launch:
    """Ranks at work."""

    processes: list[BaseProcess]
    logs: list[Path]

    def output(self, rank: int | None = None) -> str:
        """What a rank has printed so far; None: all of them."""
        chosen = self.logs if rank is None else [self.logs[rank]]
        return "\n".join(path.read_text(errors="replace") for path in chosen if path.exists())

    def wait_for(self, text: str, seconds: float = PATIENCE) -> None:
        """Until some rank has printed ``text``."""
        deadline = time.monotonic() + seconds
        while text not in self.output():
            assert time.monotonic() < deadline, f"no {text!r} after {seconds} s:\n{self.output()[-3000:]}"
            assert any(process.is_alive() for process in self.processes), f"ended without {text!r}:\n{self.output()[-3000:]}"
            time.sleep(0.01)

    def signal(self, number: int) -> None:
        """Send a signal to every rank, as torchrun does."""
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid or 0, number)

    def finish(self, seconds: float = PATIENCE) -> Outcome:
        """Wait; once a rank has failed the others get a minute, and what then still runs is killed and told as None."""
        deadline = time.monotonic() + seconds
        failed_at = None
        while any(process.is_alive() for process in self.processes):
            now = time.monotonic()
            if failed_at is None and any(process.exitcode for process in self.processes):
                failed_at = now
            if now > deadline or (failed_at is not None and now > failed_at + 60):
                break
            time.sleep(0.05)  # seldom enough to be no work; see ``tests.watchdog``
        codes = [process.exitcode for process in self.processes]
        self.kill()
        return Outcome(codes, [self.output(rank) for rank in range(len(self.logs))])

    def kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()


@dataclass(frozen=True)
class Outcome:
    """How a launch ended: exit status (None: it had to be killed) and output of each rank."""

    codes: list[int | None]
    outputs: list[str]

    @property
    def output(self) -> str:
        return "\n".join(self.outputs)

    def succeeded(self) -> Outcome:
        assert not any(self.codes) and None not in self.codes, f"exit codes {self.codes}:\n" + "\n".join(text[-2500:] for text in self.outputs)
        return self

    def errors(self) -> list[str]:
        """The lines that name an error, rank by rank."""
        return [line for line in self.output.splitlines() if ": error: " in line]


def start(folder: Path, command: Sequence[str], ranks: int = 1, environment: Mapping[str, str] | None = None) -> Launch:
    """Start ``command`` ("tangram", ... or a script and its flags) on so many ranks; output goes to ``folder``."""
    return _launched(folder, _be_a_rank, command, ranks, environment or {})


def _launched(
    folder: Path, target: Callable[..., None], command: Sequence[str], ranks: int, environment: Mapping[str, str]
) -> Launch:
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    (port,) = free_ports(1)
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "trial", **environment}
    logs = [folder / f"rank_{rank}.log" for rank in range(ranks)]
    processes = [
        _server.Process(target=target, args=(list(command), {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, str(log)))
        for rank, log in enumerate(logs)
    ]
    for process in processes:
        process.start()
    return Launch(list(processes), logs)


def run(folder: Path, command: Sequence[str], ranks: int = 1, environment: Mapping[str, str] | None = None) -> Outcome:
    """``start`` and ``finish``."""
    return start(folder, command, ranks, environment).finish()


@contextlib.contextmanager
def running(folder: Path, command: Sequence[str], ranks: int = 1) -> Iterator[Launch]:
    """A launch that is killed at the end of the block if it has not ended."""
    launch = start(folder, command, ranks)
    try:
        yield launch
    finally:
        launch.kill()


@dataclass(frozen=True)
class Job:
    """A command of ``run_in_turn``, and the ranks that it takes: all, or one of them."""

    command: Sequence[str]
    ranks: int = 1


def run_in_turn(folder: Path, jobs: Sequence[Job], ranks: int = 1) -> Outcome:
    """Commands one after another in the same processes, each with a process group of its own: first those of one rank, side by side.

    It saves the launches. What a command leaves behind in its process, the next one meets. The first that fails ends all.
    """
    turns = sorted(jobs, key=lambda job: job.ranks)
    assert {job.ranks for job in turns} <= {1, ranks}
    ports = free_ports(len(turns))
    plan = json.dumps([(list(job.command), job.ranks, port) for job, port in zip(turns, ports, strict=True)])
    return _launched(folder, _take_turns, [plan], ranks, {}).finish(PATIENCE + 10 * len(turns))


def _take_turns(command: Sequence[str], environment: Mapping[str, str], log: str) -> None:
    _take_place(environment, log)
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    for number, (words, ranks, port) in enumerate(json.loads(command[0])):
        if ranks == 1 and number % size != rank:
            continue
        place = str(rank if ranks > 1 else 0)
        os.environ |= {"RANK": place, "LOCAL_RANK": place, "WORLD_SIZE": str(ranks), "MASTER_PORT": str(port)}
        if status := _do(words):
            sys.exit(status)
        # Engines refer to themselves, and hold process groups with threads.
        gc.collect()


def split(tensor: int = 1, vision: Any = None, text: Any = None, **flags: Any) -> list[str]:
    """Overrides of a split; the layer lists give the pipeline and virtual sizes."""
    values: dict[str, Any] = {"tensor_model_parallel_size": tensor, **flags}
    if text is not None:
        rows = text if isinstance(text[0], list) else [text]
        values |= {"vit_pp_layers": vision, "llm_pp_layers": text, "pipeline_model_parallel_size": len(rows[0])}
        values |= {"virtual_pipeline_model_parallel_size": len(rows)} if len(rows) > 1 else {}
    return [f"parallel.{key}={json.dumps(value)}" for key, value in values.items()]


def metrics(path: Path) -> list[Record]:
    """The steps of a metrics.jsonl."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def losses(path: Path) -> list[float]:
    return [row["loss"] for row in metrics(path)]


def train(folder: Path, trial: Trial, overrides: Sequence[str] = (), ranks: int = 1, *, file: Path | None = None) -> list[Record]:
    """``tangram train`` to its end, in ``folder``; the steps' records."""
    path = folder / "metrics.jsonl"
    command = ["tangram", "train", str(file or trial.run_file), f"training.metrics_file={path}", *overrides]
    run(folder, command, ranks).succeeded()
    return metrics(path)


def entry_flags(trial: Trial, folder: Path, changes: Mapping[str, Any] | None = None) -> list[str]:
    """The run of ``run.yaml`` as Megatron-style launch flags with model.json and data.json; None leaves a flag out, True makes it a switch."""
    from tangram.config.yaml_config import read_run

    settings = read_run(trial.run_file)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.json").write_text(settings.model.config.model_dump_json())
    (folder / "data.json").write_text(settings.data.model_dump_json())
    training = settings.training
    flags: dict[str, Any] = {
        "--mm-model": folder / "model.json",
        "--mm-data": folder / "data.json",
        "--micro-batch-size": training.micro_batch_size,
        "--global-batch-size": training.global_batch_size,
        "--train-iters": training.train_iters,
        "--lr": training.lr,
        "--lr-decay-style": training.lr_decay_style,
        "--lr-warmup-iters": training.lr_warmup_iters,
        "--seq-length": training.seq_length,
        "--seed": training.seed,
        "--log-interval": 1,
        "--calculate-per-token-loss": True,
    }
    words: list[str] = []
    for name, value in {**flags, **(changes or {})}.items():
        if value is not None:
            words += [name] if value is True else [name, str(value)]
    return words
