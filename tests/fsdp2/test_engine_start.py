"""How a model comes to be: without being whole anywhere, with every weight written, and said in the log."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tangram.backends.fsdp2.model_hub import ModelHub
from tangram.backends.fsdp2.sharding import precision
from tangram.backends.fsdp2.units import plan_units
from tangram.config.fsdp2 import FsdpPlan
from tangram.errors import ConfigError, PlacementError
from tests.fsdp2.kit import UNITS, engine_of, read, write_run
from tests.ranks import on_ranks

CASES = Path(__file__).with_name("cases_start.py")
SIZES = {"text_layers": 2, "vision_layers": 2, "hidden": 32, "vision_hidden": 16, "heads": 2, "kv_heads": 1, "vision_heads": 2}
TinyHF = Callable[..., Path]


def test_no_rank_ever_holds_the_model_and_each_draws_dropout_from_its_own_seed(tiny_hf: TinyHF, tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    shutil.copytree(tiny_hf("qwen2_5_vl", **SIZES), hf, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((hf / "config.json").read_text())
    text = config.get("text_config", config)
    for section in (config, text):
        section.update({key: value for key, value in (("hidden_size", 1024), ("intermediate_size", 4096), ("vocab_size", 12000)) if key in section})
    config["vision_config"]["out_hidden_size"] = 1024
    rope = text.get("rope_parameters") or text["rope_scaling"]
    rope["mrope_section"] = [64, 96, 96]
    (hf / "config.json").write_text(json.dumps(config))
    for rank, found in enumerate(on_ranks(2, CASES, "memory", hf, tmp_path)):
        assert found["whole"] > 180
        assert found["built"] < 0.25 * found["whole"], f"rank {rank}: {found}"
        assert found["filled"] < 0.75 * found["whole"], f"rank {rank}: {found}"
        assert "ranks: 1 copies x 2 shards" in found["summary"]
        assert found["seed"] == 1_000_000 * rank, "the run's, and apart from other ranks'"


@pytest.mark.compat
def test_buffers_are_those_of_transformers_built_on_the_meta_device_or_not(tiny_hf: TinyHF, tmp_path: Path) -> None:
    on_ranks(1, CASES, "buffers", tiny_hf("qwen2_5_vl", **SIZES), tmp_path)


def settings(folder: Path, hf: Path, **changes: Any) -> Any:
    run = read(write_run(folder, hf, changes))
    assert run.fsdp2 is not None
    return run.fsdp2


@pytest.fixture(scope="module")
def model(tiny_hf: TinyHF, tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    return ModelHub.build(settings(tmp_path_factory.mktemp("run"), tiny_hf("qwen2_5_vl", tied=True, **SIZES)))


def test_the_model_has_the_keys_of_transformers_and_is_tied_on_the_meta_device(model: Any, tiny_hf: TinyHF) -> None:
    file = load_file(next(tiny_hf("qwen2_5_vl", tied=True, **SIZES).glob("*.safetensors")))
    assert len(dict(model.named_parameters())) == len(file)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_units_are_entered_embedding_first_and_outer_before_inner(model: nn.Module) -> None:
    modules = ["model.visual.blocks.{*}", "model.visual", "model.language_model.embed_tokens", "lm_head", "model.language_model.layers.{*}"]
    plan = plan_units(model, FsdpPlan(apply_modules=modules))
    assert [unit.paths for unit in plan.units] == [
        ("model.language_model.embed_tokens", "lm_head"),
        ("model.visual",),
        ("model.visual.blocks.0",),
        ("model.visual.blocks.1",),
        ("model.language_model.layers.0",),
        ("model.language_model.layers.1",),
    ]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"apply_modules": ["lm_head"]}, "share a weight, which one unit must hold; name both of them, or none"),
        ({"apply_modules": ["model.visual.merger"], "ignored_modules": ["model.visual"]}, r"which ignored_modules leaves whole \(model.visual\)"),
        ({"apply_modules": ["model.visual"], "hook_modules": ["model.visual"]}, "no module of apply_modules lies below model.visual"),
        ({"apply_modules": ["model.visual.blok.{*}"]}, "matches no module of the model"),
        ({"apply_modules": ["model.visual", "model.vis*"]}, "is matched by 'model.visual' and by 'model.vis\\*'"),
    ],
)
def test_plans_that_cannot_be_are_refused(model: nn.Module, plan: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_units(model, FsdpPlan(**plan))


def test_an_embedding_called_from_outside_its_unit_is_refused(tiny_hf: TinyHF, tmp_path: Path) -> None:
    untied = ModelHub.build(settings(tmp_path, tiny_hf("qwen2_5_vl", **SIZES)))
    with pytest.raises(ConfigError, match="which model calls before it enters model.language_model; add model.language_model.embed_tokens"):
        plan_units(untied, FsdpPlan(apply_modules=["model.language_model"]))


@pytest.mark.parametrize("key", ["param_dtype", "reduce_dtype", "output_dtype"])
def test_fp16_is_refused_with_the_mend(key: str) -> None:
    with pytest.raises(ConfigError, match=f"fsdp_plan.{key}: fp16 needs its losses scaled, which this backend does not do; use bf16"):
        precision(FsdpPlan(**{key: "fp16"}))


def test_a_router_loss_without_routers_is_refused(tiny_hf: TinyHF, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="qwen2_5_vl has no experts, so no routers; remove it"):
        ModelHub.build(settings(tmp_path, tiny_hf("qwen2_5_vl", **SIZES), features={"loss_cfg": {"router_aux_loss_coef": 0.1}}))


def test_a_weight_that_the_file_lacks_is_an_error(tiny_hf: TinyHF, tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    shutil.copytree(tiny_hf("qwen2_5_vl", **SIZES), hf)
    (path,) = hf.glob("*.safetensors")
    tensors = load_file(path)
    del tensors[next(name for name in tensors if name.endswith("norm1.weight"))]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(PlacementError, match="1 missing: model.visual.blocks.0.norm1.weight"):
        engine_of(read(write_run(tmp_path / "run", hf)))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_the_summary_counts_every_parameter_once(tiny_hf: TinyHF, tmp_path: Path) -> None:
    hf = tiny_hf("qwen2_5_vl", tied=True, **SIZES)
    changes = {"parallel": {"fsdp_plan": {"apply_modules": UNITS, "ignored_modules": ["model.language_model.norm"]}}, "model": {"freeze": [UNITS[0]]}}
    engine = engine_of(read(write_run(tmp_path, hf, changes)))
    text = engine.summary(8)
    engine.close()
    total = sum(tensor.numel() for tensor in load_file(next(hf.glob("*.safetensors"))).values())
    assert f" {total:,} " in text
    blocks = next(line for line in text.splitlines() if "model.visual.blocks.{*}" in line)
    assert " 2 " in blocks
    assert "yes" in blocks
    assert any("(whole on every rank)" in line and " 32 " in line and "fp32" in line for line in text.splitlines())
    assert "batch: 8 samples a step = 1 a micro-batch x 8 micro-batches x 1 data-parallel ranks" in text
