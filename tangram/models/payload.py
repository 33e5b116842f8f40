"""What a chunk of the pipeline hands to the next: hidden states, and the DeepStack features that layers further on still need.

Several tensors travel as one flat tensor, one alone as itself. Their shapes are never sent: both sides compute them from the micro-batch.

Source: Meng et al. 2024 (DeepStack).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from tangram.config.model import ModelConfig
from tangram.models.context import installed
from tangram.models.media_share import MediaShare
from tangram.models.sequence import SequenceSplit
from tangram.models.vision_groups import installed_copies
from tangram.placement.table import Component
from tangram.placement.topology import Chunk, Topology

Shape = tuple[int, ...]


def pending_features(model: ModelConfig, chunk: Chunk) -> int:
    """DeepStack features that have been made when a micro-batch leaves ``chunk`` and are still to be added in a later one.

    Feature k is added after text layer k, so text layers take them in the order in which the vision encoder makes them.
    """
    if model.image_encoder is None:
        return 0
    made = sum(block < chunk.vision.stop for block in model.image_encoder.vision_encoder.deepstack_layers)
    return max(0, made - chunk.text.stop)


def activation_shapes(topology: Topology, model: ModelConfig, position: int, batch: Mapping[str, Tensor | None]) -> tuple[Shape, ...]:
    """Shapes of what the chunk at ``position`` hands to the next chunk for one micro-batch.

    First the hidden states: text [s, b, h_text] once the text decoder has begun, tokens of images and videos [n, 1, h_text] after the
    projector, [places, 1, h_vision] inside the vision encoder, whose section says how many there are. Then each pending feature, [n, h_text].
    Without images and videos the vision path carries a blank picture.

    Inside the vision encoder context-parallel ranks, and copies of it, have whole pictures and videos of their own, and a rank without any a
    blank picture. Text
    hidden states are each context-parallel rank's part of them, and with sequence parallelism they and patches are each
    tensor-parallel rank's.

    Args:
        batch: at least ``input_ids`` [b, s] and, where the micro-batch has some, ``image_grid_thw`` and ``video_grid_thw``.
    """
    chunk, width = topology.order[position], model.text_decoder.hidden_size
    encoder = model.image_encoder.vision_encoder if model.image_encoder is not None else None
    given = [thw.tolist() for name in ("image_grid_thw", "video_grid_thw") if (thw := batch.get(name)) is not None]
    grids = [(t, h, w) for thw in given for t, h, w in thw]
    tokens = sum(map(encoder.tokens, grids or [encoder.blank_grid])) if encoder is not None else 0
    hidden: Shape
    if chunk.has_text:
        input_ids = batch["input_ids"]
        assert input_ids is not None
        rows, length = input_ids.shape
        split = SequenceSplit(length, context=topology.context, ring=topology.ring, tensor=_divided(topology, "text"))
        hidden = (split.local_length, rows, width)
    elif chunk.vision_last:
        hidden = (tokens, 1, width)
    else:
        assert encoder is not None
        own = MediaShare(encoder, grids, installed(topology.context), installed_copies(topology)).own_grids
        split = SequenceSplit(sum(map(encoder.places, own)), tensor=_divided(topology, "vision"), unit=encoder.places_together)
        hidden = (split.local_length, 1, encoder.hidden_size)
    return (hidden, *[(tokens, width)] * pending_features(model, chunk))


def _divided(topology: Topology, component: Component) -> int:
    """Ranks over which a component's activations are divided along the sequence, context-parallel ones aside."""
    return topology.tensor_of(component) if topology.sequence_parallel else 1


def payload_shape(shapes: Sequence[Shape]) -> Shape:
    """Shape of the tensor that ``pack`` makes of tensors of these shapes."""
    return shapes[0] if len(shapes) == 1 else (sum(map(prod, shapes)),)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor that holds all, which must be of one dtype; gradients flow back to each."""
    return tensors[0] if len(tensors) == 1 else torch.cat([tensor.flatten() for tensor in tensors])


def unpack(payload: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """The tensors of which ``pack`` made ``payload``, as views."""
    if len(shapes) == 1:
        return [payload]
    parts = payload.split([prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
