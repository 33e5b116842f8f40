"""Where the tokens of images and videos stand in the text, and how rows come there: the projector's output, and DeepStack features."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup

from tangram.models.sequence import SequenceSplit


def media_places(input_ids: Tensor, kinds: Sequence[int | None]) -> Tensor:
    """Places of media tokens in the hidden states: [n], each ``position * b + row``, an index into their first two axes made one.

    Args:
        input_ids: [b, s].
        kinds: placeholder ids, in the order in which the vision encoder takes their media: the places of all images come first, then those
            of all videos, each row after row. None: the model has no such kind.
    """
    places = []
    for token in kinds:
        if token is not None:
            rows, positions = (input_ids == token).nonzero(as_tuple=True)
            places.append(positions * input_ids.shape[0] + rows)
    return torch.cat(places)


def own_rows(
    features: Sequence[Tensor], places: Tensor | None, batch: int, split: SequenceSplit, tp_group: ProcessGroup
) -> tuple[list[Tensor], Tensor | None]:
    """Of each feature [n, h] the rows that stand among this rank's tokens, and where they stand there.

    Args:
        places: [n], in the whole hidden states [s, batch, h]; None: there are no features.
    """
    if places is None or split.context == split.tensor == 1:
        return list(features), places
    here, local = split.local_of(places // batch)
    kept = here.nonzero()[:, 0]
    if split.tensor > 1:
        # All tensor-parallel ranks have all rows, and each finds the gradient of its own.
        features = [copy_to_tensor_model_parallel_region(rows, group=tp_group) for rows in features]
    return [rows[kept] for rows in features], local * batch + places[kept] % batch


def put_rows(hidden: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """``hidden`` [s, b, h] with ``rows`` [n, h] in ``places`` [n].

    Rows past the last place, those of a blank cell, go nowhere, and their gradient is exactly zero.
    """
    return hidden.flatten(0, 1).index_copy(0, places, rows[: len(places)].to(hidden.dtype)).view_as(hidden)


def add_rows(hidden: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """``hidden`` [s, b, h] with ``rows`` [n, h] added in ``places`` [n]; rows past the last place as in ``put_rows``."""
    return hidden.flatten(0, 1).index_add(0, places, rows[: len(places)].to(hidden.dtype)).view_as(hidden)
