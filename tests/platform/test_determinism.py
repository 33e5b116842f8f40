"""Deterministic mode: what is set on each platform, what is refused, and which operators rest."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tangram.errors import ConfigError
from tangram.platform.determinism import VARIABLES, check_environment, make_deterministic
from tangram.platform.operators import OPERATORS, varlen
from tangram.platform.operators.operator import Fused, Operator

NAMES = {name for variables in VARIABLES.values() for name in variables}


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    before = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = True, False
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = before


@pytest.mark.parametrize(
    ("platform", "expected"),
    [
        ("cpu", {}),
        (
            "cuda",
            {
                "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
                "NCCL_ALGO": "Ring",
                "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
                "FLASH_ATTENTION_DETERMINISTIC": "1",
            },
        ),
        ("npu", {"HCCL_DETERMINISTIC": "true", "LCCL_DETERMINISTIC": "1", "CLOSE_MATMUL_K_SHIFT": "1"}),
    ],
)
def test_what_each_platform_needs_is_set(platform: str, expected: dict[str, str]) -> None:
    make_deterministic(platform)
    assert {name: os.environ[name] for name in NAMES if name in os.environ} == expected
    assert torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark


@pytest.mark.parametrize(
    ("platform", "name", "good", "bad", "message"),
    [
        ("cuda", "CUBLAS_WORKSPACE_CONFIG", ":16:8", ":0:0", "needs CUBLAS_WORKSPACE_CONFIG=:4096:8 or :16:8, and the environment has :0:0;"),
        ("cuda", "NCCL_ALGO", "RING", "Tree", "needs NCCL_ALGO=Ring, and the environment has Tree; remove it there"),
        ("cuda", "NCCL_ALGO", "ring", "Ring,NVLS", "has Ring,NVLS"),
        ("cuda", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0", "1", "needs NVTE_ALLOW_NONDETERMINISTIC_ALGO=0"),
        ("npu", "HCCL_DETERMINISTIC", "strict", "false", "needs HCCL_DETERMINISTIC=true or strict, and the environment has false"),
        ("npu", "CLOSE_MATMUL_K_SHIFT", "1", "0", "needs CLOSE_MATMUL_K_SHIFT=1"),
    ],
)
def test_an_environment_that_asks_for_the_opposite_is_refused_before_anything_is_set(
    platform: str, name: str, good: str, bad: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, good)
    make_deterministic(platform)
    assert os.environ[name] == good
    torch.use_deterministic_algorithms(False)
    monkeypatch.setenv(name, bad)
    for act in (check_environment, make_deterministic):
        with pytest.raises(ConfigError, match=message):
            act(platform)
    assert not torch.are_deterministic_algorithms_enabled()


def _known(_: torch.Tensor) -> str:
    return "plain"


def test_an_operator_that_promises_nothing_rests_in_deterministic_mode() -> None:
    """Both stand-ins are this file's own module, so both can be imported."""
    first, second = (Fused(__name__, __name__, "fused", repeats=repeats) for repeats in (False, True))
    both, only = Operator("fused", _known, {"cuda": (first, second)}), Operator("fused", _known, {"cuda": first})
    assert only.fused_on("cuda") is fused and not only.repeats_on("cuda") and both.repeats_on("cuda")
    torch.use_deterministic_algorithms(True)
    assert both.fused_on("cuda") is fused and only.fused_on("cuda") is None
    assert only.chosen(torch.empty(0)) is _known
    with pytest.raises(ConfigError, match=r"test_determinism is asked for, and does not promise the same bits each time; set auto, or deterministic"):
        only.needed_on("cuda")
    torch.use_deterministic_algorithms(False)
    assert only.fused_on("cuda") is fused


def fused(_: torch.Tensor) -> str:
    return "fused"


def test_attention_and_norms_repeat_themselves_and_grouped_products_do_on_the_cpu_alone() -> None:
    """As docs/deterministic.md has them."""
    operators = {**OPERATORS, **{f"segment_attention by {name}": found for name, found in varlen._OPERATORS.items()}}
    rests = {(name, device) for name, found in operators.items() for device in found.fused if not found.repeats_on(device)}
    assert rests == {("grouped_linear", "cuda"), ("grouped_linear", "npu")}
    assert OPERATORS["grouped_linear"].repeats_on("cpu")
