"""Checkpoints of sharded models: saved at one split and gone on with at another, with all that an optimizer keeps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from tangram.align.reference import load_reference
from tests.fsdp2.kit import PLAN
from tests.ranks import on_ranks

CASES = Path(__file__).with_name("cases_checkpoints.py")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
FROZEN = "model.visual.blocks.0"
SMALL = {"text_layers": 1, "vision_layers": 2}
MERGER_WHOLE = {"apply_modules": ["model.visual.blocks.{*}", "model.language_model.layers.{*}"], "ignored_modules": ["model.visual.merger"]}
WITH_ALL: dict[str, Any] = {"model": {"model_id": "marked", "freeze": [FROZEN]}, "parallel": {"fsdp_plan": MERGER_WHOLE}}
HYBRID = {**WITH_ALL, "parallel": {**WITH_ALL["parallel"], "fully_shard_parallel_size": 2}}
OFFLOADED = {**WITH_ALL, "parallel": {"fsdp_plan": {**MERGER_WHOLE, "cpu_offload": True}}}
BF16 = {"parallel": {"fsdp_plan": {**PLAN, "param_dtype": "bf16", "reduce_dtype": "fp32"}}}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the one checkpoint in a folder, but random state, read by torch alone."""
    (folder,) = folder.glob("iter_*")
    metadata = dcp.FileSystemReader(folder).read_metadata()
    state: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)  # type: ignore[union-attr]
        for key, entry in metadata.state_dict_metadata.items()
        if not key.startswith("rng.")
    }
    dcp.load(state, checkpoint_id=folder)
    return state


def assert_same(one: Path, other: Path) -> None:
    mine, theirs = stored(one), stored(other)
    assert mine.keys() == theirs.keys()
    for key in mine:
        assert mine[key].dtype == theirs[key].dtype and torch.equal(mine[key], theirs[key]), key


@pytest.mark.timeout(600)
def test_any_split_goes_on_where_any_other_stopped(tiny_hf: Callable[..., Path], tmp_path: Path) -> None:
    """Tied embeddings, a frozen block, a module held whole, a parameter of one row, one without gradients; one rank, two, four, and two copies.
    pytorch/pytorch 192202, InternLM/xtuner PR 2018, pytorch/torchtitan 811."""
    hf = tiny_hf("qwen2_5_vl", tied=True, **SMALL)
    found: list[list[dict[str, Any]]] = []

    def launch(ranks: int, saves: dict[str, Any], loads: list[tuple[str, str, Any]]) -> None:
        found.append(on_ranks(ranks, CASES, "scenario", hf, tmp_path, saves, loads))

    launch(1, {"one": WITH_ALL}, [])
    launch(2, {"two": OFFLOADED}, [("one", "one_on_2", WITH_ALL), ("two", "two_on_2", OFFLOADED)])
    launch(4, {"hybrid": HYBRID}, [("two", "two_on_4", WITH_ALL), ("hybrid", "hybrid_on_4", WITH_ALL)])
    launch(1, {}, [("hybrid", "hybrid_on_1", OFFLOADED)])
    whole = found[0][0]["one"]["losses"]
    assert len(set(whole)) == 4
    for ranks in found:
        for number, results in enumerate(ranks):
            for name, result in results.items():
                expected = whole[-len(result["losses"]) :]
                assert result["losses"] == pytest.approx(expected, rel=1e-6), (name, number)
                if "_on_" in name:
                    assert result["position"] == (2, 16, {"skipped": 1})
                    assert_same(tmp_path / name, tmp_path / name.partition("_on_")[0])
                else:
                    assert result["still"] and result["frozen"] > 0
    for number, results in enumerate(found[1]):
        assert results["two_on_2"]["losses"] == results["two"]["losses"][2:], f"rank {number}, to the bit"
    for ranks, saved, resumed in ((found[1], "two", "two_on_2"), (found[2], "hybrid", "hybrid_on_4")):
        assert all(results[resumed]["draws"] == results[saved]["draws"] for results in ranks), "random state, also where copies become one"
    assert len({json.dumps(results["hybrid"]["draws"]) for results in found[2]}) == 4, "ranks draw different numbers"
    assert found[1][0]["one_on_2"]["draws"] != found[0][0]["one"]["draws"], "another split draws anew"
    assert found[2][3]["two_on_4"]["empty"] == ["scale", "spare"], "the last rank holds nothing of these"
    keys = set(stored(tmp_path / "two_on_4"))
    assert {"model.scale", "optimizer.step.scale", "model.spare", f"model.{FROZEN}.attn.qkv.weight"} <= keys
    assert not any("spare" in key or FROZEN in key for key in keys if key.startswith("optimizer."))
    assert "model.lm_head.weight" not in keys and not any(".master." in key for key in keys)
    split = json.loads((tmp_path / "hybrid" / "iter_0000002" / "manifest.json").read_text())["split"]
    assert (split["data_parallel"], split["fully_shard"], split["ulysses"]) == (4, 2, 1)


