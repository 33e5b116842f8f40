"""Runs whose numbers are stored: 20 samples in their order, 5 steps of AdamW, seed 42, for tiny models of every family."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from tangram.align.gate.replay_split import Wishes
from tangram.demo.data import KINDS, easy_vqa_folder, read_easy_vqa
from tests.trial import SPECIAL, VOCABULARY, Job, Record, run_in_turn, split, write_byte_tokenizer

STORED = Path(__file__).parent / "stored"
INPUTS = Path("runs", "baselines")
"""Where models and data lie, from the folder that a stored baseline is replayed in."""
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "llava")
BACKENDS = ("megatron", "fsdp2")
INITS = ("random", "hf")
"""Weights drawn from the seed, and those of a Hugging Face directory."""
SAMPLES, BATCH, STEPS, SEED = 20, 4, 5, 42
MARGINS = ("loss=1e-6", "grad_norm=1e-5")
TINY = f"--seed {SEED} --hidden 32 --vision-hidden 16 --text-layers 2 --vision-layers 2 --vocab {VOCABULARY}".split()
PICTURES = ["--max-pixels", str(84 * 84)]
OF_FAMILY = {**dict.fromkeys(FAMILIES, PICTURES), "qwen2_5_vl": [*PICTURES, "--tied"], "llava": []}
"""Options of ``tangram tiny``."""
RANDOM_STD = 0.15
"""Of random weights: at the usual 0.02 attention of a model this narrow is nearly uniform, and wrong positions would not show."""
LLAVA_TOKENS = {"<s>": 256, "</s>": 257, "<image>": 318, "<pad>": 319}

WHOLE = "training.micro_batch_size=4"
"""A step in one micro-batch; the stored runs have two."""


@dataclass(frozen=True)
class Topology:
    """Where stored baselines must hold.

    Args:
        inits: of the baselines.
        families: those that can be split so.
    """

    wishes: Wishes
    inits: Sequence[str] = INITS
    families: Sequence[str] = FAMILIES

    @classmethod
    def of(cls, *settings: str, data: int | None = None, **others: Any) -> Topology:
        return cls(Wishes(data=data, settings=settings), **others)


MIXED = ["qwen3_vl_moe"]
RING = split(context_parallel_size=2, context_parallel_algo="megatron_cp_algo")
OVERLAPPED = split(use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True)
EXPERTS = ["parallel.expert_parallel_size=2", "parallel.ep_plan.apply_modules=[model.language_model.layers.{*}.mlp.experts]"]
TOPOLOGIES: Mapping[str, Mapping[str, Topology]] = {
    "megatron": {
        "one process": Topology.of(),
        "DP2, distributed optimizer": Topology.of(*OVERLAPPED, data=2),
        "TP2 x SP": Topology.of(*split(2, sequence_parallel=True), WHOLE, inits=["random"]),
        "PP2, vision over both stages": Topology.of(*split(1, [1, 1], [0, 2]), inits=["random"]),
        "PP2 x VPP2": Topology.of(*split(1, [[1, 1], [0, 0]], [[0, 0], [1, 1]]), inits=["hf"]),
        "CP2, ring": Topology.of(*RING, WHOLE, inits=["hf"]),
        "EP2": Topology.of(*split(expert_model_parallel_size=2), data=2, families=MIXED),
    },
    "fsdp2": {
        "one process": Topology.of(),
        "two ranks": Topology.of(data=2),
        "HSDP, two copies": Topology.of("parallel.fully_shard_parallel_size=1", data=2),
        "Ulysses": Topology.of("parallel.ulysses_parallel_size=2", WHOLE),
        "EP2": Topology.of(*EXPERTS, data=2, families=MIXED),
    },
}


def topologies(family: str, backend: str, init: str) -> dict[str, Wishes]:
    """Where the family's stored baseline must hold, four at least; it was made at the first."""
    found = TOPOLOGIES[backend].items()
    return {name: topology.wishes for name, topology in found if init in topology.inits and family in topology.families}


def stored(family: str, backend: str, init: str) -> Path:
    """The baseline's file."""
    return STORED / f"{family}.{backend}.{init}.json"


def write_inputs(root: Path) -> None:
    """Models of all families and their data, as the stored baselines look for them in ``root``."""
    folder = root / INPUTS
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data.json").write_text(json.dumps(_records(folder), indent=1), encoding="utf-8")
    tiny = {family: ["tangram", "tiny", family, str(folder / family), "--force", *TINY, *OF_FAMILY[family]] for family in FAMILIES}
    run_in_turn(folder / "log", [Job(command) for command in tiny.values()]).succeeded()
    for family in FAMILIES:
        hf = folder / family
        config = json.loads((hf / "config.json").read_text())
        for section in (config, config.get("text_config", {}), config["vision_config"]):
            section["initializer_range"] = RANDOM_STD
        (hf / "config.json").write_text(json.dumps(config, indent=2))
        write_byte_tokenizer(hf, LLAVA_TOKENS if family == "llava" else SPECIAL)
        if family == "llava":
            (hf / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


def _records(folder: Path) -> list[Record]:
    """Of five samples one is of text, one has two pictures, and one a wider picture: questions of easy-VQA."""
    first: dict[Path, list[tuple[str, str]]] = {}
    for question in read_easy_vqa(easy_vqa_folder() / "test"):
        if question.kind in KINDS:
            first.setdefault(question.image, []).append((question.text, question.answer))
    pictures, made = iter(first.items()), []
    for number in range(SAMPLES):
        kind = number % 5
        if kind == 1:
            made.append({"images": [], "messages": _turns("", [(f"What is {number} plus {number}?", f"{2 * number}")])})
            continue
        chosen = [next(pictures) for _ in range(2 if kind == 3 else 1)]
        for path, _ in chosen:
            if kind == 2:
                with Image.open(path) as image:
                    image.resize((112, 64), Image.Resampling.BICUBIC).save(folder / path.name)
            else:
                shutil.copyfile(path, folder / path.name)
        turns = chosen[-1][1][: 1 + number % 2]
        made.append({"images": [path.name for path, _ in chosen], "messages": _turns("<image>" * len(chosen), turns)})
    return made


def _turns(before: str, pairs: list[tuple[str, str]]) -> list[Record]:
    turns = [turn for question, answer in pairs for turn in ({"role": "user", "content": question}, {"role": "assistant", "content": answer})]
    turns[0]["content"] = before + turns[0]["content"]
    return turns


def run_file(family: str, init: str, folder: Path) -> Path:
    """The run of the megatron backend, in one process; paths start from the root. That of fsdp2 is its replay on the other backend."""
    hf = str(INPUTS / family)
    basic: dict[str, Any] = {"dataset": str(INPUTS / "data.json"), "dataset_dir": str(INPUTS)}
    pixels = {} if family == "llava" else {"image_max_pixels": 84 * 84, "image_min_pixels": 56 * 56}
    content = {
        "backend": "megatron",
        "model": {"hf_dir": hf, "load": hf if init == "hf" else None},
        "data": {
            "dataset_param": {
                "preprocess_parameters": {"model_name_or_path": hf, **pixels},
                "basic_parameters": basic | ({"template": "llava"} if family == "llava" else {}),
            },
            "dataloader_param": {"shuffle": False},
        },
        "training": {
            "micro_batch_size": 2,
            "global_batch_size": BATCH,
            "train_iters": STEPS,
            "seed": SEED,
            "lr": 1e-3,
            "lr_warmup_iters": 1,
            "weight_decay": 0.01,
            "clip_grad": 1.0,
            "seq_length": 512 if family == "llava" else 256,
            "loss_type": "per_token_loss",
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return path
