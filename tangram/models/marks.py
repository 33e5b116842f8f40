"""Marks that megatron-core reads on parameters, set from the placement so that they cannot disagree with it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from tangram.errors import PlacementError
from tangram.placement.blocks import Placement, check_names
from tangram.placement.table import Replicated
from tangram.placement.topology import Topology


def mark_parallel(parameters: Mapping[str, nn.Parameter], placement: Placement, topology: Topology) -> None:
    """Tell core which parameters are split over tensor-parallel ranks and which are copies, and which data-parallel ranks hold the same.

    Core counts a parameter in the gradient norm on every rank where ``tensor_model_parallel`` is set and else on the first only, and
    leaves out what is ``shared``. Gradients without ``allreduce`` it sums over the ranks with the same experts alone, those of
    ``sequence_parallel`` over all tensor-parallel ranks: a layer's copies, which each see a part of the sequence, or some heads.

    Raises:
        PlacementError: the chunk's parameters are not those of the table, by name or shape.
    """
    check_names(list(parameters), list(placement.tensors), f"model chunk {placement.chunk.position}")
    for name, tensor in placement.tensors.items():
        parameter = parameters[name]
        if tuple(parameter.shape) != tensor.shape:
            raise PlacementError(f"{name}: the model built {tuple(parameter.shape)}, the tensor table says {tensor.shape}")
        split = not isinstance(tensor.rule.layout, Replicated)
        # Of several copies of the vision encoder the first counts.
        parameter.tensor_model_parallel = split and placement.tp_rank < topology.tensor_of(tensor.rule.component)  # type: ignore[attr-defined]
        parameter.partition_dim = tensor.rule.layout.axis  # type: ignore[attr-defined]
        parameter.partition_stride = 1  # type: ignore[attr-defined]
        parameter.allreduce = not (topology.expert > 1 and tensor.rule.place == "expert")  # type: ignore[attr-defined]
        if topology.divides_sequence(tensor.rule.component) and tensor.rule.place == "layer" and not split:
            parameter.sequence_parallel = True  # type: ignore[attr-defined]
        if tensor.rule.tied:
            parameter.shared = True  # type: ignore[attr-defined]
            parameter.shared_embedding = True  # type: ignore[attr-defined]
