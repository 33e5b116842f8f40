"""The engine on ``fully_shard``: a Hugging Face model, sharded, and its optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tangram.backends.dtypes import DTYPES
from tangram.backends.engine import Batch, CanonicalTensor, ForwardResult, StepResult
from tangram.backends.fsdp2.inputs import Supervised, forward_arguments
from tangram.backends.fsdp2.loss import SupervisedLoss
from tangram.backends.fsdp2.meshes import join
from tangram.backends.fsdp2.model_hub import ModelHub
from tangram.backends.fsdp2.optimizer import build_optimizer, clip, global_norm
from tangram.backends.fsdp2.optimizer_state import ShardOptimizerState
from tangram.backends.fsdp2.placement import local_start, local_value, place_shards, whole_shapes
from tangram.backends.fsdp2.sharding import shard
from tangram.checkpoints.dcp_state import LocalChunk
from tangram.checkpoints.fresh import initialize
from tangram.config.run import RunConfig
from tangram.errors import ConfigError
from tangram.placement.topology import Topology


class Fsdp2Engine:
    """Implements ``tangram.backends.engine.RunnableEngine``.

    Attributes:
        module: the sharded model.
        optimizer: over its sharded parameters, which are fp32.
    """

    loss_scale = 1.0
    needs_pixels = True

    def __init__(self, run: RunConfig) -> None:
        """Build this rank's part of the model, without its weights. Joins the process group; every rank must call it.

        Raises:
            ConfigError: processes, patterns or settings that do not fit.
        """
        assert run.fsdp2 is not None
        self.run, self.settings = run, run.fsdp2
        self.meshes = join(self.settings.parallel)
        self.data_parallel_rank, self.data_parallel_size = self.meshes.data_parallel_rank, self.meshes.data_parallel_size
        self.reports_data = dist.get_rank() % (dist.get_world_size() // self.data_parallel_size) == 0
        self.topology = Topology.build(vision_layers=0, text_layers=1)
        self.module = ModelHub.build(self.settings)
        shard(self.module, self.settings.parallel.fsdp_plan, self.meshes)
        _materialise(self.module, self.meshes.device)
        self.parameters: dict[str, nn.Parameter] = dict(self.module.named_parameters())
        self.canonical_shapes = whole_shapes(self.module)
        placement = place_shards(self.module, self.topology, run.model.config)
        self.chunks: list[LocalChunk] = [
            (self.topology.order[0], placement, {name: local_value(self.parameters[name]) for name in placement.tensors})  # type: ignore[misc]
        ]
        self.optimizer = build_optimizer(self.module, run.training)
        self._loss: float | None = None

    def random_weights(self, seed: int) -> None:
        """Start from random weights, the same on any number of ranks.

        Raises:
            ConfigError: the model is of no family, so nothing says how its weights are drawn.
        """
        described = self.run.described
        std = {"text": described.text_decoder.init_method_std}
        if described.image_encoder is not None:
            std["vision"] = described.image_encoder.vision_encoder.init_method_std
        _, placement, parameters = self.chunks[0]
        initialize([placement], [parameters], seed, std)  # type: ignore[arg-type]

    def weights_changed(self) -> None:
        """Nothing derives from the sharded parameters."""

    def forward_backward(self, micro_batches: Sequence[Batch]) -> ForwardResult:
        """Run this rank's micro-batches of one global batch; gradients are final and unclipped afterwards."""
        self.optimizer.zero_grad()
        self.module.train()
        result = self._run(micro_batches, backward=True)
        self._loss = result.loss
        return result

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Batch]) -> ForwardResult:
        """Loss without gradients; dropout is off."""
        self.module.eval()
        return self._run(micro_batches, backward=False)

    def _run(self, micro_batches: Sequence[Batch], backward: bool) -> ForwardResult:
        learnt = [Supervised.of(batch, self.run.training.loss_type, self.meshes.device) for batch in micro_batches]
        counts = torch.tensor([sum(one.denominator for one in learnt), sum(len(one.targets) for one in learnt)], device=self.meshes.device)
        dist.all_reduce(counts, group=self._data_group)
        denominator, tokens = counts.tolist()
        total = torch.zeros((), dtype=torch.float64, device=self.meshes.device)
        for batch, one in zip(micro_batches, learnt, strict=True):
            loss = self._loss_of(batch, one.scaled(1 / max(denominator, 1)))
            if backward:
                loss.backward()
            total += loss.detach()
        dist.all_reduce(total, group=self._data_group)
        return ForwardResult(loss=float(total), weight=denominator, tokens=tokens)

    @property
    def _data_group(self) -> dist.ProcessGroup | None:
        return None

    def _loss_of(self, batch: Batch, learnt: Supervised) -> Tensor:
        model = self.module
        if self.run.training.loss_type == "raw":
            raise ConfigError("loss_type raw is not supported yet")
        model.loss_function = SupervisedLoss(learnt)  # type: ignore[assignment]
        arguments = forward_arguments(model, batch, self.meshes.device)
        return model(**arguments, labels=batch["labels"].to(self.meshes.device)).loss

    @torch.no_grad()
    def step(self, lr: float) -> StepResult:
        """Clip, update with learning rate ``lr``, clear gradients. A loss or gradient that is not finite on any rank changes nothing anywhere."""
        assert self._loss is not None, "step() follows forward_backward()"
        norm = global_norm(self.parameters.values(), self.meshes.device)
        skipped = not (math.isfinite(norm) and math.isfinite(self._loss))
        if not skipped:
            clip(self.parameters.values(), norm, self.run.training.clip_grad)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad()
        self._loss = None
        return StepResult(grad_norm=norm, skipped=skipped)

    def canonical_parameters(self) -> Iterator[CanonicalTensor]:
        """This rank's shards."""
        return self._canonical({name: parameter.detach() for name, parameter in self.parameters.items()})

    def canonical_gradients(self) -> Iterator[CanonicalTensor]:
        """This rank's shards of the gradients of the loss that ``forward_backward`` returned; zeros where the batch does not reach."""
        found = {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in self.parameters.items()
            if parameter.requires_grad
        }
        return self._canonical(found)

    def _canonical(self, tensors: Mapping[str, Tensor]) -> Iterator[CanonicalTensor]:
        for name, tensor in tensors.items():
            held = local_value(tensor)
            if held.numel():
                yield CanonicalTensor(name, local_start(tensor), self.canonical_shapes[name], held)

    def optimizer_state(self) -> ShardOptimizerState:
        """The optimizer as checkpoints see it."""
        held = self.chunks[0][2]
        trained = {n: p for n, p in self.parameters.items() if p.requires_grad and n in held}
        return ShardOptimizerState(self.optimizer, trained, masters={n for n in trained if self.stored_as[n] != torch.float32})

    @cached_property
    def stored_as(self) -> Mapping[str, torch.dtype]:
        """What is computed in ``param_dtype`` is stored so, its fp32 values as masters; ``save_ckpt_dtype`` replaces the type for all."""
        given = self.settings.training.save_ckpt_dtype
        computed = DTYPES[self.run.training.dtype]
        return {
            name: DTYPES[given] if given is not None else computed if isinstance(parameter, DTensor) else parameter.dtype
            for name, parameter in self.parameters.items()
        }

    def generators(self) -> None:
        """There are none besides torch's own."""

    def summary(self, global_batch_size: int) -> str:
        """Tables for the start of the log."""
        total = sum(parameter.numel() for parameter in self.parameters.values())
        return f"{total:,} parameters on {dist.get_world_size()} ranks, global batch {global_batch_size}"

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()


def _materialise(model: nn.Module, device: torch.device) -> None:
    """Give sharded parameters memory and move buffers, which are real already, to the device."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device=device)
    else:
        model.to(device)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
