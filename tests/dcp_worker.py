"""One rank of the multi-process checkpoint tests: real megatron-core DDP and optimizers over the toy model.

``dcp_worker.py SCENARIO FOLDER`` with RANK, WORLD_SIZE and a rendezvous in the environment.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer import MegatronModule, TransformerConfig

from tangram.backends.megatron.cpu import adapt
from tangram.backends.megatron.generators import MegatronGenerators
from tangram.backends.megatron.optimizer_state import MegatronOptimizerState
from tangram.checkpoints.dcp_manifest import RunFacts
from tangram.checkpoints.dcp_reader import DCPReader
from tangram.checkpoints.dcp_state import LocalChunk
from tangram.checkpoints.manager import CheckpointManager
from tangram.errors import CheckpointError
from tangram.placement.blocks import Placement
from tangram.placement.topology import Topology
from tests import dcp_toy

TP2_PP2 = dcp_toy.split(2, [[2, 0]], [[1, 3]])
PP2_VPP2 = dcp_toy.split(1, [[1, 1], [0, 0]], [[0, 1], [2, 1]])
PP2 = dcp_toy.split(1, [[2, 0]], [[1, 3]])


class ToyChunk(MegatronModule):
    """A chunk's parameters under their local names, and nothing to compute."""

    def __init__(self, config: TransformerConfig, placement: Placement, dtype: torch.dtype, frozen: str | None) -> None:
        super().__init__(config)
        for name, tensor in placement.tensors.items():
            owner: torch.nn.Module = self
            *path, leaf = name.split(".")
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, torch.nn.Module())
                owner = getattr(owner, part)
            trainable = frozen is None or not name.startswith(frozen)
            owner.register_parameter(leaf, torch.nn.Parameter(torch.zeros(tensor.shape, dtype=dtype), requires_grad=trainable))


class Run:
    """This rank's part of a run, and the comparison of all it holds with the truth."""

    def __init__(
        self,
        topology: Topology,
        *,
        tied: bool = False,
        dtype: torch.dtype = torch.float32,
        zero: bool = False,
        frozen: str | None = None,
        **options: bool,
    ) -> None:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=topology.tensor,
            pipeline_model_parallel_size=topology.pipeline,
            virtual_pipeline_model_parallel_size=topology.virtual if topology.virtual > 1 else None,
            create_gloo_process_groups=False,  # gloo is the default here
        )
        self.tied, self.dtype, self.zero = tied, dtype, zero
        self.shapes = dcp_toy.shapes(topology, tied)
        tp_rank, pp_rank = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
        half = dtype == torch.bfloat16
        config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=4, bf16=half, params_dtype=dtype)
        # overlap_grad_reduce is what makes megatron-core cut its buffers into several buckets
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=zero, grad_reduce_in_fp32=True, overlap_grad_reduce=zero, overlap_param_gather=zero, bucket_size=400
        )
        models = []
        self.chunks: list[LocalChunk] = []
        for placement in dcp_toy.placements(topology, tied, tp_rank, pp_rank):
            module = ToyChunk(config, placement, dtype, frozen)
            models.append(DistributedDataParallel(config, ddp, module))
            self.chunks.append((placement.chunk, placement, dict(module.named_parameters())))
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                lr=dcp_toy.ADAM["lr"], weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8, clip_grad=0.0,
                bf16=half, params_dtype=dtype, use_distributed_optimizer=zero, overlap_param_gather=zero,
            ),
            models,
            use_gloo_process_groups=False,
        )  # fmt: skip
        self.models = models
        self.adapter = MegatronOptimizerState(self.optimizer, [parameters for _, _, parameters in self.chunks])
        self.facts = RunFacts("qwen2_5_vl", topology, parallel_state.get_data_parallel_world_size(), {}, "tok", "data", 1, {"lr": 0.01})
        self.manager = CheckpointManager(self.facts, self.chunks, self.shapes, self.adapter, MegatronGenerators(), **options)

    def begin(self) -> None:
        """Parameters as step 0 has them."""
        self._write({name: dcp_toy.start(name, shape, self.dtype) for name, shape in self.shapes.items()})

    def spoil(self) -> None:
        """Parameters that no checkpoint has, padding included."""
        for _, _, parameters in self.chunks:
            for parameter in parameters.values():
                parameter.data.fill_(7.0)
        self.optimizer.reload_model_params()

    def _write(self, whole: dict[str, torch.Tensor]) -> None:
        for _, placement, parameters in self.chunks:
            for name, parameter in parameters.items():
                parameter.data.copy_(dcp_toy.cut(placement, name, whole))
        self.optimizer.reload_model_params()

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            whole = {name: dcp_toy.gradient(name, step, shape) for name, shape in self.shapes.items()}
            for _, placement, parameters in self.chunks:
                for name, parameter in parameters.items():
                    if parameter.requires_grad:
                        parameter.main_grad.copy_(dcp_toy.cut(placement, name, whole))
            self.optimizer.step()

    def check(self, steps: int, frozen: str | None = None, fresh_from: int | None = None) -> None:
        """Parameters, masters, moments and step counts equal, bit by bit, what AdamW makes of the whole tensors.

        Args:
            frozen: local names that start so were never updated.
            fresh_from: those were updated from this step on only.
        """
        whole = {name: dcp_toy.truth(name, shape, steps, self.dtype) for name, shape in self.shapes.items()}
        still = {name: dcp_toy.start(name, shape, self.dtype) for name, shape in self.shapes.items()}
        compared = 0
        for _, placement, parameters in self.chunks:
            for name, parameter in parameters.items():
                tensors = still if frozen and name.startswith(frozen) else {c: t.master.to(self.dtype) for c, t in whole.items()}
                assert torch.equal(parameter.detach(), dcp_toy.cut(placement, name, tensors)), f"parameter {name} after {steps} steps"
                compared += 1
        for state in self.adapter.parameters():
            _, placement, _ = self.chunks[state.chunk]
            held = state.tensors()
            if frozen and state.name.startswith(frozen):
                assert fresh_from == steps and state.step is None and "exp_avg" not in held, f"{state.name} must be fresh"
                continue
            assert state.step == steps, (state.name, state.step)
            assert set(held) == {"exp_avg", "exp_avg_sq"} | ({"master"} if self.dtype == torch.bfloat16 else set())
            for kind, values in held.items():
                local = dcp_toy.cut(placement, state.name, {c: getattr(t, kind) for c, t in whole.items()}).flatten()
                expected = local[state.start : state.start + values.numel()]
                assert torch.equal(values.detach().flatten(), expected), f"{kind} of {state.name} after {steps} steps"
                compared += 1
        assert compared > 20 or self.zero

    def round_trip(self, folder: Path, saved: int, **expected: object) -> None:
        """Load into a spoilt model, compare, go on for a step, compare again."""
        self.spoil()
        resumed = self.manager.load(folder)
        assert (resumed.step, resumed.consumed_samples) == (saved, saved * 8), resumed
        self.check(saved, **expected)  # type: ignore[arg-type]
        self.train(saved, saved + 1)
        self.adapter.synchronize()
        if not expected:
            self.check(saved + 1)


