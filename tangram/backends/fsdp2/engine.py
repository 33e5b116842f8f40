"""The engine on ``fully_shard``: a Hugging Face model, sharded, and its optimizer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tangram.backends.copies import digest
from tangram.backends.dtypes import DTYPES
from tangram.backends.engine import Batch, CanonicalTensor, Copies, ForwardResult, RankNorms, StepResult
from tangram.backends.fsdp2.experts import split_experts
from tangram.backends.fsdp2.features import prepare
from tangram.backends.fsdp2.file_names import ModelFileNames
from tangram.backends.fsdp2.head import chunked
from tangram.backends.fsdp2.inputs import PackedSegments, Supervised, forward_arguments
from tangram.backends.fsdp2.loss import SupervisedLoss, logits_of
from tangram.backends.fsdp2.meshes import join
from tangram.backends.fsdp2.model_hub import ModelHub
from tangram.backends.fsdp2.optimizer import ShardedOptimizer
from tangram.backends.fsdp2.optimizer_state import ShardOptimizerState
from tangram.backends.fsdp2.placement import holders, local_value, place_shards, whole_shapes
from tangram.backends.fsdp2.sharding import precision, shard
from tangram.backends.fsdp2.summary import summary_table
from tangram.backends.fsdp2.ulysses import share_of, share_tokens
from tangram.backends.fsdp2.vision import VisionBalance
from tangram.checkpoints.dcp_state import LocalChunk
from tangram.checkpoints.fresh import initialize
from tangram.checkpoints.hf_directory import HFDirectory
from tangram.checkpoints.own_directory import OwnDirectory
from tangram.config.run import RunConfig
from tangram.errors import ConfigError, DataError
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
        precision(self.settings.parallel.fsdp_plan)
        self.meshes = join(self.settings.parallel)
        self.data_parallel_rank, self.data_parallel_size = self.meshes.data_parallel_rank, self.meshes.data_parallel_size
        self.reports_data = dist.get_rank() % (dist.get_world_size() // self.data_parallel_size) == 0
        self.topology = Topology.build(vision_layers=0, text_layers=1)
        experts = self.settings.parallel.expert_parallel_size
        self.axes: Mapping[str, int] = {"fully_shard": self.meshes.sharding.size(-1), "ulysses": self.meshes.world.size(-1), "experts": experts}
        self.module = ModelHub.build(self.settings)
        self.file_names = ModelFileNames(self.module)
        self._drawn = not any(parameter.is_meta for parameter in self.module.parameters())
        self._experts = dealt = split_experts(self.module, self.settings.parallel, self.meshes.device)
        prepare(self.module, self.settings.features)
        if self.meshes.ulysses is not None:
            share_tokens(self.module, self.meshes.ulysses, self.settings.features.loss_cfg)
        self.sharded = shard(self.module, self.settings.parallel.fsdp_plan, self.meshes, dealt)
        self.vision = VisionBalance(self.module, self.meshes.device)
        flash = self.settings.model.attn_implementation.startswith("flash_attention")
        self._segments = PackedSegments(self.module.get_decoder()) if flash else None  # type: ignore[operator]
        # Of a class that a plug-in brings nobody knows what else it does with labels.
        known = run.model.config is not None and not chunked(self.settings.features)
        self._keeps_logits = known and "logits_to_keep" in signature(self.module.forward).parameters
        self.parameters: dict[str, nn.Parameter] = dict(self.module.named_parameters())
        self.canonical_shapes = whole_shapes(self.module, run.model.config)
        placement = place_shards(self.module, self.topology, run.model.config)
        self.chunks: list[LocalChunk] = [
            (self.topology.order[0], placement, {name: local_value(self.parameters[name]) for name in placement.tensors})  # type: ignore[misc]
        ]
        if run.model.config is not None:
            # It says that in-place operations on such an output lose gradients; the known classes have none.
            warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor")
        self.optimizer = ShardedOptimizer(self.module, self.settings.training)
        # Dropout: no two ranks hold the same activations.
        torch.manual_seed(run.training.seed + 1_000_000 * dist.get_rank())
        self._loss: float | None = None

    def random_weights(self, seed: int) -> None:
        """Start from random weights, the same on any number of ranks.

        Raises:
            ConfigError: the model is of no family and was built without memory, so nothing says how its weights are drawn.
        """
        if self.run.model.config is None and self._drawn:
            # The constructor has drawn them under the run's seed, on every rank alike; shards were cut from those.
            return
        if self.run.model.config is None:
            raise ConfigError(
                f"nothing says how random weights of {type(self.module).__name__} are drawn on the meta device; set "
                "training.init_model_with_meta_device to false, or training.load to its weights"
            )
        _, placement, parameters = self.chunks[0]
        initialize([placement], [parameters], seed, self.run.described.init_method_stds)

    def hf_directory(self, path: str) -> HFDirectory:
        """The weights of a Hugging Face directory, by the model's names."""
        return HFDirectory(path) if self.run.model.config is not None else OwnDirectory(path, self.file_names)

    def weights_changed(self) -> None:
        """What was gathered before is gathered anew."""
        self.sharded.free()

    def forward_backward(self, micro_batches: Sequence[Batch]) -> ForwardResult:
        """Run this rank's micro-batches of one global batch; gradients are final and unclipped afterwards."""
        self.optimizer.zero_grad()
        self.module.train()
        if self.settings.parallel.fsdp_plan.pregather:
            self.sharded.gather()
        result = self._run(micro_batches, backward=True)
        self.sharded.sum_whole()
        self._loss = result.loss
        return result

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Batch]) -> ForwardResult:
        """Loss without gradients; dropout is off."""
        self.module.eval()
        result = self._run(micro_batches, backward=False)
        self.sharded.free()
        return result

    @torch.no_grad()
    def logits(self, micro_batches: Sequence[Batch]) -> Iterator[Tensor]:
        """Logits of each micro-batch, ``[b, s, V]``, without a loss; dropout is off. All ranks go through all of theirs."""
        self.module.eval()
        for batch, lacking in zip(micro_batches, self._lacking_passes(micro_batches), strict=True):
            self.vision.lack(lacking)
            made = self.module(**self._arguments(batch)).logits
            yield made if self.meshes.ulysses is None else share_of(batch["labels"].shape[1], self.meshes.ulysses).whole(made)
        self.sharded.free()

    def _run(self, micro_batches: Sequence[Batch], backward: bool) -> ForwardResult:
        learnt = [self._supervised(batch) for batch in micro_batches]
        denominator, tokens = self._totals(learnt)
        lacking = self._lacking_passes(micro_batches)
        total = torch.zeros((), dtype=torch.float64, device=self.meshes.device)
        # The mean over micro-batches, as each rank sees them: balance is no sum over tokens, which could be cut in any way.
        routers = self.settings.features.loss_cfg.router_aux_loss_coef / max(1, len(micro_batches) * dist.get_world_size()) if backward else 0.0
        for at, (batch, one) in enumerate(zip(micro_batches, learnt, strict=True)):
            self.vision.lack(lacking[at])
            if backward:
                self.sharded.begin(last=at == len(micro_batches) - 1)
            loss = self._loss_of(batch, one.scaled(1 / max(denominator, 1)), routers)
            if backward:
                loss.backward()
            total += loss.detach()
        own = total.clone()
        dist.all_reduce(total)
        return ForwardResult(loss=float(total), weight=denominator, tokens=tokens, own_loss=float(own))

    def _supervised(self, batch: Batch) -> Supervised:
        """The learnt positions whose logits this rank computes."""
        whole = Supervised.of(batch, self.run.training.loss_type, self.meshes.device)
        if self.meshes.ulysses is None:
            return whole
        share = share_of(batch["labels"].shape[1], self.meshes.ulysses)
        return whole.columns_of(share.start, share.size, counts=share.rank == 0)

    def _totals(self, learnt: Sequence[Supervised]) -> tuple[int, int]:
        """Denominator and learnt tokens of the global batch.

        Raises:
            DataError: ranks hold different numbers of micro-batches, on every rank.
        """
        mine = torch.tensor([sum(one.denominator for one in learnt), sum(len(one.targets) for one in learnt), len(learnt)], device=self.meshes.device)
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        denominators, tokens, counts = torch.stack(every).T.tolist()
        if len(set(counts)) > 1:
            raise DataError(f"ranks hold {counts} micro-batches of one global batch; give each the same number, filled up with rows without labels")
        return sum(denominators), sum(tokens)

    def _lacking_passes(self, micro_batches: Sequence[Batch]) -> list[int]:
        """How many passes of the vision tower this rank makes, in each micro-batch, for other ranks' sake."""
        own = torch.tensor([self.vision.passes(batch) for batch in micro_batches], dtype=torch.int64)
        ends = torch.cat([own, -own]).to(self.meshes.device)
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        most, least = ends[: len(own)].tolist(), (-ends[len(own) :]).tolist()
        self.vision.check(least, most)
        if self.meshes.copies > 1 and max(most, default=0) > 0:
            # Copies sum their gradients in the last micro-batch alone, of what all have left, which fits only where all reach the same parameters.
            most = [max(1, passes) for passes in most]
        return [wanted - made for wanted, made in zip(most, own.tolist(), strict=True)]

    def _loss_of(self, batch: Batch, learnt: Supervised, routers: float) -> Tensor:
        """What a micro-batch adds to the loss of the global batch.

        Args:
            routers: what the auxiliary loss of its routers counts; 0: nothing, as in an evaluation.
        """
        model: Any = self.module
        arguments = self._arguments(batch)
        labels = batch["labels"].to(self.meshes.device, non_blocking=True)
        if self.meshes.ulysses is not None:
            labels = share_of(labels.shape[1], self.meshes.ulysses).own(labels, 1)
        if routers:
            arguments["output_router_logits"] = True
        if self.run.training.loss_type != "raw":
            if self._keeps_logits:
                # The head is the widest layer of the model, and most positions have no label.
                columns = learnt.head_columns()
                arguments["logits_to_keep"], learnt, labels = columns, learnt.among(columns), labels[:, columns]
            model.loss_function = own = SupervisedLoss(learnt)
            output = model(**arguments, labels=labels)
            # A class that computes its loss without asking for the function gives logits to compute ours from.
            loss = output.loss if own.asked else own(logits_of(output, model, labels), labels)
        elif len(learnt.targets):
            output = model(**arguments, labels=labels)
            loss = output.loss * learnt.share
        else:
            # The model's own loss would be a mean over nothing.
            output = model(**arguments)
            loss = output.logits.float().sum() * 0
        return loss + routers * output.aux_loss if routers else loss

    def _arguments(self, batch: Batch) -> dict[str, Any]:
        if self._segments is not None:
            self._segments.set(batch, self.meshes.device)
        return forward_arguments(self.module, batch, self.meshes.device)

    def copies(self) -> Mapping[str, Copies]:
        """Parameters that are not sharded lie on all ranks; shards, where there are several copies of the weights, on one rank of each."""
        return {kind: Copies(min(ranks), digest(held) if len(ranks) > 1 else None) for kind, (ranks, held) in self._held.items()}

    @cached_property
    def _held(self) -> dict[str, tuple[list[int], list[Tensor]]]:
        """Kind -> the ranks that hold the same, and what this rank holds."""
        found: dict[str, tuple[list[int], list[Tensor]]] = {kind: ([dist.get_rank()], []) for kind in ("parameters", "experts", "whole")}
        for name, parameter in self.parameters.items():
            experts = any(name.startswith(f"{path}.") for path in self._experts.meshes)
            kind = "experts" if experts else "parameters" if isinstance(parameter, DTensor) else "whole"
            ranks, held = found[kind]
            found[kind] = ranks if held else holders(parameter), [*held, local_value(parameter)]
        return found

    @cached_property
    def _same_gradients(self) -> int | None:
        """The lowest of the ranks whose optimizers hold the same gradients."""
        ranks = set.intersection(*(set(holders(parameter)) for parameter in self.optimizer.parameters.values()))
        return min(ranks) if len(ranks) > 1 else None

    @torch.no_grad()
    def step(self, lr: float) -> StepResult:
        """Clip, update with learning rate ``lr``, clear gradients. A loss or gradient that is not finite on any rank changes nothing anywhere."""
        assert self._loss is not None, "step() follows forward_backward()"
        norm, own = self.optimizer.norms(self.meshes.device)
        skipped = not (math.isfinite(norm) and math.isfinite(self._loss))
        if not skipped:
            self.optimizer.clip(norm, self.run.training.clip_grad, self.settings.training.clip_grad_foreach)
            self.optimizer.step(lr)
        self.optimizer.zero_grad()
        self._loss = None
        return StepResult(grad_norm=norm, skipped=skipped, rank=RankNorms(own, copied=self._same_gradients))

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
        for name, layout in self.chunks[0][1].tensors.items():
            if name in tensors:
                (block,) = layout.blocks
                assert block.canonical is not None
                shape = self.canonical_shapes[block.canonical]
                yield CanonicalTensor(block.canonical, block.canonical_start, shape, block.to_canonical(local_value(tensors[name])))

    def optimizer_state(self) -> ShardOptimizerState:
        """The optimizer as checkpoints see it."""
        held = self.chunks[0][2]
        shards = {name: shard for name, shard in self.optimizer.shards.items() if name in held}
        return ShardOptimizerState(self.optimizer.torch, shards, masters={name for name in shards if self.stored_as[name] != torch.float32})

    @cached_property
    def stored_as(self) -> Mapping[str, torch.dtype]:
        """What is computed in ``param_dtype`` is stored so, its fp32 values as masters; ``save_ckpt_dtype`` replaces the type for all."""
        given, computed = self.settings.training.save_ckpt_dtype, DTYPES[self.run.training.dtype]
        return {
            name: DTYPES[given] if given is not None else computed if isinstance(parameter, DTensor) else parameter.dtype
            for name, parameter in self.parameters.items()
        }

    def generators(self) -> None:
        """There are none besides torch's own."""

    def summary(self, global_batch_size: int) -> str:
        """Tables for the start of the log."""
        return summary_table(self.parameters, self.sharded.plan, self.settings, self.meshes, global_batch_size)

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()
