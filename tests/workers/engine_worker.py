"""Runs the engine on the toy model on each rank and compares it, in every process, with the same model in plain torch.

``tests.trial`` runs it on N ranks. It prints "passed NAME" after each case of ``engine_cases`` for N processes; a
disagreement raises, which ends the launch.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch
import torch.distributed as dist
from engine_cases import CASES
from toy_vlm import build_toy_chunk, plain_token_losses, toy_batches, toy_run, toy_table, toy_weights

from tangram.backends.megatron.engine import MegatronEngine
from tangram.backends.megatron.forward import get_batch, report_loss
from tangram.backends.megatron.parallel import shutdown

torch.set_num_threads(1)
MICRO_BATCHES = 4


class Plain:
    """The reference: whole tensors, torch.optim.AdamW, torch's gradient clipping."""

    def __init__(self, run: Any, tied: bool) -> None:
        self.run, self.tied = run, tied
        self.weights = {name: tensor.clone().requires_grad_() for name, tensor in toy_weights(tied).items()}
        encoder, text = run.model.config.image_encoder, run.model.config.text_decoder
        for name, tensor in self.weights.items():
            if name.startswith("vision.merge"):
                frozen = encoder.vision_projector.freeze
            else:
                frozen = encoder.vision_encoder.freeze if name.startswith("vision") else text.freeze
            tensor.requires_grad_(not frozen)
        trained = [tensor for tensor in self.weights.values() if tensor.requires_grad]
        groups = [
            {"params": [t for t in trained if t.dim() > 1], "weight_decay": run.training.weight_decay},
            {"params": [t for t in trained if t.dim() == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-2, eps=run.training.adam_eps)

    def loss(self, batches: list[dict[str, Any]]) -> torch.Tensor:
        losses = torch.cat([plain_token_losses(self.weights, batch, self.tied) for batch in batches])
        return losses.sum() / len(losses)

    def backward(self, batches: list[dict[str, Any]]) -> float:
        self.optimizer.zero_grad()
        loss = self.loss(batches)
        loss.backward()
        for tensor in self.weights.values():
            if tensor.requires_grad and tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
        return float(loss)

    def step(self, lr: float) -> float:
        norm = torch.nn.utils.clip_grad_norm_([t for t in self.weights.values() if t.requires_grad], self.run.training.clip_grad or math.inf)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return float(norm)


def forward_step(iterator: Any, model: Any) -> Any:
    """As a user's entry has it; the loss is per token."""
    dtype = model.config.params_dtype

    def loss_func(output: Any) -> Any:
        losses = output["loss_dict"]["token_losses"]
        return report_loss(losses.sum(), losses.numel())

    return model(**get_batch(iterator, torch.device("cpu"), dtype)), loss_func


def short_report(iterator: Any, model: Any) -> Any:
    """A forward step of the older kind, whose loss function returns a pair."""
    output, loss_func = forward_step(iterator, model)
    return output, lambda value: loss_func(value)[1:]


def make_engine(case: dict[str, Any]) -> MegatronEngine:
    run = toy_run(case.get("tied", True), case.get("freeze"), case["parallel"], **case.get("training", {}))
    step = short_report if case.get("report") == "pair" else forward_step
    engine = MegatronEngine(run, forward_step=step, build_chunk=build_toy_chunk, table=toy_table(case.get("tied", True)))
    weights = toy_weights(case.get("tied", True))
    for _, placement, parameters in engine.chunks:
        for block in placement.blocks:
            if block.canonical is not None:
                parameters[block.local].data[block.local_slices] = weights[block.canonical][block.canonical_slices]
    engine.weights_changed()
    return engine


def close(found: float, expected: float, tolerance: float, what: str) -> None:
    assert abs(found - expected) <= tolerance * max(abs(expected), 1e-3), f"{what}: {found} instead of {expected}"


def same_tensors(found: Any, expected: dict[str, torch.Tensor], tolerance: float, what: str) -> set[str]:
    """Compare every local rectangle; the error is relative to the largest element."""
    names = set()
    for tensor in found:
        names.add(tensor.name)
        window = tuple(slice(a, a + n) for a, n in zip(tensor.start, tensor.local.shape, strict=True))
        want = expected[tensor.name]
        assert tensor.full_shape == tuple(want.shape), f"{what} {tensor.name}: {tensor.full_shape} instead of {tuple(want.shape)}"
        error = float((tensor.local.float() - want[window]).abs().max() / want.abs().max().clamp(min=1e-6))
        assert error <= tolerance, f"{what} {tensor.name} at {tensor.start}: off by {error}"
    return names


def everyones(names: set[str]) -> set[str]:
    gathered: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(gathered, names)
    return set().union(*gathered)


def same_everywhere(value: float, what: str) -> None:
    gathered = [0.0] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    assert len({str(v) for v in gathered}) == 1, f"{what} differs over ranks: {gathered}"


def copies_agree(engine: MegatronEngine) -> None:
    """Replicated and tied parameters are bit-equal wherever they are held."""
    pieces = {(t.name, t.start): t.local.clone() for t in engine.canonical_parameters()}
    gathered: list[dict[Any, torch.Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(gathered, pieces)
    for other in gathered:
        for key, piece in pieces.items():
            assert key not in other or torch.equal(piece, other[key]), f"copies of {key} differ"


def train(case: dict[str, Any]) -> None:
    """Three steps: loss, every gradient, gradient norm and every weight agree with plain torch."""
    engine = make_engine(case)
    plain = Plain(engine.run, case.get("tied", True))
    tolerance = case.get("tolerance", 2e-6)
    rank, size = engine.data_parallel_rank, engine.data_parallel_size
    for step in range(3):
        batches = toy_batches(MICRO_BATCHES * case.get("rounds", 1), step)
        expected = plain.backward(batches)
        if step == 1:
            result = engine.evaluate(batches[rank::size])
            close(result.loss, expected, tolerance, "evaluation loss")
        result = engine.forward_backward(batches[rank::size])
        close(result.loss, expected, tolerance, f"loss of step {step}")
        same_everywhere(result.loss, "loss")
        assert result.tokens == sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
        trained = {name: t for name, t in plain.weights.items() if t.requires_grad}
        if case.get("gradients", True):
            for _ in range(2):  # asking twice changes nothing
                names = same_tensors(engine.canonical_gradients(), {n: t.grad for n, t in trained.items()}, 20 * tolerance, "gradient of")
            assert everyones(names) == set(trained), f"gradients are missing: {set(trained) - everyones(names)}"
        lr = 1e-2 / (step + 1)
        outcome = engine.step(lr)
        close(outcome.grad_norm, plain.step(lr), 20 * tolerance, f"gradient norm of step {step}")
        same_everywhere(outcome.grad_norm, "gradient norm")
        assert not outcome.skipped
        names = same_tensors(engine.canonical_parameters(), {n: t.detach() for n, t in plain.weights.items()}, 20 * tolerance, "weight")
        assert everyones(names) == set(plain.weights)
        copies_agree(engine)


def snapshot(engine: MegatronEngine) -> list[torch.Tensor]:
    states = [value for state in inner_states(engine) for value in state.values() if isinstance(value, torch.Tensor)]
    return [t.detach().clone() for t in [*(p for local in engine.chunks for p in local.parameters.values()), *states]]


def inner_states(engine: MegatronEngine) -> list[dict[str, Any]]:
    inner = [optimizer.optimizer for optimizer in engine.optimizer.chained_optimizers if optimizer.optimizer is not None]
    return [dict(state) for optimizer in inner for state in optimizer.state.values()]


def literal_norm(case: dict[str, Any]) -> None:
    """NVIDIA-NeMo/RL PR 3788: one replicated gradient of 3 and one of 4 that a single rank holds, or two stages each as a copy, have norm 5.

    Counting replicas over two tensor-parallel ranks would give sqrt(2 * 9 + 16) = 5.83, counting tied copies over two stages
    sqrt(9 + 2 * 16) = 6.40.
    """
    engine = make_engine(case)
    gradients = {name: torch.zeros_like(weight) for name, weight in toy_weights(case.get("tied", True)).items()}
    gradients["text.norm"][1] = 3.0
    gradients["embed.weight"][0, 2] = 4.0
    engine.forward_backward(toy_batches(MICRO_BATCHES)[engine.data_parallel_rank :: engine.data_parallel_size])
    for _, placement, parameters in engine.chunks:
        for block in placement.blocks:
            values = 0.0 if block.canonical is None else gradients[block.canonical][block.canonical_slices]
            parameters[block.local].main_grad[block.local_slices] = values
    norm = engine.step(0.0).grad_norm
    assert norm == 5.0, f"gradient norm {norm} instead of 5.0"
    same_everywhere(norm, "gradient norm")


def skip(case: dict[str, Any]) -> None:
    """A NaN in one micro-batch of one rank: all skip together, nothing changes, and the next step is as if it had not been."""
    engine = make_engine(case)
    rank, size = engine.data_parallel_rank, engine.data_parallel_size
    engine.forward_backward(toy_batches(MICRO_BATCHES)[rank::size])
    assert not engine.step(1e-2).skipped
    before = snapshot(engine)
    poisoned = toy_batches(MICRO_BATCHES, 1)
    poisoned[1]["pixel_values"][0, 0] = float("nan")
    result = engine.forward_backward(poisoned[rank::size])
    outcome = engine.step(1e-2)
    assert math.isnan(result.loss) and outcome.skipped and math.isnan(outcome.grad_norm), (result, outcome)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(engine), strict=True)), "a skipped step changed weights or moments"
    result = engine.forward_backward(toy_batches(MICRO_BATCHES, 1)[rank::size])
    assert math.isfinite(result.loss) and not engine.step(1e-2).skipped


def silent_rank(case: dict[str, Any]) -> None:
    """allenai/OLMo-core PR 657: of two ranks the first has labels of -100 alone, the second four tokens; as the second's data on one process."""
    engine = make_engine(case)
    plain = Plain(engine.run, case.get("tied", True))
    batches = toy_batches(2)
    batches[0]["labels"][:] = -100
    learnt = (batches[1]["labels"][:, 1:] != -100).nonzero()[4:]
    batches[1]["labels"][learnt[:, 0], learnt[:, 1] + 1] = -100
    expected = plain.backward(batches[1:])
    result = engine.forward_backward(batches[engine.data_parallel_rank :: engine.data_parallel_size])
    assert result.tokens == 4
    close(result.loss, expected, 2e-6, "loss")
    same_everywhere(result.loss, "loss")
    gradients: dict[str, torch.Tensor] = {name: tensor.grad for name, tensor in plain.weights.items() if tensor.grad is not None}
    names = same_tensors(engine.canonical_gradients(), gradients, 4e-5, "gradient of")
    assert everyones(names) == set(plain.weights)
    close(engine.step(1e-2).grad_norm, plain.step(1e-2), 4e-5, "gradient norm")
    same_tensors(engine.canonical_parameters(), {name: tensor.detach() for name, tensor in plain.weights.items()}, 4e-5, "weight")


def precision(case: dict[str, Any]) -> None:
    """16-bit parameters, fp32 masters and moments, gradients of the returned loss although fp16 scales it."""
    engine = make_engine(case)
    plain = Plain(engine.run, True)
    batches = toy_batches(MICRO_BATCHES)
    expected = plain.backward(batches)
    rank, size = engine.data_parallel_rank, engine.data_parallel_size
    overflows = 0
    while engine.run.training.dtype == "fp16":  # the loss scale comes down, weights stay, until nothing overflows
        close(engine.forward_backward(batches[rank::size]).loss, expected, 1e-2, "loss")
        if math.isfinite(sum(float(tensor.local.sum()) for tensor in engine.canonical_gradients())):
            break
        overflows += 1
        assert engine.step(1e-2).skipped and overflows < 20
    assert (overflows > 0) == (engine.run.training.dtype == "fp16"), "the test means to see an overflow"
    close(engine.forward_backward(batches[rank::size]).loss, expected, 1e-2, "loss")
    same_tensors(engine.canonical_gradients(), {n: t.grad for n, t in plain.weights.items()}, 5e-2, "gradient of")
    outcome = engine.step(1e-2)
    close(outcome.grad_norm, plain.step(1e-2), 2e-2, "gradient norm")
    assert not outcome.skipped
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16}[engine.run.training.dtype]
    assert {p.dtype for local in engine.chunks for p in local.parameters.values()} == {wanted}
    assert {state[key].dtype for state in inner_states(engine) for key in ("exp_avg", "exp_avg_sq")} == {torch.float32}
    assert {p.dtype for group in engine.optimizer.param_groups for p in group["params"]} == {torch.float32}
    same_tensors(engine.canonical_parameters(), {n: t.detach() for n, t in plain.weights.items()}, 5e-2, "weight")


def refuses(case: dict[str, Any]) -> None:
    """The engine or its step raises on every rank, with the numbers."""
    try:
        engine = make_engine(case)
        engine.forward_backward(toy_batches(case.get("micro_batches", MICRO_BATCHES))[engine.data_parallel_rank :: engine.data_parallel_size])
    except Exception as error:
        assert type(error).__name__ == case["error"] and case["message"] in str(error), f"{type(error).__name__}: {error}"
        return
    raise AssertionError(f"no error where {case['message']!r} was due")


def main() -> None:
    checks = {"train": train, "skip": skip, "literal_norm": literal_norm, "precision": precision, "refuses": refuses, "silent_rank": silent_rank}
    only = os.environ.get("ENGINE_CASE")
    for name, case in CASES[int(os.environ["WORLD_SIZE"])].items():
        if only and only not in name:
            continue
        try:
            checks[case.get("check", "train")](case)
        except Exception as error:
            raise AssertionError(f"case {name!r}: {error}") from error
        if int(os.environ["RANK"]) == 0:
            print(f"passed {name}", flush=True)
    shutdown()


if __name__ == "__main__":
    main()
