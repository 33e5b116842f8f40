"""The engine on megatron-core: this rank's model chunks, their optimizer, and the schedules that run them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tangram.backends.dtypes import DTYPES
from tangram.backends.engine import Batch, CanonicalTensor, Copies, ForwardResult, RankNorms, StepResult
from tangram.backends.megatron.chunks import LocalChunk, canonical_tensors, copies, gradient_of, ranks_of_copies
from tangram.backends.megatron.forward import ForwardStep, LossReport, check_report, default_forward_step
from tangram.backends.megatron.generators import MegatronGenerators
from tangram.backends.megatron.optimizer_state import MegatronOptimizerState
from tangram.backends.megatron.parallel import ParallelRanks, initialize, shutdown
from tangram.backends.megatron.router_losses import RouterLosses, weight_of
from tangram.backends.megatron.settings import ddp_config, freeze_arguments, optimizer_config
from tangram.checkpoints.hf_directory import HFDirectory
from tangram.config.attention import check_attention
from tangram.config.context import check_context
from tangram.config.model import ModelConfig
from tangram.config.offload import check_offload
from tangram.config.run import RunConfig
from tangram.errors import ConfigError
from tangram.placement.blocks import canonical_shapes, place
from tangram.placement.table import Rule, padded_vocabulary
from tangram.placement.topology import Chunk, Topology
from tangram.platform import current
from tangram.platform.operators import check_backend

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

ChunkBuilder = Callable[[ModelConfig, Chunk, Topology, torch.dtype, int], nn.Module]
"""``build_chunk(model, chunk, topology, dtype, padded_vocab)``; see ``tangram.models.vlm.build_model_chunk``."""


class MegatronEngine:
    """Implements ``tangram.backends.engine.Engine``.

    Weights are whatever ``build_chunk`` left: write them into ``chunks`` in place, then call ``weights_changed``.

    Attributes:
        chunks: this rank's model chunks, in order of virtual stage.
        models: the same, wrapped for data parallelism and precision.
        optimizer: megatron-core's, with fp32 masters of 16-bit parameters. Biases, norms and other 1-D parameters have no weight decay.
        table: the family's tensor table; ``canonical_shapes`` the model's tensors and their shapes.
    """

    stored_as = None
    axes: Mapping[str, int] = {}

    def __init__(
        self,
        run: RunConfig,
        *,
        forward_step: ForwardStep | None = None,
        build_chunk: ChunkBuilder | None = None,
        table: Sequence[Rule] | None = None,
    ) -> None:
        """Build this rank's part of the model. Joins the process group; every rank must call it.

        Args:
            forward_step: a user's; by default the batch goes to the model and the loss is the run's loss type.
            build_chunk: builds one chunk; by default the assembled model's.
            table: the tensor table; by default that of the family which ``model_id`` names.

        Raises:
            ConfigError: the processes or settings do not fit the topology, or everything is frozen.
            PlacementError: the built chunks are not those of the tensor table.
        """
        self.run = run
        self.topology = run.topology()
        self.model = run.assembled_model()
        check_context(self.model.text_decoder, run.parallel)
        check_attention(self.model, run)
        check_offload(self.model, self.topology)
        self.dtype = DTYPES[run.training.dtype]
        self.ranks: ParallelRanks = initialize(run.parallel, self.topology, run.training.seed)
        for section in self.model.layered.values():
            check_backend(section.attention_backend, self.ranks.device.type)
        self.data_parallel_rank = self.ranks.data_parallel_rank
        self.data_parallel_size = self.ranks.data_parallel_size
        padded = padded_vocabulary(self.model.text_decoder.vocab_size, self.topology.tensor, run.parallel.make_vocab_size_divisible_by)
        self.table = list(table) if table is not None else _family_table(self.model, padded)
        self.canonical_shapes = canonical_shapes(self.table, self.topology)
        self.chunks: list[LocalChunk] = []
        self._loss: float | None = None
        self._gathered = False
        modules = self._build_chunks(build_chunk or _assembled_model(), padded)
        first, last = self._tied_copies(modules)
        self.models = self._wrap(modules)
        self.optimizer = self._make_optimizer()
        self.needs_pixels = any(local.chunk.vision_first for local in self.chunks)
        self.reports_data = self.ranks.tensor_parallel_rank == self.ranks.pipeline_parallel_rank == self.ranks.context_parallel_rank == 0
        self._forward_step = forward_step or default_forward_step(run.training.loss_type, self.ranks.device, self.dtype)
        self._routers = RouterLosses(self.model.text_decoder, run.training.loss_type)
        self._prepare_schedule(first, last)

    def _build_chunks(self, build_chunk: ChunkBuilder, padded_vocab: int) -> list[nn.Module]:
        from megatron.core import parallel_state

        from tangram.models.marks import mark_parallel

        modules = []
        for vp_rank in range(self.topology.virtual):
            if self.topology.virtual > 1:
                parallel_state.set_virtual_pipeline_model_parallel_rank(vp_rank)
            chunk = self.topology.chunk(self.ranks.pipeline_parallel_rank, vp_rank)
            module = build_chunk(self.model, chunk, self.topology, self.dtype, padded_vocab).to(self.ranks.device)
            module.freeze(**freeze_arguments(self.model))  # type: ignore[operator]
            placement = place(self.table, self.topology, self.ranks.tensor_parallel_rank, chunk, self.ranks.expert_parallel_rank)
            parameters = dict(module.named_parameters())
            mark_parallel(parameters, placement, self.topology)
            self.chunks.append(LocalChunk(chunk, placement, parameters))
            modules.append(module)
        return modules

    def _tied_copies(self, modules: Sequence[nn.Module]) -> tuple[nn.Parameter | None, nn.Parameter | None]:
        """The word embedding and its copy in another chunk, as far as this rank holds them; none of untied or same-chunk ones."""
        topology = self.topology
        if self.model.text_decoder.untie_embeddings_and_output_weights or topology.text_first_chunk is topology.text_last_chunk:
            return None, None
        held = {local.chunk.position: module for local, module in zip(self.chunks, modules, strict=True)}
        first, last = (
            held[chunk.position].shared_embedding_or_output_weight() if chunk.position in held else None  # type: ignore[operator]
            for chunk in (topology.text_first_chunk, topology.text_last_chunk)
        )
        if first is not None:
            # As mark_parallel does with the copy: both get a bucket of their own, so the distributed optimizer shards them alike.
            first.shared_embedding = True
        return first, last

    def _wrap(self, modules: Sequence[nn.Module]) -> list[Any]:
        from megatron.core.distributed import DistributedDataParallel
        from megatron.core.transformer.module import Float16Module

        settings = ddp_config(self.run)
        models = []
        for number, module in enumerate(modules):
            config: Any = module.config
            # The wrappers read these when they are made: sums, not means, over data-parallel ranks; fp32 outputs on the last stage alone.
            config.calculate_per_token_loss = True
            config.virtual_pipeline_model_parallel_size = self.topology.virtual if self.topology.virtual > 1 else None
            wrapped = module if self.dtype == torch.float32 else Float16Module(config, module)
            models.append(DistributedDataParallel(config, settings, wrapped, disable_bucketing=number > 0))
        return models

    def _make_optimizer(self) -> MegatronOptimizer:
        from megatron.core.optimizer import get_megatron_optimizer

        trained = torch.tensor(sum(p.requires_grad for local in self.chunks for p in local.parameters.values()), device=self.ranks.device)
        dist.all_reduce(trained)
        if not trained:
            raise ConfigError("nothing to train: every component is frozen; set freeze to false for one in model.json or in features")
        return get_megatron_optimizer(optimizer_config(self.run), self.models, use_gloo_process_groups=False)

    def _prepare_schedule(self, first: nn.Parameter | None, last: nn.Parameter | None) -> None:
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
        from megatron.core.process_groups_config import ProcessGroupCollection

        from tangram.backends.megatron.communicator import PipelineCommunicator
        from tangram.backends.megatron.gradients import make_finalizer
        from tangram.models.vision_groups import installed_copies

        virtual = self.topology.virtual if self.topology.virtual > 1 else None
        no_sync = [model.no_sync for model in self.models]
        finalize = make_finalizer(self.models, first, last, self._copied_parameters(), installed_copies(self.topology))
        for model in self.models:
            config = model.config
            config.pipeline_model_parallel_size = self.topology.pipeline
            config.microbatch_group_size_per_vp_stage = self.topology.pipeline
            config.pipeline_dtype = self.dtype
            config.deallocate_pipeline_outputs = True
            config.finalize_model_grads_func = finalize
            config.grad_scale_func = self.optimizer.scale_loss if self.dtype == torch.float16 else None
            if self.run.parallel.overlap_grad_reduce:
                config.no_sync_func = no_sync if virtual else no_sync[0]
        self._groups = ProcessGroupCollection.use_mpu_process_groups()
        self._communicator = PipelineCommunicator(self.ranks, self.models[0].config, self.topology, self.model)
        self._schedule = get_forward_backward_func(self.topology.pipeline, virtual)

    def _copied_parameters(self) -> list[nn.Parameter]:
        """Those of the vision encoder's copies whose gradients megatron-core does not sum over tensor-parallel ranks anyway."""
        if self.topology.vision_copies == 1:
            return []
        return [
            parameter
            for local in self.chunks
            for name, parameter in local.parameters.items()
            if local.placement.tensors[name].rule.component == "vision"
            and parameter.requires_grad
            and not getattr(parameter, "sequence_parallel", False)
        ]

    def forward_backward(self, micro_batches: Sequence[Batch]) -> ForwardResult:
        """Run this rank's micro-batches of one global batch; gradients are final and unclipped afterwards.

        Raises:
            ConfigError: with virtual stages, micro-batches that do not fill the pipeline evenly.
        """
        self._clear_gradients()
        for model in self.models:
            model.train()
        result = self._run_schedule(micro_batches, forward_only=False)
        self._loss = result.loss
        return result

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Batch]) -> ForwardResult:
        """Loss without gradients; dropout is off."""
        for model in self.models:
            model.eval()
        return self._run_schedule(micro_batches, forward_only=True)

    def _run_schedule(self, micro_batches: Sequence[Batch], forward_only: bool) -> ForwardResult:
        count, stages = len(micro_batches), self.topology.pipeline
        if self.topology.virtual > 1 and (count == 0 or count % stages):
            raise ConfigError(
                f"{count} micro-batches per data-parallel rank are not a multiple of the pipeline size {stages}, which virtual stages need; "
                "change global_batch_size or micro_batch_size"
            )
        if not forward_only:
            micro_batches = self._routers.weigh(micro_batches)
        self._communicator.begin(micro_batches, forward_only)
        reports = self._schedule(
            forward_step_func=self._step_one,
            data_iterator=[iter(micro_batches) for _ in self.models],
            model=self.models,
            num_microbatches=count,
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
            p2p_communicator=self._communicator,
            pg_collection=self._groups,
        )
        self._communicator.finish()
        return self._total(reports, micro_batches)

    def _step_one(self, iterator: Iterator[Batch], model: nn.Module) -> tuple[Any, Callable[[Any], Any]]:
        from megatron.core.utils import make_viewless_tensor

        output, loss_func = self._forward_step(iterator, model)
        if isinstance(output, Tensor):
            # The schedule frees an output's memory once sent, which it cannot do to a view.
            output = make_viewless_tensor(output, requires_grad=output.requires_grad, keep_graph=True)
        return output, lambda value: self._count_once(check_report(loss_func(value)))

    def _count_once(self, report: LossReport) -> LossReport:
        """Context-parallel ranks all find the whole loss of a micro-batch, and each gradients of its own tokens; one of them counts for all."""
        numerator, denominator, log = report
        return numerator, denominator if self.ranks.context_parallel_rank == 0 else denominator * 0, log

    def _total(self, reports: Sequence[Any], micro_batches: Sequence[Batch]) -> ForwardResult:
        """Sum over micro-batches and data-parallel ranks; only one rank per copy of the model speaks, and all hear the same."""
        totals, own = [0.0, 0.0, 0.0, 0.0], None
        if self.ranks.pipeline_parallel_rank == self.topology.pipeline - 1:
            # Tensor- and context-parallel ranks find the same, or one of them is wrong.
            own = sum(float(report["loss"][0]) for report in reports)
        first = self.ranks.tensor_parallel_rank == self.ranks.context_parallel_rank == 0
        if first and self.ranks.pipeline_parallel_rank == self.topology.pipeline - 1:
            pairs = [report["loss"] for report in reports]
            labels = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in micro_batches)
            totals = [sum(float(n) for n, _ in pairs), sum(float(d) for _, d in pairs), float(labels), weight_of(micro_batches)]
        summed = torch.tensor([*totals, self._routers.take(micro_batches)], dtype=current().sum_dtype, device=self.ranks.device)
        dist.all_reduce(summed)
        numerator, denominator, tokens, weight, balancing = summed.tolist()
        return ForwardResult(
            loss=numerator / denominator if denominator else 0.0,
            weight=denominator,
            tokens=int(tokens),
            load_balancing=self._routers.mean(micro_batches, balancing, weight, denominator),
            own_loss=own / denominator if own is not None and denominator else None,
        )

    def copies(self) -> Mapping[str, Copies]:
        """Data-parallel and context-parallel ranks hold the same parameters; of experts those that have the same ones.

        The distributed optimizer gathers parameters after a step, or with ``overlap_param_gather`` while the next one needs them: now they are whole.
        """
        return copies(self.chunks, self._ranks_of_copies)

    @cached_property
    def _ranks_of_copies(self) -> dict[str, list[int]]:
        return ranks_of_copies()

    @property
    def _same_gradients(self) -> int | None:
        """The lowest of the ranks whose optimizers hold the same gradients. The distributed optimizer has a part of them on each."""
        if self.run.parallel.use_distributed_optimizer:
            return None
        # Ranks with the same experts have all else in common too.
        ranks = self._ranks_of_copies["experts"]
        return min(ranks) if len(ranks) > 1 else None

    @torch.no_grad()
    def step(self, lr: float) -> StepResult:
        """Clip, update with learning rate ``lr``, clear gradients.

        A loss, gradient or fp16 overflow that is not finite on any rank makes all ranks leave weights and moments as they are.
        """
        from tangram.backends.megatron.gradients import clip, norms_of

        assert self._loss is not None, "step() follows forward_backward()"
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_mult"]
            group["weight_decay"] = self.run.training.weight_decay * group["wd_mult"]
        overflow = self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        own, shared = norms_of(self.optimizer.param_groups)
        skipped = overflow or not math.isfinite(norm) or not math.isfinite(self._loss)
        if not skipped:
            parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            clip(parameters, norm, self.run.training.clip_grad)
            self.optimizer.step_with_ready_grads()
        self._clear_gradients()
        # Tensor-parallel ranks are neighbours.
        group = dist.get_rank() - self.ranks.tensor_parallel_rank
        return StepResult(grad_norm=norm, skipped=skipped, rank=RankNorms(own, shared, group, self._same_gradients))

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied with before the backward pass; 1 but for fp16."""
        return float(self.optimizer.get_loss_scale())

    def _clear_gradients(self) -> None:
        self._loss, self._gathered = None, False
        self.optimizer.zero_grad()
        for model in self.models:
            model.zero_grad_buffer()

    def hf_directory(self, path: str) -> HFDirectory:
        """The weights of a Hugging Face directory."""
        return HFDirectory(path)

    def random_weights(self, seed: int) -> None:
        """Start from random weights, the same at every split."""
        from tangram.checkpoints.fresh import initialize as draw

        draw([local.placement for local in self.chunks], [local.parameters for local in self.chunks], seed, self.model.init_method_stds)
        self.weights_changed()

    def optimizer_state(self) -> MegatronOptimizerState:
        """The optimizer as checkpoints see it."""
        return MegatronOptimizerState(self.optimizer, [local.parameters for local in self.chunks])

    def generators(self) -> MegatronGenerators:
        """megatron-core's random generators, which dropout in tensor-parallel regions draws from."""
        return MegatronGenerators()

    def summary(self, global_batch_size: int) -> str:
        """Tables for the start of the log."""
        from tangram.backends.megatron.summary import summary_table

        return summary_table(self.run, self.model, self.table, self.topology, self.data_parallel_size, global_batch_size)

    def close(self) -> None:
        """Leave the process group."""
        shutdown()

    def weights_changed(self) -> None:
        """Tell the optimizer that parameters were written to, so that its fp32 masters follow."""
        self.optimizer.reload_model_params()

    def finish_parameter_gather(self) -> None:
        """Make parameters whole after a step with ``overlap_param_gather``, before they are read outside a forward pass. Collective."""
        if self.run.parallel.overlap_param_gather:
            for model in self.models:
                model.start_param_sync(force_sync=True)

    def canonical_parameters(self) -> Iterator[CanonicalTensor]:
        """This rank's parameters. Collective with ``overlap_param_gather``."""
        self.finish_parameter_gather()
        return canonical_tensors(self.chunks, self.canonical_shapes, lambda parameter: parameter.detach())

    def canonical_gradients(self) -> Iterator[CanonicalTensor]:
        """This rank's gradients, fp32, of the loss that ``forward_backward`` returned: none for frozen parameters, zeros for those that take no
        part (``idle_parameters`` of a vision encoder). Collective."""
        from tangram.backends.megatron.gradients import gather_gradients

        assert self._loss is not None, "canonical_gradients() follows forward_backward() and goes before step()"
        if not self._gathered:
            gather_gradients(self.models)
            self._gathered = True
        return canonical_tensors(self.chunks, self.canonical_shapes, gradient_of(self.loss_scale), trainable_only=True)


def _family_table(model: ModelConfig, padded_vocab: int) -> list[Rule]:
    from tangram.families.base import get_family

    return get_family(model.model_id).tensor_table(model, padded_vocab)


def _assembled_model() -> ChunkBuilder:
    from tangram.models.vlm import build_model_chunk

    return build_model_chunk
