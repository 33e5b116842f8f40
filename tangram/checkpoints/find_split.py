"""The split of an ``mp_rank`` directory as its own folders and names tell it, for directories without a manifest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tangram.checkpoints.options import ParallelOptions
from tangram.checkpoints.rank_file import MODEL_KEY, load_rank_file
from tangram.errors import CheckpointError

RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3}))?(?:_(\d{3}))?")
_LAYER = re.compile(r"(image_encoder|text_decoder)\..*?layers\.(\d+)\.")
_UNFUSED = re.compile(r".*\.(q_proj|gate_proj)\.")
_EMBEDDING = "text_decoder.embedding.word_embeddings.weight"

Chunks = list[Mapping[str, Any]]
"""Tensors of one rank's model chunks, by virtual stage."""


@dataclass(frozen=True)
class FoundSplit:
    """What the files say."""

    tensor: int
    expert: int
    vit_pp_layers: list[list[int]]
    llm_pp_layers: list[list[int]]
    padded_vocab: int | None
    """Rows of the word embedding over all tensor-parallel ranks; None where no file holds it."""
    canonical_form: bool
    """Parameters are not fused."""
    vit_only: bool
    """There is no text decoder."""

    def __str__(self) -> str:
        expert = f", ep_size {self.expert}" if self.expert > 1 else ""
        return f"tp_size {self.tensor}{expert}, vit_pp_layers {self.vit_pp_layers}, llm_pp_layers {self.llm_pp_layers}"

    def options(self, text_layers: int) -> ParallelOptions:
        """The split as options.

        Args:
            text_layers: of the model; those of a directory without a text decoder count as on its last stage.
        """
        llm = [list(row) for row in self.llm_pp_layers]
        if self.vit_only:
            llm[-1][-1] = text_layers
        return ParallelOptions.model_validate(
            {"tp_size": self.tensor, "ep_size": self.expert, "vit_pp_layers": self.vit_pp_layers, "llm_pp_layers": llm}
        )


def find_split(folder: Path) -> FoundSplit:
    """Count ranks by their folders, and layers by the numbers in the names of their parameters.

    A vision encoder with a tensor-parallel size of its own is not told by names.

    Args:
        folder: the one that holds ``mp_rank_*``.

    Raises:
        CheckpointError: a file cannot be read, folders are missing between others, or ranks hold different numbers of virtual stages.
    """
    ranks = {tuple(int(part) for part in m.groups() if part): m[0] for m in map(RANK_FOLDER.fullmatch, _names(folder)) if m}
    sizes = [1 + max(rank[axis] for rank in ranks) for axis in range(len(min(ranks, default=())))]
    expected = 1
    for size in sizes:
        expected *= size
    if not sizes or len(ranks) != expected or len({len(rank) for rank in ranks}) > 1:
        raise CheckpointError(f"{folder}: {len(ranks)} folders mp_rank_* are not those of {' x '.join(map(str, sizes))} ranks; give the split")
    files = {rank[1:]: chunks_of(load_rank_file(folder / name / "model_optim_rng.pt")) for rank, name in sorted(ranks.items()) if rank[0] == 0}
    pipeline, expert = _stages_and_experts(sizes[1:], files)
    stages = [next(chunks for rank, chunks in files.items() if pipeline == 1 or rank[0] == stage) for stage in range(pipeline)]
    if len({len(stage) for stage in stages}) != 1:
        raise CheckpointError(f"{folder}: stages hold {[len(stage) for stage in stages]} model chunks; they must hold equally many, convert again")
    names = [name for stage in stages for chunk in stage for name in chunk]
    embeddings = [chunk[_EMBEDDING].shape[0] for stage in stages for chunk in stage if _EMBEDDING in chunk]
    return FoundSplit(
        tensor=sizes[0],
        expert=expert,
        vit_pp_layers=[[_layers(stage[virtual], "image_encoder") for stage in stages] for virtual in range(len(stages[0]))],
        llm_pp_layers=[[_layers(stage[virtual], "text_decoder") for stage in stages] for virtual in range(len(stages[0]))],
        padded_vocab=embeddings[0] * sizes[0] if embeddings else None,
        canonical_form=any(map(_UNFUSED.match, names)),
        vit_only=not any(name.startswith("text_decoder.") for name in names),
    )


def _names(folder: Path) -> list[str]:
    return [entry.name for entry in folder.glob("mp_rank_*")]


def _stages_and_experts(sizes: list[int], files: Mapping[tuple[int, ...], Chunks]) -> tuple[int, int]:
    """Pipeline and expert-parallel size. A single number after the tensor rank counts experts where every folder holds the embedding."""
    if len(sizes) == 2:
        return sizes[0], sizes[1]
    if not sizes:
        return 1, 1
    all_hold_it = all(any(_EMBEDDING in chunk for chunk in chunks) for chunks in files.values())
    return (1, sizes[0]) if all_hold_it and sizes[0] > 1 else (sizes[0], 1)


def chunks_of(state: Mapping[str, Any]) -> Chunks:
    """The model chunks of a rank's file."""
    names = sorted(filter(MODEL_KEY.fullmatch, state), key=lambda key: int(key[5:] or 0))
    return [state[name] for name in names]


def _layers(chunk: Mapping[str, Any], component: str) -> int:
    numbers = [int(m[2]) for m in map(_LAYER.match, chunk) if m and m[1] == component]
    return 1 + max(numbers, default=-1)
