"""Numbers here are worked by hand: 3-4-5 triangles."""

from __future__ import annotations

import json
import math

import pytest
import torch

from tangram.align.compare import build_report, compare, relative_error
from tangram.align.observation import Observation, read_observation, write_observation
from tangram.align.render import render
from tangram.errors import CheckpointError

MASK = torch.tensor([[1, 1, 0]])


def observation(**gradients: list[float]) -> Observation:
    logits = torch.tensor([[[3.0, 4.0], [0.0, 12.0], [7.0, 7.0]]])
    return Observation(loss=2.0, logits=logits, gradients={name: torch.tensor(values) for name, values in gradients.items()})


def test_error_is_the_norm_of_the_difference_over_the_norm_of_the_reference():
    assert relative_error(torch.tensor([3.0, 4.0 + 0.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)


def test_error_against_a_zero_reference_is_the_norm_itself():
    assert relative_error(torch.tensor([3.0, 4.0]), torch.zeros(2)) == 5.0
    report = compare(observation(a=[3.0, 4.0]), observation(a=[0.0, 0.0]), MASK, 1e-5)
    row = report.worst("gradient")
    assert row is not None and row.absolute and row.error == 5.0 and not report.passed
    assert compare(observation(a=[0.0, 0.0]), observation(a=[0.0, 0.0]), MASK, 1e-5).passed


def test_only_routers_and_only_in_16_bits_may_be_off_by_twice_the_tolerance():
    """A token on the edge between two experts goes to the other one where it is rounded."""
    right, router = {"a": [3.0, 4.0]}, "layers.0.mlp.gate.weight"
    for error, sixteen_bits, passed in ((1.5, True, True), (1.5, False, False), (2.5, True, False)):
        report = compare(
            observation(**right, **{router: [3.0, 4.0 + error]}), observation(**right, **{router: [3.0, 4.0]}), MASK, 0.2, (), sixteen_bits
        )
        assert report.passed == passed, (error, sixteen_bits)
    assert not compare(observation(a=[3.0, 5.5]), observation(a=[3.0, 4.0]), MASK, 0.2, (), True).passed


def test_what_cancellation_leaves_of_a_gradient_may_differ_by_rounding_and_no_more():
    """Beside gradients of norm 5 a difference of 5 * 2^-23 = 6e-7 is rounding, one of 1e-6 is not."""
    large = {"a": [3.0, 4.0], "b": [4.0, 3.0]}
    assert compare(observation(**large, c=[5e-7]), observation(**large, c=[1e-8]), MASK, 1e-5).passed
    assert compare(observation(**large, c=[5e-7]), observation(**large, c=[0.0]), MASK, 1e-5).passed
    assert not compare(observation(**large, c=[1e-6]), observation(**large, c=[1e-8]), MASK, 1e-5).passed
    assert not compare(observation(**large, c=[math.nan]), observation(**large, c=[1e-8]), MASK, 1e-5).passed


def test_error_is_computed_in_double_precision():
    reference = torch.full((1_000_000,), 1.0)
    assert relative_error(reference * (1 + 2**-20), reference) == pytest.approx(2**-20, rel=1e-6)


def test_equal_observations_pass():
    report = compare(observation(a=[3.0, 4.0]), observation(a=[3.0, 4.0]), MASK, 1e-5)
    assert report.passed and report.failures == []
    assert {row.kind for row in report.rows} == {"loss", "logits", "gradient"}


def test_logits_of_padding_are_not_compared_and_others_are():
    other = observation()
    other.logits[0, 2] = math.nan
    assert compare(other, observation(), MASK, 1e-5).passed
    other.logits[0, 1, 1] = 12.0 + 1.3
    row = compare(other, observation(), MASK, 1e-5).worst("logits")
    assert row is not None and row.error == pytest.approx(0.1)  # 1.3 of sqrt(3^2 + 4^2 + 12^2) = 13


def test_a_missing_gradient_fails_and_is_named():
    report = compare(observation(a=[1.0]), observation(a=[1.0], lost=[1.0]), MASK, 1e-5)
    assert not report.passed
    assert report.failures == ["1 canonical gradients missing: lost"]


def test_an_unexpected_gradient_fails_and_is_named():
    report = compare(observation(a=[1.0], more=[1.0]), observation(a=[1.0]), MASK, 1e-5)
    assert report.failures == ["1 gradients that the reference does not have: more"]


def test_a_gradient_or_logits_of_another_shape_fail_and_are_named():
    report = compare(observation(a=[1.0, 2.0]), observation(a=[1.0]), MASK, 1e-5)
    assert report.failures == ["gradient of a has shape (2,) instead of (1,)"]
    cut = observation()
    report = compare(Observation(2.0, cut.logits[..., :1], {}), cut, MASK, 1e-5)
    assert report.failures == ["logits have shape (1, 3, 1) instead of (1, 3, 2)"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_not_finite_fails_and_comes_first(value: float):
    report = compare(observation(a=[value], b=[9.0]), observation(a=[1.0], b=[1.0]), MASK, 1e-5)
    assert report.rows[0].name == "a" and not report.passed
    assert "worst: a with " in report.failures[0]
    assert json.loads(json.dumps(report.as_dict(), allow_nan=False))["tensors"][0]["error"] == str(value)


def test_rows_come_worst_first():
    report = compare(observation(a=[1.1], b=[1.3], c=[1.2]), observation(a=[1.0], b=[1.0], c=[1.0]), MASK, 1e-5)
    assert [row.name for row in report.rows] == ["b", "c", "a", "logits", "loss"]
    assert report.failures == ["3 of 5 tensors past tolerance 1e-05; worst: b with 3.00e-01"]


def test_a_loss_past_the_tolerance_fails():
    other = observation()
    report = compare(Observation(2.1, other.logits, {}), other, MASK, 1e-5)
    assert not report.passed and report.rows[0].name == "loss" and report.rows[0].error == pytest.approx(0.05)


def test_the_table_is_bounded_and_says_what_it_leaves_out():
    report = compare(observation(**{f"g{i:02}": [1.0] for i in range(30)}), observation(**{f"g{i:02}": [1.0] for i in range(30)}), MASK, 1e-5)
    text = render(report, title="TP2", limit=10)
    assert "loss" in text and "logits" in text and text.count("\ng") == 10
    assert "20 more gradients, none above 0.00e+00" in text
    assert "passed: 30 gradients" in text


def test_the_table_of_a_failure_names_the_reason():
    text = render(build_report([], 1e-5, missing=("model.visual.merger.ln_q.weight",)), title="TP2")
    assert "FAILED: 1 canonical gradients missing: model.visual.merger.ln_q.weight" in text


def test_observations_survive_the_file(tmp_path):
    written = observation(a=[1.0, 2.0])
    write_observation(written, tmp_path)
    read = read_observation(tmp_path)
    assert read.loss == 2.0 and torch.equal(read.logits, written.logits) and torch.equal(read.gradients["a"], written.gradients["a"])
    (tmp_path / "grads.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"grads\.safetensors: no such file; write it with 'tangram align --dump"):
        read_observation(tmp_path)
