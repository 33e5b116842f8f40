"""A text decoder with experts on the megatron backend, at every split of them, against transformers' own layers and a hand-written router loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tangram.align.assemble import assemble
from tangram.align.reference import load_reference
from tangram.families.base import get_family
from tangram.families.tiny import TinySpec
from tests.models.cases_experts import micro_batches
from tests.ranks import on_ranks

CASES = Path(__file__).with_name("cases_experts.py")
AUX, Z = 0.1, 0.01
TWO, FOUR = {"expert_model_parallel_size": 2}, {"expert_model_parallel_size": 4}
PIPELINE = {"pipeline_model_parallel_size": 2, "llm_pp_layers": [1, 1]}
SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True}
ROUTERS = {"moe_aux_loss_coeff": AUX, "moe_z_loss_coeff": Z}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
GROUPED = {"moe_grouped_gemm": True}
ALL_GATHER = {"moe_token_dispatcher_type": "allgather"}
PLAIN: dict[str, dict[str, Any]] = {
    "copies": {},
    "two": {"parallel": TWO},
    "two, allgather": {"parallel": TWO | ALL_GATHER},
    "two, sharded": {"parallel": TWO | SHARDED},
    "two, stages": {"parallel": TWO | PIPELINE},
    "four": {"parallel": FOUR},
    "grouped, copies": {"parallel": GROUPED},
    "grouped, two, tensor": {"parallel": GROUPED | TWO | TENSOR},
    "grouped, two, tensor, allgather": {"parallel": GROUPED | TWO | TENSOR | ALL_GATHER},
}
CONTEXT = {"context_parallel_size": 2}
BALANCED: dict[str, dict[str, Any]] = {
    "two, balanced": {"parallel": TWO, "text": ROUTERS},
    "stages, recomputed, balanced": {"parallel": TWO | PIPELINE, "text": ROUTERS | RECOMPUTED},
    "tensor, balanced": {"parallel": TWO | TENSOR, "text": ROUTERS},
    "context, balanced": {"parallel": TWO | CONTEXT, "text": ROUTERS},
}
PER_SAMPLE: dict[str, dict[str, Any]] = {"per sample, balanced": {"parallel": TWO, "text": ROUTERS, "training": {"loss_type": "per_sample_loss"}}}
IDLE: dict[str, dict[str, Any]] = {
    "idle": {"parallel": FOUR | {"overlap_grad_reduce": True}, "token": 7},
    "idle, allgather": {"parallel": FOUR | ALL_GATHER, "token": 7},
    "idle, grouped": {"parallel": FOUR | GROUPED, "token": 7},
    "idle, grouped, two": {"parallel": TWO | GROUPED | ALL_GATHER, "token": 7},
}
"""All tokens are the same, so the same two of four experts get them, and two ranks of four have nothing to do."""
CURVES: dict[str, dict[str, Any]] = {
    "copies": {},
    "two": TWO,
    "four, sharded": FOUR | SHARDED,
    "two, grouped": TWO | SHARDED | GROUPED | {"overlap_param_gather": True},
}


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts") / "hf"
    spec = TinySpec(hidden=32, vocab=515, text_layers=2, vision_layers=1, deepstack=(0,), experts=4, experts_per_token=2)
    get_family("qwen3_vl_moe").tiny(folder, 0, False, spec)
    return folder


@pytest.fixture(scope="module")
def found(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[list[Any], dict[str, Tensor]]]:
    """``found(case)``: what each rank reports of it, and its gradients put together; equal on ranks that hold the same."""
    out = tmp_path_factory.mktemp("gradients")
    results = on_ranks(4, CASES, "everything", hf, out, PLAIN | BALANCED | PER_SAMPLE | IDLE, CURVES, patience=300)

    def of(case: str) -> tuple[list[Any], dict[str, Tensor]]:
        if case in ("trained", "random"):
            return [result[case] for result in results], {}
        whole = list(assemble([out / f"{case}.{rank}" for rank in range(4)]))
        assert all(one.disagreement == 0 for one in whole)
        return [result["observed"][case] for result in results], {one.name: one.tensor for one in whole}

    return of


def reference(
    hf: Path, *, routers: bool = False, per_sample: bool = False, token: int | None = None
) -> tuple[float, dict[str, Tensor], float, float]:
    """Loss without the routers' part, gradients with it, their norm, and the mean of the load-balancing losses."""
    model: Any = load_reference(hf)
    seen: list[Tensor] = []
    for layer in model.model.language_model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, given, out: seen.append(out[0] if isinstance(out, tuple) else out))
    loss, extra, balance, count = torch.zeros(()), torch.zeros(()), 0.0, 0
    for batch in micro_batches(token=token):
        seen.clear()
        logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        labelled = int((labels != -100).sum())
        mean = torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), labels.flatten(), ignore_index=-100)
        weight = 1 if per_sample else labelled
        loss, count = loss + weight * mean, count + weight
        for router in seen:
            part, z = router_losses(router[batch["attention_mask"].flatten().bool()])
            extra = extra + weight * (AUX * part + Z * z)
            balance += weight * float(part.detach()) / len(seen)
    ((loss + extra if routers else loss) / count).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if "visual" not in name}
    norm = float(torch.nn.utils.get_total_norm(gradients.values()))
    return float(loss.detach()) / count, {name: _as_the_hub(name, value) for name, value in gradients.items()}, norm, balance / count


