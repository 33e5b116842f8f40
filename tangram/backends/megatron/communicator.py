"""Pipeline communication whose shapes are known beforehand on both sides, so that none is ever sent.

megatron-core exchanges shapes before every tensor when lengths vary, and puts both directions on one connection, where a pipeline of two
ranks with virtual stages (the next and the previous rank are the same peer) mixes them up. Here the shape of every receive follows from
the schedule's order and the micro-batch, which every rank reads; activations and gradients travel over groups of their own, in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from torch import Tensor

from tangram.backends.engine import Batch
from tangram.backends.megatron.parallel import ParallelRanks
from tangram.config.model import ModelConfig
from tangram.models.payload import Shape, activation_shapes, payload_shape
from tangram.placement.topology import Topology


def forward_receives(topology: Topology, pp_rank: int, micro_batches: int) -> Iterator[tuple[int, int]]:
    """The activations that a pipeline rank receives in a step, in order: (position of the chunk that made it, micro-batch)."""
    stages = topology.pipeline
    for micro_batch, virtual in get_schedule_table(micro_batches, topology.virtual, stages):
        if pp_rank > 0:
            yield virtual * stages + pp_rank - 1, micro_batch
        elif virtual < topology.virtual - 1:
            yield virtual * stages + stages - 1, micro_batch


def backward_receives(topology: Topology, pp_rank: int, micro_batches: int) -> Iterator[tuple[int, int]]:
    """The gradients that a pipeline rank receives in a step, in order: (position of the chunk whose output's it is, micro-batch)."""
    stages = topology.pipeline
    for micro_batch, turn in get_schedule_table(micro_batches, topology.virtual, stages):
        virtual = topology.virtual - 1 - turn
        if pp_rank < stages - 1:
            yield virtual * stages + pp_rank, micro_batch
        elif virtual > 0:
            yield virtual * stages - 1, micro_batch


class PipelineCommunicator(P2PCommunicator):
    """Sends and receives between neighbouring stages, for megatron-core's 1F1B and interleaved schedules.

    Call ``begin`` before a schedule runs and ``finish`` after it. ``tensor_shape`` arguments of the schedules are not used.
    """

    def __init__(self, ranks: ParallelRanks, config: ModelParallelConfig, topology: Topology, model: ModelConfig) -> None:
        super().__init__(ranks.pipeline_group, config)
        self._gradient_group = ranks.gradient_group
        self._device, self._stage = ranks.device, ranks.pipeline_parallel_rank
        self._topology, self._model = topology, model
        self._forward: Iterator[Shape] = iter(())
        self._backward: Iterator[Shape] = iter(())

    def begin(self, micro_batches: Sequence[Batch], forward_only: bool) -> None:
        """Lay out what this rank will receive in the coming step."""
        count = len(micro_batches)
        self._forward = self._shapes(forward_receives(self._topology, self._stage, count), micro_batches)
        self._backward = iter(()) if forward_only else self._shapes(backward_receives(self._topology, self._stage, count), micro_batches)

    def finish(self) -> None:
        """The schedule must have asked for everything that was laid out."""
        left = len(list(self._forward)), len(list(self._backward))
        assert left == (0, 0), f"stage {self._stage}: the schedule left {left} activations and gradients unreceived"

    def _shapes(self, receives: Iterator[tuple[int, int]], micro_batches: Sequence[Batch]) -> Iterator[Shape]:
        for position, number in receives:
            yield payload_shape(activation_shapes(self._topology, self._model, position, micro_batches[number]))

    def _communicate(
        self,
        *,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: object,
        wait_on_reqs: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, None]:
        """Move activations down the pipeline and gradients up it, whichever are given or asked for, and wait."""
        assert wait_on_reqs, "overlapped pipeline communication is not offered"
        for sent in (tensor_send_next, tensor_send_prev):
            expected = self.config.pipeline_dtype
            assert sent is None or sent.dtype == expected, f"stage {self._stage} sends {sent.dtype}, not {expected}"
        activation = self._buffer(next(self._forward)) if recv_prev else None
        gradient = self._buffer(next(self._backward)) if recv_next else None
        work = self._exchange(tensor_send_next, self.next_rank, activation, self.prev_rank, self.pp_group)
        work += self._exchange(tensor_send_prev, self.prev_rank, gradient, self.next_rank, self._gradient_group)
        for request in work:
            request.wait()
        if activation is not None:
            activation.requires_grad_()
        return activation, gradient, None

    def _buffer(self, shape: Shape) -> Tensor:
        return torch.empty(shape, dtype=self.config.pipeline_dtype, device=self._device)

    @staticmethod
    def _exchange(send: Tensor | None, receiver: int | None, receive: Tensor | None, sender: int | None, group: dist.ProcessGroup) -> list[dist.Work]:
        operations = []
        if send is not None:
            operations.append(dist.P2POp(dist.isend, send.contiguous(), receiver, group))
        if receive is not None:
            operations.append(dist.P2POp(dist.irecv, receive, sender, group))
        return dist.batch_isend_irecv(operations) if operations else []
