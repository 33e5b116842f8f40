"""The split of an ``mp_rank`` directory as its own folders and names tell it, for directories without a manifest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tangram.checkpoints.rank_file import load_rank_file
from tangram.errors import CheckpointError

RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3}))?(?:_(\d{3}))?")
_LAYER = re.compile(r"(image_encoder|text_decoder)\..*?layers\.(\d+)\.")
_EMBEDDING = "text_decoder.embedding.word_embeddings.weight"


@dataclass(frozen=True)
class FoundSplit:
    """What the files say."""

    tensor: int
    pipeline: int
    vit_pp_layers: list[list[int]]
    llm_pp_layers: list[list[int]]
    padded_vocab: int | None
    """Rows of the word embedding over all tensor-parallel ranks; None where no file holds it."""

    def __str__(self) -> str:
        return f"tp_size {self.tensor}, vit_pp_layers {self.vit_pp_layers}, llm_pp_layers {self.llm_pp_layers}"


def find_split(folder: Path) -> FoundSplit:
    """Count ranks by their folders, and layers by the numbers in the names of their parameters.

    Args:
        folder: the one that holds ``mp_rank_*``.

    Raises:
        CheckpointError: a file cannot be read, folders are missing between others, ranks hold different numbers of virtual stages, or the
            model has experts, whose folders do not tell stages from expert-parallel ranks.
    """
    matches = [m for m in (RANK_FOLDER.fullmatch(entry.name) for entry in sorted(folder.glob("mp_rank_*"))) if m]
    ranks = {(int(m[1]), int(m[2] or 0)): m[0] for m in matches if m[3] is None}
    tensor, pipeline = (1 + max((rank[axis] for rank in ranks), default=0) for axis in (0, 1))
    if len(ranks) != tensor * pipeline or len(matches) != len(ranks):
        raise CheckpointError(f"{folder}: {len(matches)} folders mp_rank_* are not those of {tensor} x {pipeline} ranks; give the split")
    stages = [chunks_of(load_rank_file(folder / ranks[0, stage] / "model_optim_rng.pt")) for stage in range(pipeline)]
    if len({len(stage) for stage in stages}) != 1:
        raise CheckpointError(f"{folder}: stages hold {[len(stage) for stage in stages]} model chunks; they must hold equally many, convert again")
    if any(".local_experts." in name for stage in stages for chunk in stage for name in chunk):
        raise CheckpointError(f"{folder}: holds experts, and its folders do not tell pipeline stages from expert-parallel ranks; give the split")
    embeddings = [chunk[_EMBEDDING].shape[0] for stage in stages for chunk in stage if _EMBEDDING in chunk]
    return FoundSplit(
        tensor=tensor,
        pipeline=pipeline,
        vit_pp_layers=[[_layers(stage[virtual], "image_encoder") for stage in stages] for virtual in range(len(stages[0]))],
        llm_pp_layers=[[_layers(stage[virtual], "text_decoder") for stage in stages] for virtual in range(len(stages[0]))],
        padded_vocab=embeddings[0] * tensor if embeddings else None,
    )


def chunks_of(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The model chunks of a rank's file, by virtual stage."""
    names = sorted((key for key in state if re.fullmatch(r"model\d*", key)), key=lambda key: int(key[5:] or 0))
    return [state[name] for name in names]


def _layers(chunk: Mapping[str, Any], component: str) -> int:
    numbers = [int(m[2]) for m in map(_LAYER.match, chunk) if m and m[1] == component]
    return 1 + max(numbers, default=-1)