def draws() -> list[object]:
    """From every generator: torch, numpy, python, and Megatron's for tensor-parallel regions."""
    with get_cuda_rng_tracker().fork():
        inside = torch.rand(3).tolist()
    return [inside, torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random(), random.gauss(0, 1)]


def refuses(action: object, *parts: str) -> None:
    """Every rank gets the same one-line CheckpointError."""
    try:
        action()  # type: ignore[operator]
    except CheckpointError as error:
        message = str(error)
        for part in parts:
            assert part in message, f"{part!r} not in {message!r}"
        assert "\n" not in message
        messages: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(messages, message)
        assert len(set(messages)) == 1, messages
    else:
        raise AssertionError(f"nothing was refused; expected {parts}")


def save(folder: Path) -> None:
    """Four ranks: what the other scenarios load."""
    plain = Run(TP2_PP2, tied=True, dtype=torch.bfloat16)
    plain.begin()
    plain.train(0, 3)
    plain.manager.save(folder / "plain", 3, 24, {"skipped": 1})
    plain.check(3)

    # partial state on one rank fails all ranks, and the previous checkpoint stays the newest
    victim = plain.adapter.parameters()[0]
    kept = victim.inner.state[victim.updated].pop("exp_avg") if dist.get_rank() == 2 else None
    refuses(lambda: plain.manager.save(folder / "plain", 4, 32), "rank 2: optimizer state of", "is partial: exp_avg missing")
    if kept is not None:
        victim.inner.state[victim.updated]["exp_avg"] = kept
    # state wholly absent on one tensor-parallel rank only
    state = victim.inner.state.pop(victim.updated) if dist.get_rank() == 2 else None
    refuses(lambda: plain.manager.save(folder / "plain", 4, 32), "the ranks hold", "whole or wholly absent")
    if state is not None:
        victim.inner.state[victim.updated] = state
    # a tensor with another number of steps on one rank
    if dist.get_rank() == 3:
        plain.adapter.parameters()[-1].set_step(9)
    refuses(lambda: plain.manager.save(folder / "plain", 4, 32), "steps, another 9")
    if dist.get_rank() == 3:
        plain.adapter.parameters()[-1].set_step(3)
    assert sorted(path.name for path in (folder / "plain").iterdir()) == ["iter_0000003", "latest_checkpointed_iteration.txt"]

    # random state: restored where the split is the same, drawn numbers go on as they would have
    model_parallel_cuda_manual_seed(11)
    torch.manual_seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    random.seed(dist.get_rank())
    plain.manager.save(folder / "random", 3, 24)
    drawn = draws()
    plain.round_trip(folder / "random", 3)
    plain.manager.load(folder / "random")
    assert draws() == drawn
    all_drawn: list[object] = [None] * 4
    dist.all_gather_object(all_drawn, str(drawn))
    assert len(set(all_drawn)) == 4, "ranks draw different numbers"

    zero = Run(dcp_toy.split(2), tied=True, dtype=torch.bfloat16, zero=True)
    zero.begin()
    zero.train(0, 3)
    zero.manager.save(folder / "zero", 3, 24)
    zero.check(3)
    zero.round_trip(folder / "plain", 3)

    zero = Run(PP2, tied=True, zero=True)  # fp32; the two copies of the embedding are cut at different places
    zero.begin()
    zero.train(0, 2)
    zero.manager.save(folder / "zero_fp32", 2, 16)
    stretches: list[list[tuple[int, int]]] = [[]] * 4
    tables = ("text_decoder.embedding.word_embeddings.weight", "text_decoder.output_layer.weight")
    held = [(state.start, state.updated.numel()) for state in zero.adapter.parameters() if state.name in tables]
    dist.all_gather_object(stretches, held)
    first, last = stretches[0] + stretches[1], stretches[2] + stretches[3]  # data-parallel ranks of the two stages
    assert sum(size for _, size in first) == sum(size for _, size in last) == 37 * 16 and first != last, (first, last)

    vision = "image_encoder.encoder"
    frozen = Run(dcp_toy.split(2), dtype=torch.bfloat16, zero=True, frozen=vision)
    frozen.begin()
    frozen.train(0, 2)
    frozen.manager.save(folder / "frozen", 2, 16)
    frozen.check(2, frozen=vision)
    frozen.round_trip(folder / "frozen", 2, frozen=vision)

    unstarted = Run(TP2_PP2, dtype=torch.bfloat16)
    unstarted.begin()
    unstarted.manager.save(folder / "unstarted", 0, 0)

    without = Run(TP2_PP2, no_save_optim=True, no_save_rng=True)
    without.begin()
    without.manager.save(folder / "without", 0, 0)


