"""Where this rank's shards lie in canonical tensors.

``fully_shard`` cuts a parameter into rows, and the names of a Hugging Face model are canonical, so a shard is one block. With that,
loading, initialisation, checkpoints and alignment see this backend as they see the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tangram.config.model import ModelConfig
from tangram.families import get_family
from tangram.placement.blocks import Block, LocalTensor, Placement
from tangram.placement.table import Component, Init, Replicated, Rule, Shape, Source
from tangram.placement.topology import Topology


def local_value(parameter: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a parameter or gradient, sharing its memory."""
    held = parameter.detach()
    return held.to_local() if isinstance(held, DTensor) else held


def local_start(parameter: torch.Tensor) -> Shape:
    """Where in the whole parameter this rank's part begins."""
    if not isinstance(parameter, DTensor):
        return (0,) * parameter.dim()
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(offset)


def place_shards(model: nn.Module, topology: Topology, described: ModelConfig | None) -> Placement:
    """The placement of this rank's shards. A parameter of which it holds no row is left out.

    Args:
        described: says how fresh weights are drawn; None: they are not.
    """
    inits = _inits(described)
    tensors: dict[str, LocalTensor] = {}
    for name, parameter in model.named_parameters():
        held, full = local_value(parameter), tuple(parameter.shape)
        if held.numel() == 0:
            continue
        init, component = inits.get(name, ("normal", "text"))
        source = Source(name, full)
        rule = Rule(name, (source,), Replicated(), component, "first", init)
        block = Block(name, (0,) * held.dim(), name, local_start(parameter), tuple(held.shape))
        tensors[name] = LocalTensor(name, tuple(held.shape), (block,), rule, (source,))
    return Placement(topology.order[0], 0, tensors)


def whole_shapes(model: nn.Module) -> dict[str, Shape]:
    """Name and shape of every parameter, tied copies left out."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _inits(described: ModelConfig | None) -> Mapping[str, tuple[Init, Component]]:
    if described is None:
        return {}
    table: Sequence[Rule] = get_family(described.model_id).tensor_table(described, described.text_decoder.vocab_size)
    layers = {"text": described.text_decoder.num_layers}
    if described.image_encoder is not None:
        layers["vision"] = described.image_encoder.vision_encoder.num_layers
    return {
        source.name.format(i=i): (rule.init, rule.component)
        for rule in table
        for i in range(layers.get(rule.component, 0) if rule.layers is None else len(rule.layers))
        for source in rule.sources
    }
