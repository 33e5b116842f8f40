"""Where this rank's shards lie in canonical tensors.

``fully_shard`` cuts a parameter into rows, and a Hugging Face model's parameter is a canonical tensor, so a shard is one block. With that, loading,
initialisation, checkpoints and alignment see this backend as they see the other. The names are those of the installed transformers, which for LLaVA's
tower are other ones before 5.0; stacked experts may be held the other way round than canonical tensors are (see ``expert_weights``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tangram.backends.fsdp2.expert_weights import check_stack, holds_out_in
from tangram.checkpoints.expert_stacks import turned
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


def holders(parameter: torch.Tensor) -> list[int]:
    """The ranks that hold the same part of a parameter as this one."""
    if not isinstance(parameter, DTensor):
        return list(range(dist.get_world_size()))
    mesh, own = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    assert own is not None
    part = tuple(own[axis] if isinstance(placement, Shard) else slice(None) for axis, placement in enumerate(parameter.placements))
    return sorted(mesh.mesh[part].flatten().tolist())


def place_shards(model: nn.Module, topology: Topology, described: ModelConfig | None) -> Placement:
    """The placement of this rank's shards. A parameter of which it holds no row is left out.

    Args:
        described: says how fresh weights are drawn, and which tensors are stacked experts; None: they are not drawn, and there are none.

    Raises:
        PlacementError: as ``whole_tensors``.
    """
    known, whole = _known(described), whole_tensors(model, described)
    tensors: dict[str, LocalTensor] = {}
    for name, parameter in model.named_parameters():
        held, start = local_value(parameter), local_start(parameter)
        if held.numel() == 0:
            continue
        source = whole[name]
        init, component = (known[source.name].init, known[source.name].component) if source.name in known else ("normal", "text")
        rule = Rule(name, (source,), Replicated(), component, "first", init)
        block = Block(name, (0,) * held.dim(), source.name, turned(start) if source.stacked else start, tuple(held.shape), source.stacked)
        tensors[name] = LocalTensor(name, tuple(held.shape), (block,), rule, (source,))
    return Placement(topology.order[0], 0, tensors)


def whole_tensors(model: nn.Module, described: ModelConfig | None) -> dict[str, Source]:
    """The canonical tensor of every parameter by its name in the model, tied copies left out; ``stacked`` where the model holds it the other way
    round.

    Raises:
        PlacementError: a stack of experts is not as its class and its config say.
    """
    known = _known(described)
    found: dict[str, Source] = {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        canonical = canonical_name(name, described)
        stacked = known[canonical].stacked_shape if canonical in known else None
        if stacked is not None:
            out_in = holds_out_in(model.get_submodule(name.rpartition(".")[0]))
            check_stack(name, shape, stacked, out_in)
            found[name] = Source(canonical, stacked, stacked=out_in)
        else:
            found[name] = Source(canonical, shape)
    return found


def canonical_name(name: str, described: ModelConfig | None) -> str:
    """That of a parameter; of a model of no family its own."""
    return name if described is None else get_family(described.model_id).canonical_name(name)


def whole_shapes(model: nn.Module, described: ModelConfig | None) -> dict[str, Shape]:
    """Name and shape of the canonical tensor of every parameter, tied copies left out.

    Raises:
        PlacementError: as ``whole_tensors``.
    """
    return {source.name: source.shape for source in whole_tensors(model, described).values()}


@dataclass(frozen=True)
class _Known:
    """What a family's table says of a canonical tensor."""

    init: Init
    component: Component
    stacked_shape: Shape | None
    """``[experts, in, out]`` of stacked experts; None: it is none."""


def _known(described: ModelConfig | None) -> Mapping[str, _Known]:
    if described is None:
        return {}
    table: Sequence[Rule] = get_family(described.model_id).tensor_table(described, described.text_decoder.vocab_size)
    layers = {"text": described.text_decoder.num_layers}
    if described.image_encoder is not None:
        layers["vision"] = described.image_encoder.vision_encoder.num_layers
    return {
        source.name.format(i=i): _Known(rule.init, rule.component, source.shape if source.stacked else None)
        for rule in table
        for i in range(layers.get(rule.component, 0) if rule.layers is None else len(rule.layers))
        for source in rule.sources
    }