def router_losses(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of one layer, over real tokens [n, experts]: ``experts * sum_i f_i P_i``, where f_i is the part of all choices that expert i got and P_i its
    mean probability (Fedus et al. 2021, eq. 4 to 6); and the mean squared log-sum-exp (Zoph et al. 2022, eq. 5)."""
    chosen, experts = logits.topk(2, dim=-1).indices.flatten().tolist(), logits.shape[1]
    parts = torch.tensor([chosen.count(i) / len(chosen) for i in range(experts)])
    return experts * (parts * logits.softmax(-1).mean(0)).sum(), (logits.logsumexp(-1) ** 2).mean()


def _as_the_hub(name: str, value: Tensor) -> Tensor:
    """transformers 5 holds experts as [experts, out, in]; the widths of the model tell."""
    turned = ("gate_up_proj" in name and value.shape[-1] == 32) or ("down_proj" in name and value.shape[1] == 32)
    return value.transpose(1, 2) if value.dim() == 3 and turned else value


def same(hf: Path, results: list[Any], gradients: dict[str, Tensor], balanced: bool = False, floor: float = 1e-4, **kwargs: Any) -> None:
    """``floor``: the part of the whole norm below which a tensor's error is measured against that part."""
    loss, expected, norm, balance = reference(hf, routers=balanced, **kwargs)
    assert gradients.keys() == expected.keys()
    for name, value in expected.items():
        error = float((gradients[name] - value).norm()) / max(float(value.norm()), floor * norm)
        assert error <= 1e-5, f"{name}: {error}"
    for got in results:
        assert got[0] == pytest.approx(loss, rel=1e-6) and got[1] == pytest.approx(norm, rel=1e-6)
        assert got[2] == (pytest.approx(balance, rel=1e-5) if balanced else None)


@pytest.mark.compat
@pytest.mark.parametrize("case", PLAIN)
def test_every_split_of_experts_gives_the_gradients_and_their_norm_of_transformers(case: str, hf: Path, found: Callable[[str], Any]) -> None:
    """Ranks hold micro-batches of 17, 31, 8 and 24 tokens. A norm that leaves experts out, or counts copies twice, shows (Megatron-LM PR 5916)."""
    same(hf, *found(case))


@pytest.mark.parametrize("case", BALANCED)
def test_router_losses_are_those_of_the_papers_over_real_tokens(case: str, hf: Path, found: Callable[[str], Any]) -> None:
    """Each micro-batch's is weighed as its loss is; padding is no token (Megatron-LM 7452, finding 10)."""
    same(hf, *found(case), balanced=True)


@pytest.mark.parametrize("case", PER_SAMPLE)
def test_router_losses_follow_the_loss_type(case: str, hf: Path, found: Callable[[str], Any]) -> None:
    same(hf, *found(case), balanced=True, per_sample=True)


@pytest.mark.parametrize("case", IDLE)
def test_ranks_whose_experts_get_no_token_go_on(case: str, hf: Path, found: Callable[[str], Any]) -> None:
    results, gradients = found(case)
    # All tokens are the same, so queries and keys have gradients that are nothing but rounding.
    same(hf, results, gradients, floor=1e-3, token=7)
    used = {name: sum(bool(one.any()) for one in value) for name, value in gradients.items() if "down_proj" in name}
    assert all(count == 2 for count in used.values()) and len(used) == 2


def test_twenty_steps_do_not_depend_on_the_split_of_experts(found: Callable[[str], Any]) -> None:
    ranks, _ = found("trained")
    for name in CURVES:
        assert ranks[0][name][0] == pytest.approx(ranks[0]["copies"][0], rel=1e-6), name
        whole: dict[str, np.ndarray] = {}
        for rank in ranks:
            assert rank[name][0] == ranks[0][name][0]
            for place, value in rank[name][1].items():
                assert np.array_equal(whole.setdefault(place, value), value), f"{name}: {place} differs between ranks"
        assert len({place for place in whole if "experts" in place}) == 2 * 4 * 3  # layers, experts; gate and up are two blocks
    assert ranks[0]["copies"][0][-1] != ranks[0]["copies"][0][0]


def test_random_weights_do_not_depend_on_the_split_of_experts(found: Callable[[str], Any]) -> None:
    ranks, _ = found("random")
    expected = ranks[0]["copies"]
    for name in CURVES:
        assert {place: value for rank in ranks for place, value in rank[name].items()} == expected, name