def test_types_that_weights_are_stored_in(tiny_hf: Callable[..., Path], tmp_path: Path) -> None:
    """bf16 and their fp32 masters, which resuming reads; nothing is lost on the way."""
    hf = tiny_hf("qwen2_5_vl", **SMALL)
    half = {**BF16, "training": {"save_ckpt_dtype": "fp32"}}
    small = {"training": {"save_ckpt_dtype": "fp16"}}
    bare = {**BF16, "training": {"no_save_optim": True}}
    fresh = {**BF16, "training": {"no_load_optim": True}}
    saves = {"bf16": BF16, "wide": half, "fp16": small, "bare": bare}
    loads = [("bf16", "bf16_again", BF16), ("wide", "wide_again", half), ("fp16", "fp16_again", small), ("bare", "bare_fresh", fresh)]
    loads += [("bf16", "bf16_fresh", fresh)]
    for result in on_ranks(2, CASES, "scenario", hf, tmp_path, saves, loads):
        for name, again in (("bf16", "bf16_again"), ("wide", "wide_again"), ("fp16", "fp16_again")):
            assert result[again]["losses"] == result[name]["losses"][2:], again
        assert result["bf16"]["losses"] == result["wide"]["losses"] != result["fp16"]["losses"]
        assert result["bare_fresh"]["losses"] == result["bf16_fresh"]["losses"], "without the optimizer, weights are those of model. entries"
        assert result["bf16_fresh"]["losses"] != result["bf16_again"]["losses"]
    for name in ("bf16", "wide", "fp16"):
        assert_same(tmp_path / name, tmp_path / f"{name}_again")
    held = {name: stored(tmp_path / name) for name in saves}
    weight = "model.language_model.layers.0.mlp.up_proj.weight"
    expected = {"bf16": torch.bfloat16, "wide": torch.float32, "fp16": torch.float16, "bare": torch.bfloat16}
    assert {name: held[name][f"model.{weight}"].dtype for name in saves} == expected
    master = held["bf16"][f"optimizer.master.{weight}"]
    assert master.dtype == torch.float32 and torch.equal(master, held["wide"][f"model.{weight}"])
    assert not torch.equal(master, master.bfloat16().float())
    assert torch.equal(master.bfloat16(), held["bf16"][f"model.{weight}"])
    assert not any(".master." in key for key in held["wide"]) and not any(key.startswith("optimizer.") for key in held["bare"])


def test_muons_state_is_its_own(tiny_hf: Callable[..., Path], tmp_path: Path) -> None:
    hf = tiny_hf("qwen2_5_vl", **SMALL)
    muon = {"training": {"optimizer": "muon"}}
    (one,) = on_ranks(1, CASES, "scenario", hf, tmp_path, {"muon": muon}, [])
    for result in on_ranks(2, CASES, "scenario", hf, tmp_path, {}, [("muon", "muon_on_2", muon)]):
        assert result["muon_on_2"]["losses"] == pytest.approx(one["muon"]["losses"][2:], rel=1e-5), "Muon orthogonalises in bf16"
    assert_same(tmp_path / "muon", tmp_path / "muon_on_2")
    keys = set(stored(tmp_path / "muon"))
    weight = "model.language_model.layers.0.mlp.up_proj.weight"
    assert {f"optimizer.momentum.{weight}", f"optimizer.step.{weight}", "optimizer.exp_avg.lm_head.weight"} <= keys
    assert f"optimizer.exp_avg.{weight}" not in keys
    (said,) = on_ranks(1, CASES, "refusal", hf, tmp_path, "muon", {})
    assert "is Muon's, this run updates it with Adam; train with the optimizer it was saved with, or set no_load_optim" in said


def test_saves_in_the_background_of_two_ranks(tiny_hf: Callable[..., Path], tmp_path: Path) -> None:
    """A rank whose disk is full fails the save on every rank, and the checkpoint before it still loads."""
    hf = tiny_hf("qwen2_5_vl", **SMALL)
    for result in on_ranks(2, CASES, "save_in_background", hf, tmp_path):
        assert result["kept"] == ["iter_0000006"], "and not that of step 3"
        assert result["failed"] and "iter_0000007" in result["message"] and "not saved: rank 1: " in result["message"], result["message"]
        assert result["left"] == ["iter_0000006", "latest_checkpointed_iteration.txt"] and result["step"] == 6
    assert_same(tmp_path / "ckpt", tmp_path / "now")


@pytest.mark.compat
@pytest.mark.parametrize(("tied", "changes", "dtype"), [(False, {}, torch.float32), (True, BF16, torch.bfloat16)], ids=["fp32", "bf16, tied"])
def test_the_hugging_face_directory_of_a_run_is_what_transformers_loads(
    tiny_hf: Callable[..., Path], tmp_path: Path, tied: bool, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    hf = tiny_hf("qwen2_5_vl", tied=tied, **SMALL)
    on_ranks(2, CASES, "export", hf, tmp_path, changes)
    out = tmp_path / "out" / "hf" / "iter_0000007"
    assert {path.name for path in out.iterdir()} == {path.name for path in hf.iterdir()}
    mine, original = load_file(out / "model.safetensors"), load_file(hf / "model.safetensors")
    assert mine.keys() == original.keys()
    assert all(mine[key].dtype == dtype and torch.equal(mine[key], original[key].to(dtype)) for key in mine)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        logits, truth = (load_reference(source, dtype)(input_ids=ids).logits for source in (out, hf))
    assert torch.equal(logits, truth)
