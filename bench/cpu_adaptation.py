"""What the CPU adaptation of megatron-core costs a training step.

Without it no step runs on a CPU, so its cost is measured call by call: one step of a small GPT is run with every patched function counted,
then each is timed against what a CPU build would call in its place, and the difference times the number of calls is set against the step.
All in one process; medians.

    python bench/cpu_adaptation.py
"""

from __future__ import annotations

import importlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

warnings.filterwarnings("ignore")

GOAL = 3.0
HIDDEN, LAYERS, HEADS, LENGTH, ROWS, VOCAB, MICRO_BATCHES = 256, 4, 8, 256, 2, 8192, 2


def build() -> tuple[Callable[[], None], Any]:
    """A training step of core's own GPT with dropout, DDP, AdamW and clipping, on one process."""
    from tangram.backends.megatron.parallel import initialize
    from tangram.config.run import ParallelConfig
    from tangram.placement.topology import Topology

    initialize(ParallelConfig(), Topology(), seed=1)
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        calculate_per_token_loss=True,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), VOCAB, LENGTH, position_embedding_type="rope")
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, clip_grad=0.1), [wrapped], use_gloo_process_groups=False)
    config.finalize_model_grads_func = finalize_model_grads
    ids = torch.randint(VOCAB, (ROWS, LENGTH))
    places = torch.arange(LENGTH).expand(ROWS, -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH).tril() < 0.5

    def loss_func(losses: torch.Tensor) -> tuple[torch.Tensor, int, dict[str, torch.Tensor]]:
        return losses.sum(), losses.numel(), {"loss": losses.detach().sum()}

    def forward_step(iterator: Iterator[int], module: Any) -> Any:
        next(iterator)
        return module(ids, places, mask, labels=ids), loss_func

    def step() -> None:
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(range(MICRO_BATCHES)),
            model=[wrapped],
            num_microbatches=MICRO_BATCHES,
            seq_length=LENGTH,
            micro_batch_size=ROWS,
        )
        optimizer.step()

    return step, model


def median_time(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def per_call(call: Callable[[], object]) -> float:
    """Seconds of one call, from batches of 200."""
    return median_time(lambda: [call() for _ in range(200)], 15) / 200


def owner_of(path: str) -> Any:
    module, _, inner = path.partition(":")
    owner = importlib.import_module(module)
    return getattr(owner, inner) if inner else owner


def count_calls(step: Callable[[], None]) -> dict[str, int]:
    """Calls of every patched function in one step."""
    from tangram.backends.megatron.cpu import PATCHES, _torch

    targets = [(owner_of(patch.owner), patch.name, f"{patch.owner}.{patch.name}") for patch in PATCHES if patch.name != "torch"]
    targets += [(_torch, name, f"torch.{name}") for name in ("empty", "ones", "tensor", "zeros")]
    counts = {label: 0 for _, _, label in targets}
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in targets]

    def counted(function: Callable[..., Any], label: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[label] += 1
            return function(*args, **kwargs)

        return call

    for (owner, name, label), (_, _, function) in zip(targets, originals, strict=True):
        setattr(owner, name, counted(function, label))
    step()
    for owner, name, function in originals:
        setattr(owner, name, function)
    return counts


def extra_times() -> dict[str, float]:
    """Seconds that one call of each patched function takes beyond what a CPU build would call instead."""
    from tangram.backends.megatron import cpu

    state = torch.get_rng_state()
    one = torch.zeros(1)
    clip = owner_of("megatron.core.optimizer.clip_grads").clip_grad_by_total_norm_fp32
    core = "megatron.core"
    seeding = "tensor_parallel.random._set_cuda_rng_state"
    clipping = "optimizer.optimizer.clip_grad_by_total_norm_fp32"
    return {
        "torch.cuda.current_device": per_call(torch.cuda.current_device),
        "torch.cuda.synchronize": per_call(torch.cuda.synchronize),
        "torch.cuda.get_rng_state": per_call(torch.cuda.get_rng_state) - per_call(torch.get_rng_state),
        "torch.cuda.random.get_rng_state": per_call(torch.cuda.random.get_rng_state) - per_call(torch.get_rng_state),
        f"{core}.{seeding}": per_call(lambda: cpu._set_rng_state(state)) - per_call(lambda: torch.set_rng_state(state)),
        "torch:Tensor.cuda": per_call(one.cuda),
        f"{core}.{clipping}": per_call(lambda: clip([], 1.0, 0.0)) - per_call(lambda: clip.__wrapped__([], 1.0, 0.0)),
        "torch.empty": per_call(lambda: cpu._torch.empty(1, device="cuda")) - per_call(lambda: torch.empty(1, device="cpu")),
        "torch.ones": per_call(lambda: cpu._torch.ones(1, device="cuda")) - per_call(lambda: torch.ones(1, device="cpu")),
        "torch.tensor": per_call(lambda: cpu._torch.tensor(1.0, device="cuda")) - per_call(lambda: torch.tensor(1.0, device="cpu")),
        "torch.zeros": per_call(lambda: cpu._torch.zeros(1, device="cuda")) - per_call(lambda: torch.zeros(1, device="cpu")),
    }


def main() -> float:
    """Print the table and return the cost in per cent of a step."""
    torch.set_num_threads(1)
    step, model = build()
    step()
    counts = {name: count for name, count in count_calls(step).items() if count}
    whole = median_time(step, 7)
    extra = extra_times()
    cost = 0.0
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"step of {millions:.1f} M parameters, {MICRO_BATCHES * ROWS} x {LENGTH} tokens: {whole * 1e3:.1f} ms")
    for name, count in counts.items():
        each = max(extra[name], 0.0)  # a negative difference is timing noise
        cost += count * each
        print(f"  {name}: {count} calls, {each * 1e6:.2f} us more each")
    share = 100 * cost / whole
    print(f"the adaptation costs {share:.4f} % of the step (goal: at most {GOAL} %)")
    return share


if __name__ == "__main__":
    raise SystemExit(main() > GOAL)
