"""Models of odd sizes, batches of odd rows and splits drawn at random, all from a seed, for comparison with transformers.

    python -m tests.align.odd FIRST_SEED COUNT

compares one model after another, each at many splits, and prints those that differ.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tangram.align.batch import IGNORE, write_batch
from tangram.align.reference import no_progress_bars
from tangram.align.run import Outcome, align, open_subject
from tangram.align.task import Split
from tangram.config.model import ModelConfig
from tangram.families.llava.tiny import hf_config as llava_config
from tangram.families.qwen2_5_vl.tiny import vision_config as windowed_tower
from tangram.families.qwen2_vl.tiny import hf_config as qwen2_config
from tangram.families.qwen2_vl.tiny import vision_config as plain_tower
from tangram.families.qwen3_vl.tiny import hf_config as qwen3_config
from tangram.families.tiny import TinySpec, model_files
from tests.align.matrix import refusal

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "llava")
Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Model:
    """A config.json, and what it takes to write random weights for it."""

    family: str
    config: dict[str, Any]
    stacks: dict[str, tuple[int, ...]]

    def write(self, folder: Path, seed: int = 0) -> Path:
        spec = TinySpec(vocab=self.config["text_config"]["vocab_size"], weight_std=0.15)
        with no_progress_bars(), model_files(folder, self.config, {}, {}, seed, spec, False, stacks=self.stacks):
            return folder


def _layers(dice: random.Random) -> int:
    return dice.choice((1, 2, 2, 3, 4, 5))


def _three_parts(dice: random.Random, total: int) -> list[int]:
    first, second = sorted(dice.sample(range(1, total), 2))
    return [first, second - first, total - second]


def draw_model(dice: random.Random, family: str) -> Model:
    """Sizes that no published model has: odd widths, few heads, one layer, other bases, sections, windows, tables."""
    heads, width = dice.choice(((4, 2), (4, 4), (8, 4), (8, 8), (4, 2), (6, 2), (6, 3), (3, 1), (4, 1))), dice.choice((6, 8, 10, 12))
    if family == "qwen3_vl_moe":
        width = dice.choice((8, 12))  # transformers' grouped product takes rows of a multiple of 16 bytes
    vision_heads, vision_width = dice.choice((1, 2, 3, 4, 4, 4)), dice.choice((4, 8, 12))
    tied = dice.random() < 0.5
    spec = TinySpec(
        hidden=heads[0] * width,
        ffn=dice.choice((36, 40, 48, 60, 36, 44, 33)),
        text_layers=_layers(dice),
        heads=heads[0],
        kv_heads=heads[1],
        vision_hidden=vision_heads * vision_width,
        vision_ffn=vision_heads * vision_width * dice.choice((1, 2, 3)),
        vision_layers=_layers(dice),
        vision_heads=vision_heads,
        vocab=dice.choice((64, 97, 130, 257, 515)),
    )
    if family == "llava":
        return Model(family, _llava(dice, spec, tied), {})
    if family == "qwen2_vl":
        config = qwen2_config(spec, tied, family, plain_tower(spec))
    elif family == "qwen2_5_vl":
        config = qwen2_config(spec, tied, family, windowed_tower(spec))
        _windows(dice, config["vision_config"])
    else:
        config = qwen3_config(spec, tied, family)
        _qwen3(dice, config, spec)
    vision, text = config["vision_config"], config["text_config"]
    vision |= {"patch_size": dice.choice((2, 3, 14)), "spatial_merge_size": dice.choice((1, 2, 2, 3)), "temporal_patch_size": dice.choice((1, 2, 3))}
    vision["in_channels"] = dice.choice((1, 3))
    if family == "qwen2_5_vl":
        vision["window_size"] = dice.choice((1, 2, 3, 4)) * vision["patch_size"] * vision["spatial_merge_size"] + dice.choice((0, 0, 1))
    text["rope_theta"] = dice.choice((100.0, 10000.0, 1e6))
    text["rms_norm_eps"] = dice.choice((1e-5, 1e-6))
    if family.startswith("qwen2"):
        text["rope_scaling"]["mrope_section"] = _three_parts(dice, width // 2)
    stacks: dict[str, tuple[int, ...]] = {}
    if family == "qwen3_vl_moe":
        stacks = _experts(dice, text)
    return Model(family, config, stacks)


def _windows(dice: random.Random, vision: dict[str, Any]) -> None:
    layers = range(vision["depth"])
    vision["fullatt_block_indexes"] = dice.choice(([], list(layers), [layers[-1]], [0]))
    vision["tokens_per_second"] = dice.choice((1, 2, 4))
    vision["intermediate_size"] = dice.choice((24, 34, 36, 60))


def _qwen3(dice: random.Random, config: dict[str, Any], spec: TinySpec) -> None:
    vision, text = config["vision_config"], config["text_config"]
    count = dice.randint(0, min(vision["depth"], text["num_hidden_layers"]))
    vision["deepstack_visual_indexes"] = sorted(dice.sample(range(vision["depth"]), count))
    vision["num_position_embeddings"] = dice.choice((1, 4, 9, 25, 64))
    vision["intermediate_size"] = dice.choice((24, 34, 36, 60))
    text["head_dim"] = dice.choice((6, 8, 12, spec.head_dim))
    text["rope_scaling"]["mrope_section"] = _three_parts(dice, text["head_dim"] // 2)


def _experts(dice: random.Random, text: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    experts, hidden = dice.choice((2, 3, 4, 4, 6, 8)), text["hidden_size"]
    width = dice.choice([size for size in (12, 20, 28, 36) if hidden not in (size, 2 * size)])
    text |= {
        "num_experts": experts,
        "num_experts_per_tok": dice.randint(2, min(4, experts)),
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return {"mlp.experts.gate_up_proj": (experts, hidden, 2 * width), "mlp.experts.down_proj": (experts, width, hidden)}


def _llava(dice: random.Random, spec: TinySpec, tied: bool) -> dict[str, Any]:
    config = llava_config(spec, tied)
    vision, text = config["vision_config"], config["text_config"]
    side, patch = dice.choice(((4, 2), (6, 3), (3, 3), (10, 2)))
    vision |= {"image_size": side, "patch_size": patch, "num_channels": dice.choice((1, 3)), "hidden_act": dice.choice(("quick_gelu", "gelu"))}
    vision["intermediate_size"] = dice.choice((24, 34, 36, 60))
    vision["hidden_size"] = vision["num_attention_heads"] * dice.choice((5, 8, 6))
    config["image_seq_length"] = (side // patch) ** 2
    depth = vision["num_hidden_layers"]
    config["vision_feature_layer"] = dice.choice((-1, -2, depth, 1, -depth, -depth - 1))
    config["projector_hidden_act"] = dice.choice(("gelu", "quick_gelu"))
    config["multimodal_projector_bias"] = dice.random() < 0.7
    text["head_dim"] = dice.choice((6, 8, 12, spec.head_dim))
    text["rope_theta"] = dice.choice((100.0, 10000.0))
    return config


PIECES = ("image", "image", "words", "words", "video", "images", "one word")


def draw_batch(dice: random.Random, family: str, model: ModelConfig) -> dict[str, torch.Tensor]:
    """Rows that begin and end with pictures, pictures side by side, of one token or very wide, videos of one step and more, text alone, rows
    of one token, rows without a label, padding on either side."""
    generator = torch.Generator().manual_seed(dice.randrange(2**31))
    assert model.image_encoder is not None
    vision = model.image_encoder.vision_encoder
    special = {model.img_context_token_id, model.video_token_id, model.vision_start_token_id}
    ordinary = [token for token in range(model.text_decoder.vocab_size) if token not in special]
    media: dict[str, list[Grid]] = {"image": [], "video": []}
    text_alone = dice.random() < 0.15
    rows = []
    for _ in range(dice.choice((2, 3, 4, 6))):
        row: list[int] = []
        for kind in dice.choices(("words", "one word") if text_alone else PIECES, k=dice.choice((1, 2, 3, 4))):
            row += _piece(dice, kind, model, vision, ordinary, media)
        rows.append(row)
    columns, left = max(map(len, rows)), dice.random() < 0.3
    batch = {name: torch.zeros(len(rows), columns, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    batch["labels"] = torch.full((len(rows), columns), IGNORE)
    for number, row in enumerate(rows):
        start = columns - len(row) if left else 0
        batch["input_ids"][number, start : start + len(row)] = torch.tensor(row)
        batch["attention_mask"][number, start : start + len(row)] = 1
        share = dice.choice((0.0, 0.3, 1.0))
        for place in range(1, len(row)):
            if dice.random() < share and row[place] not in special:
                batch["labels"][number, start + place] = row[place]
    if not bool((batch["labels"][:, 1:] != IGNORE).any()):
        longest = max(range(len(rows)), key=lambda number: len(rows[number]))
        end = columns - 1 if left else len(rows[longest]) - 1
        batch["labels"][longest, end] = ordinary[0]
    for kind, pixels, grids in (("image", "pixel_values", "image_grid_thw"), ("video", "pixel_values_videos", "video_grid_thw")):
        if media[kind]:
            batch[grids] = torch.tensor(media[kind])
            batch[pixels] = torch.randn(int(batch[grids].prod(dim=1).sum()), vision.patch_width, generator=generator)
    if media["video"] and family == "qwen2_5_vl":
        batch["second_per_grid_ts"] = torch.tensor([dice.choice((0.5, 1.0, 2.0)) for _ in media["video"]])
    if family != "llava":
        # Any positions will do where both sides get the same; ours break off where transformers' versions differ.
        batch["position_ids"] = _positions(dice, batch["attention_mask"])
    return batch


def _positions(dice: random.Random, mask: torch.Tensor) -> torch.Tensor:
    plain = (mask.cumsum(dim=1) - 1).clamp(min=0)
    return torch.stack([plain, plain // dice.choice((1, 2, 3)), plain % dice.choice((3, 5, 50))])


def _piece(dice: random.Random, kind: str, model: ModelConfig, vision: Any, ordinary: Sequence[int], media: dict[str, list[Grid]]) -> list[int]:
    if kind == "video" and model.video_token_id is None:
        kind = "image"
    if kind in ("words", "one word"):
        return [dice.choice(ordinary) for _ in range(1 if kind == "one word" else dice.randint(2, 12))]
    row: list[int] = []
    for _ in range(2 if kind == "images" else 1):
        side = vision.spatial_merge_size
        shape = dice.choice(((1, 1), (1, 9), (5, 1), (2, 3), (3, 3), (4, 2)))
        steps = dice.choice((1, 2, 3)) if kind == "video" else 1
        grid = vision.picture_grid or (steps, side * shape[0], side * shape[1])
        if kind == "video":
            # One placeholder run per video: positions are given.
            media["video"].append(grid)
            row += [model.video_token_id or 0] * vision.tokens(grid)
        else:
            media["image"].append(grid)
            row += [model.img_context_token_id] * vision.tokens(grid)
    return row


def _cut(dice: random.Random, layers: int, stages: Sequence[int], count: int, at_least: int) -> list[int] | None:
    """``layers`` over ``stages`` (positions) of ``count``."""
    if layers < at_least * len(stages):
        return None
    held = [0] * count
    for stage in stages:
        held[stage] = at_least
    for _ in range(layers - at_least * len(stages)):
        held[dice.choice(list(stages))] += 1
    return held


def draw_split(dice: random.Random, model: ModelConfig, most: int = 4) -> Split:
    """A split over at most ``most`` processes, which the model may or may not allow."""
    while True:
        tensor, context, pipeline = (dice.choice((1, 1, 2, 2, 3, 4)) for _ in range(3))
        data = dice.choice((1, 1, 1, 1, 2, 4))
        if 1 < tensor * context * pipeline * data <= most:
            break
    virtual = dice.choice((1, 2, 3)) if pipeline > 1 else 1
    stages = pipeline * virtual
    assert model.image_encoder is not None
    vision_layers, text_layers = model.image_encoder.vision_encoder.num_layers, model.text_decoder.num_layers
    vision = text = None
    if stages > 1:
        for _ in range(40):
            border = dice.randrange(stages)
            shared = dice.random() < 0.6
            with_vision = range(border + 1)
            with_text = range(border if shared else border + 1, stages)
            vision = _cut(dice, vision_layers, list(with_vision)[-dice.choice((1, 2, 3, 4)) :], stages, 1)
            text = _cut(dice, text_layers, with_text, stages, 1) if with_text else None
            if vision and text and all(a or b for a, b in zip(vision, text, strict=True)):
                break
            vision = text = None
        if vision is None or text is None:
            return draw_split(dice, model, most)

    def rows(flat: list[int] | None) -> Any:
        if flat is None:
            return None
        return flat if virtual == 1 else [flat[row * pipeline : (row + 1) * pipeline] for row in range(virtual)]

    experts = getattr(model.text_decoder, "num_moe_experts", 0)
    algorithm = "hybrid" if context == 4 and dice.random() < 0.5 else dice.choice(("ulysses", "ring"))
    settings: dict[str, Any] = {
        "tensor": tensor,
        "vision_tensor": dice.choice((None, None, 1, 2)) if tensor > 1 else None,
        "sequence_parallel": tensor > 1 and (dice.random() < 0.6 or bool(experts)),
        "pipeline": pipeline,
        "virtual": virtual,
        "context": context,
        "context_algo": algorithm if context > 1 else "ulysses",
        "ulysses": 2 if context > 1 and algorithm == "hybrid" else None,
        "data": data,
        "expert": dice.choice((1, 2, 3, 4)) if experts and data * context > 1 else 1,
        "dispatcher": dice.choice((None, "allgather")) if experts else None,
        "vit_pp_layers": rows(vision),
        "llm_pp_layers": rows(text),
        "distributed_optimizer": dice.random() < 0.5,
        "balance": data > 1 and dice.random() < 0.5,
    }
    return Split(**settings)


@dataclass(frozen=True)
class Drawn:
    """A model, a batch and splits that ``tangram check`` accepts.

    Args:
        refused: by split, what it says against others that were drawn.
    """

    hf: Path
    batch: Path
    splits: tuple[Split, ...]
    refused: Mapping[str, str]
    micro_batch_size: int
    pack: bool

    def compare(self) -> list[Outcome]:
        return align(self.hf, self.splits, batch_file=self.batch, micro_batch_size=self.micro_batch_size, pack=self.pack)


def draw(seed: int, family: str, folder: Path, *, splits: int, most: int = 4) -> Drawn:
    """One process and ``splits`` - 1 others of at most ``most`` processes, fewer where too many are refused."""
    dice = random.Random(f"{seed} {family}")
    hf = draw_model(dice, family).write(folder / "hf")
    subject = open_subject(hf, folder / "work")
    file = write_batch(draw_batch(dice, family, subject.model), folder)
    chosen, refused = {str(Split()): Split()}, {}
    for _ in range(40 * splits):
        if len(chosen) == splits:
            break
        split = draw_split(dice, subject.model, most)
        why = refusal(subject, split, folder)
        if why is None:
            chosen[str(split)] = split
        else:
            refused[str(split)] = why
    return Drawn(hf, file, tuple(chosen.values()), refused, dice.choice((1, 2, 3)), dice.random() < 0.7)


def main(first: int, count: int, families: Sequence[str] = FAMILIES, splits: int = 10, most: int = 4) -> None:
    tally: Counter[str] = Counter()
    for seed in range(first, first + count):
        for family in families:
            folder = Path(tempfile.mkdtemp(prefix="odd-"))
            try:
                drawn = draw(seed, family, folder, splits=splits, most=most)
                outcomes = drawn.compare()
            except Exception as error:
                tally["broke"] += 1
                print(f"BROKE seed {seed} {family} {folder}: {type(error).__name__}: {error}", flush=True)
                continue
            for outcome in outcomes:
                tally["passed" if outcome.report.passed else "failed"] += 1
                if not outcome.report.passed:
                    print(f"FAILED seed {seed} {family} {folder} {outcome.split}: {outcome.report.failures}", flush=True)
            tally["refused"] += len(drawn.refused)
            print(f"seed {seed} {family}: {len(outcomes)} compared, {len(drawn.refused)} refused", flush=True)
            for split, why in drawn.refused.items():
                print(f"   refused {split}: {why[:230]}", flush=True)
    print(dict(tally))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), tuple(sys.argv[3].split(",")) if len(sys.argv) > 3 else FAMILIES, *map(int, sys.argv[4:]))