def load(folder: Path) -> None:
    """Two ranks: every other split, then what is refused, then a rank that dies."""
    bf16 = {"tied": True, "dtype": torch.bfloat16}
    for topology, zero in ((dcp_toy.split(2), False), (PP2_VPP2, False), (dcp_toy.split(), True), (PP2, False)):
        run = Run(topology, zero=zero, **bf16)  # type: ignore[arg-type]
        for source in ("plain", "zero"):
            run.round_trip(folder / source, 3)
    for topology, zero in ((dcp_toy.split(2), True), (PP2_VPP2, False), (dcp_toy.split(), False)):
        Run(topology, zero=zero, tied=True).round_trip(folder / "zero_fp32", 2)

    # frozen when saved, trainable now: fresh moments, masters equal to the parameters, and it trains on
    vision = "image_encoder.encoder"
    for zero in (False, True):
        thawed = Run(dcp_toy.split(), dtype=torch.bfloat16, zero=zero)
        thawed.round_trip(folder / "frozen", 2, frozen=vision, fresh_from=2)
        thawed.manager.save(folder / f"thawed_{zero}", 3, 24)  # counts of steps differ by tensor now
        again = Run(dcp_toy.split(2), dtype=torch.bfloat16)
        again.manager.load(folder / f"thawed_{zero}")
        assert {(state.step, state.name.startswith(vision)) for state in again.adapter.parameters()} == {(1, True), (3, False)}
    # moments of a part that is frozen now are left alone
    Run(dcp_toy.split(2), frozen=vision, dtype=torch.bfloat16).manager.load(folder / "thawed_True")

    # before the first step there are masters, but no moments
    run = Run(dcp_toy.split(2), dtype=torch.bfloat16)
    run.spoil()
    run.manager.load(folder / "unstarted")
    assert all(state.step is None for state in run.adapter.parameters())
    run.train(0, 2)
    run.check(2)

    run = Run(PP2)
    refuses(lambda: run.manager.load(folder / "without"), "saved without optimizer state", "no_load_optim")
    fresh = Run(PP2, no_load_optim=True, no_load_rng=True)
    fresh.manager.load(folder / "without")
    fresh.train(0, 1)
    fresh.check(1)
    fresh.manager.load(folder / "without")
    assert all(state.step is None for state in fresh.adapter.parameters())
    half = Run(PP2, dtype=torch.bfloat16, no_load_optim=True)
    refuses(lambda: half.manager.load(folder / "without"), "torch.float32", "torch.bfloat16", "nothing is cast silently")

    fresh = Run(PP2)
    if dist.get_rank() == 1:
        sys.addaudithook(_die_at_data_file)
    try:
        fresh.manager.save(folder / "without", 1, 8)
    except CheckpointError as error:
        assert "lost contact" in str(error), error
    else:
        raise AssertionError("a save with a dead rank succeeded")
    assert DCPReader(folder / "without").manifest.step == 0
    Path(folder, "survivor").touch()


def _die_at_data_file(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and str(arguments[0]).endswith(".distcp"):
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    adapt()
    {"save": save, "load": load}[sys.argv[1]](Path(sys.argv[2]))
    if sys.argv[1] == "save":
        dist.destroy_process_group()
