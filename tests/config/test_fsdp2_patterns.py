"""The pattern language of module paths, and plans held against a model's modules."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.config.fsdp2 import Fsdp2Config
from tangram.config.fsdp2_plans import check_paths, check_switches, plans_of
from tangram.config.parsing import merge
from tangram.config.patterns import Pattern, match_each
from tangram.errors import ConfigError
from tests.config.fsdp2_kit import CONTENT

# Worked by hand from the description of the public matcher: anchored, {*} digits, {a-b} an inclusive range, * anything, ? one character.
TABLE = [
    ("layers.{*}", "layers.0", True),
    ("layers.{*}", "layers.127", True),
    ("layers.{*}", "layers.", False),
    ("layers.{*}", "layers.x", False),
    ("layers.{*}", "layers.1.mlp", False),
    ("layers.{*}", "model.layers.1", False),
    ("layers.{*}.mlp", "layers.12.mlp", True),
    ("layers.{*}.mlp", "layers.12.mlp.up", False),
    ("layers.{2-11}", "layers.2", True),
    ("layers.{2-11}", "layers.11", True),
    ("layers.{2-11}", "layers.1", False),
    ("layers.{2-11}", "layers.12", False),
    ("layers.{2-11}", "layers.110", False),
    ("layers.{7-7}", "layers.7", True),
    ("layers.{0-3}.experts.{*}", "layers.3.experts.63", True),
    ("layers.{0-3}.experts.{*}", "layers.4.experts.63", False),
    ("layers.{*}.experts.{0-1}", "layers.9.experts.2", False),
    ("model.*.norm", "model.a.b.norm", True),
    ("model.*.norm", "model.norm", False),
    ("*norm", "model.norm", True),
    ("*norm", "norm", True),
    ("*norm", "norms", False),
    ("*", "any.thing", True),
    ("block?", "blocks", True),
    ("block?", "block", False),
    ("block?", "block.1", False),
    ("a?b", "a.b", True),
    ("a.b", "a.b", True),
    ("a.b", "axb", False),
    ("model", "model.visual", False),
    ("Model", "model", False),
    ("a+b(c)[d]^$|", "a+b(c)[d]^$|", True),
    ("layers.{*}", "layers.٣", False),
]


@pytest.mark.parametrize(("pattern", "path", "matches"), TABLE)
def test_what_a_pattern_matches(pattern: str, path: str, matches: bool) -> None:
    assert Pattern(pattern).matches(path) is matches


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("", "a pattern is empty"),
        ("layers.{0-4,7}", "'{0-4,7}' is neither {*} nor a range"),
        ("layers.{}", "'{}' is neither"),
        ("layers.{3}", "'{3}' is neither"),
        ("layers.{a-b}", "'{a-b}' is neither"),
        ("layers.{-1-3}", "'{-1-3}' is neither"),
        ("layers.{4-2}", "the range {4-2} ends before it begins; write {2-4}"),
        ("layers.{*", "'{*' is neither"),
        ("layers.*}", "a '}' without its '{'"),
        ("layers.{{*}}", "is neither"),
    ],
)
def test_patterns_that_mean_nothing(pattern: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        Pattern(pattern)
    assert said in str(error.value)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.text(alphabet="ab.0123456789{}*?-,[(\\\n", max_size=12), st.text(alphabet="ab.0123456789\n", max_size=10))
def test_any_text_is_a_pattern_or_one_line(text: str, path: str) -> None:
    try:
        pattern = Pattern(text)
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    # Without braces the public language is that of the shell, whose translation is Python's own.
    if not re.search(r"[{\[]", text):
        import fnmatch

        assert pattern.matches(path) is fnmatch.fnmatchcase(path, text)


PATHS = ["visual", *(f"visual.blocks.{i}" for i in range(4)), "visual.merger", "text", *(f"text.layers.{i}" for i in range(3)), "lm_head"]


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        (["visual.block.{*}"], "k: 'visual.block.{*}' matches no module of the model (did you mean 'visual.blocks."),
        (["visual.blocks.{4-9}"], "k: 'visual.blocks.{4-9}' matches no module"),
        (["visual.blocks.{*}", "nothing"], "k: 'nothing' matches no module"),
        (["visual", "visual"], "k: 'visual' stands there twice; remove one"),
        (["visual.blocks.{*}", "visual.*"], "k: visual.blocks.0 is matched by 'visual.blocks.{*}' and by 'visual.*'; let one of them match it"),
    ],
)
def test_each_pattern_must_match_and_none_what_another_does(patterns: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        match_each(patterns, PATHS, "k")
    assert str(error.value).startswith(said)


def test_matches_keep_the_order_of_the_model() -> None:
    found = match_each(["text.layers.{1-2}", "visual.blocks.{*}"], PATHS, "k")
    assert found == {"text.layers.{1-2}": ["text.layers.1", "text.layers.2"], "visual.blocks.{*}": [f"visual.blocks.{i}" for i in range(4)]}


def config(changes: dict[str, Any]) -> Fsdp2Config:
    return Fsdp2Config.model_validate(merge({**CONTENT, "parallel": {}}, changes))


def nested(key: str, value: Any) -> Any:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def test_every_plan_is_held_against_the_model() -> None:
    keys = list(plans_of(config({})))
    assert len(keys) == 9
    for key in keys:
        assert check_paths(config(nested(key, ["visual.blocks.{*}"])), PATHS) == f"{key.removesuffix('.apply_modules')} 4"
        with pytest.raises(ConfigError, match=rf"^{key}: 'visual.blocks.\{{8-9\}}' matches no module of the model"):
            check_paths(config(nested(key, ["visual.blocks.{8-9}"])), PATHS)


def test_chunk_loss_has_one_head() -> None:
    on = {"features": {"enable_chunk_loss": True}}
    check_paths(config(on), PATHS)
    for module, said in (("lm_heads", "matches no module"), ("text.layers.{*}", "matches 3 modules (text.layers.0, text.layers.1, ...)")):
        with pytest.raises(ConfigError) as error:
            check_paths(config(merge(on, {"features": {"chunkloss_plan": {"apply_module": module}}})), PATHS)
        assert said in str(error.value)
    check_paths(config({"features": {"chunkloss_plan": {"apply_module": "lm_heads"}}}), PATHS)


@pytest.mark.parametrize(
    ("switch", "value", "plan"),
    [
        ("features.recompute", True, "features.recompute_plan.apply_modules"),
        ("features.enable_activation_offload", True, "features.activation_offload_plan.apply_modules"),
        ("features.enable_chunk_mbs", True, "features.chunkmbs_plan.apply_modules"),
        ("parallel.expert_parallel_size", 2, "parallel.ep_plan.apply_modules"),
    ],
)
def test_what_is_switched_on_needs_modules(switch: str, value: Any, plan: str) -> None:
    on = nested(switch, value)
    with pytest.raises(ConfigError, match=rf"^{switch}( 2)? is on, but {plan} names no module; name some, or switch it off$"):
        check_switches(config(on))
    check_switches(config(merge(on, nested(plan, ["visual"]))))
    with pytest.raises(ConfigError, match=rf"^{plan} names modules, but {switch}( 1)? is off; switch it on, or remove the plan$"):
        check_switches(config(nested(plan, ["visual"])))
