"""Whether two checkpoints hold the same model, told for any two formats and splits."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tangram.checkpoints.look_options import VerifyOptions
from tangram.checkpoints.open import open_checkpoint
from tangram.checkpoints.verify import run_verify, verify
from tangram.cli.main import main
from tangram.errors import CheckpointError, ConfigError, TangramError

NORM = "model.language_model.norm.weight"
DOWN = "model.language_model.layers.2.mlp.down_proj.weight"


def compare(first, second, **options):
    return run_verify(VerifyOptions(source_dir=str(first), target_dir=str(second), **options))


@pytest.fixture
def pair(kit, tmp_path):
    """Two equal directories."""
    hf = kit.write_hf(tmp_path / "hf")
    shutil.copytree(hf, tmp_path / "other")
    return hf, tmp_path / "other"


@pytest.mark.parametrize(
    ("name", "hf", "elements"),
    [
        ("mm_25_tp2_pp2", "hf_qwen2_5_vl", 143_008),
        ("mm_25_tp1_pp2_vpp2", "hf_qwen2_5_vl", 143_008),
        ("mm_2_tp2_pp1", "hf_qwen2_vl", 144_256),
        ("mm_3_tp2_pp2", "hf_qwen3_vl", 207_648),
        ("mm_3moe_tp1_pp1_ep2", "hf_qwen3_vl_moe", 226_592),
    ],
)
def test_directories_of_another_converter_equal_their_source(name, hf, elements, golden):
    """Without a manifest: the config comes from the other side, the split from the folders."""
    for first, second in ((golden / hf, golden / name), (golden / name, golden / hf)):
        verdict = compare(first, second)
        assert verdict.equal and verdict.exit_code == 0 and verdict.elements == elements, str(verdict)


def test_the_split_can_be_given_and_a_wrong_one_is_refused(golden):
    path, hf = golden / "mm_25_tp2_pp2", golden / "hf_qwen2_5_vl"
    right = {"tp_size": 2, "llm_pp_layers": [1, 3], "vit_pp_layers": [4, 0]}
    assert compare(hf, path, target_parallel_config=right).equal
    with pytest.raises(TangramError, match=r"mp_rank_00_000/model_optim_rng.pt: .*1 missing|layers\.1"):
        compare(hf, path, target_parallel_config={**right, "llm_pp_layers": [2, 2]})


def test_without_any_config_it_is_said_what_to_give(golden):
    message = r"mm_25_tp2_pp2: has no manifest and no config.json.* as hf_dir .*tp_size 2, vit_pp_layers \[\[4, 0\]\], llm_pp_layers \[\[1, 3\]\]"
    with pytest.raises(CheckpointError, match=message):
        compare(golden / "mm_25_tp2_pp2", golden / "mm_25_tp2_pp2")
    assert compare(golden / "mm_25_tp2_pp2", golden / "mm_25_tp1_pp2_vpp2", hf_config={"hf_dir": str(golden / "hf_qwen2_5_vl")}).equal


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_two_splits_of_one_model_are_equal(family, tied, kit, tmp_path):
    hf = kit.write_hf(tmp_path / "hf", family=family, tied=tied)
    kit.to_mm(hf, tmp_path / "a", family=family, tp_size=2, llm_pp_layers=[1, 3], vit_pp_layers=[4, 0])
    kit.to_mm(hf, tmp_path / "b", family=family, llm_pp_layers=[[0, 1], [1, 2]], vit_pp_layers=[[3, 1], [0, 0]])
    for first, second in (("hf", "a"), ("a", "b"), ("b", "hf")):
        verdict = compare(tmp_path / first, tmp_path / second)
        assert verdict.equal and verdict.tensors == (104 if tied else 105) + (family == "qwen2_vl"), str(verdict)


def test_the_first_difference_is_named_with_index_and_values(kit, pair):
    hf, other = pair

    def change(tensors):
        tensors["model.norm.weight"].zero_()
        tensors["model.norm.weight"][3] = 1.0
        tensors["model.norm.weight"][5] = -0.5

    kit.edit(hf, lambda tensors: tensors["model.norm.weight"].zero_())
    kit.edit(other, change)
    verdict = compare(hf, other)
    assert not verdict.equal and verdict.exit_code == 1
    (found,) = verdict.differing
    assert (found.name, found.where.index, found.where.first, found.where.second) == (NORM, (3,), 0.0, 1.0)
    assert (found.differing, found.largest, found.relative) == (2, 1.0, 1.0)
    text = str(verdict)
    assert f"first difference: {NORM} at [3]: 0.0 and 1.0" in text
    assert f"2 of {verdict.elements} elements differ, in 1 of 105 tensors: {NORM}" in text
    assert f"largest difference 1 ({NORM})" in text


def test_a_difference_in_one_rank_file_is_found_at_its_canonical_place(kit, tmp_path):
    hf = kit.write_hf(tmp_path / "hf")
    kit.to_mm(hf, tmp_path / "mm", tp_size=2, llm_pp_layers=[1, 3], vit_pp_layers=[4, 0])
    file = kit.rank_file(tmp_path / "mm", "mp_rank_01_001")
    state = torch.load(file, weights_only=True)
    state["model"]["text_decoder.decoder.layers.1.mlp.linear_fc2.weight"][7, 0] = 100.0
    torch.save(state, file)
    (found,) = compare(hf, tmp_path / "mm").differing
    width = kit.hf_tensors(hf)["model.layers.2.mlp.down_proj.weight"].shape[1]
    assert (found.name, found.where.index, found.where.second) == (DOWN, (7, width // 2), 100.0)


def test_bits_count_also_where_values_are_equal(kit, pair):
    hf, other = pair
    kit.edit(hf, lambda tensors: tensors["model.norm.weight"].zero_())
    kit.edit(other, lambda tensors: tensors["model.norm.weight"].zero_().neg_())
    (found,) = compare(hf, other).differing
    assert found.differing == 32 and found.largest == 0.0 and math.copysign(1, found.where.second) == -1


def test_nan_and_infinity_are_equal_to_themselves_and_reported(kit, pair):
    hf, other = pair

    def spoil(tensors):
        tensors["model.norm.weight"][:3] = torch.tensor([math.nan, math.nan, -math.inf])

    kit.edit(hf, spoil)
    kit.edit(other, spoil)
    verdict = compare(hf, other)
    assert verdict.equal
    assert f"not finite: {NORM}: 2 NaN, 1 infinite in the first and 2 NaN, 1 infinite in the second" in str(verdict)
    kit.edit(other, lambda tensors: tensors["model.norm.weight"].fill_(1))
    verdict = compare(hf, other)
    assert verdict.differing[0].differing >= 3 and "2 NaN, 1 infinite in the first and 0 NaN, 0 infinite in the second" in str(verdict)
    assert json.loads(json.dumps(verdict.as_dict(), allow_nan=False))["differing"][0]["where"]["first"] == "nan"


def test_missing_names_shapes_and_types_are_told_apart(kit, pair):
    hf, other = pair

    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.extra.weight"] = torch.zeros(2)
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:64].contiguous()
        tensors["lm_head.weight"] = tensors["lm_head.weight"].float()

    kit.edit(other, change)
    verdict = compare(hf, other)
    assert verdict.missing == (["model.language_model.extra.weight"], [NORM])
    assert verdict.shapes == ["model.language_model.embed_tokens.weight: [320, 32] and [64, 32]"]
    assert verdict.dtypes == ["lm_head.weight: bfloat16 and float32"]
    text = str(verdict)
    assert f"1 missing in the second: {NORM}" in text and "1 of another element type: lm_head.weight: bfloat16 and float32" in text
    assert verdict.exit_code == 1 and not verdict.differing
    assert not compare(hf, other, ignore_dtype=True).dtypes


def test_other_types_are_compared_exactly_when_asked(kit, pair):
    hf, other = pair
    kit.edit(other, lambda tensors: tensors.update({name: tensor.float() for name, tensor in tensors.items()}))
    assert len(compare(hf, other).dtypes) == 105
    assert compare(hf, other, ignore_dtype=True).equal
    kit.edit(other, lambda tensors: tensors["lm_head.weight"][9, 9].add_(1e-6))
    assert [found.name for found in compare(hf, other, ignore_dtype=True).differing] == ["lm_head.weight"]


def test_tolerance_is_relative_to_the_larger_magnitude(kit, pair):
    hf, other = pair
    kit.edit(hf, lambda tensors: tensors["model.norm.weight"].fill_(64.0))
    kit.edit(other, lambda tensors: tensors["model.norm.weight"].fill_(64.5))
    assert not compare(hf, other).equal
    assert compare(hf, other, tolerance=0.5 / 64.5).equal
    assert not compare(hf, other, tolerance=0.49 / 64.5).equal
    kit.edit(other, lambda tensors: tensors["model.norm.weight"].fill_(math.nan))
    assert not compare(hf, other, tolerance=1.0).equal


def test_a_repeated_tied_head_equals_its_absence(kit, tmp_path):
    hf = kit.write_hf(tmp_path / "hf", tied=True)
    shutil.copytree(hf, tmp_path / "with_head")
    kit.edit(tmp_path / "with_head", lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    for first, second in (("hf", "with_head"), ("with_head", "hf")):
        verdict = compare(tmp_path / first, tmp_path / second)
        assert verdict.equal and verdict.tensors == 105
        assert f"lm_head.weight is in {tmp_path / 'with_head'} only; {hf} ties the head to model.language_model.embed_tokens.weight" in str(verdict)
    kit.edit(tmp_path / "with_head", lambda tensors: tensors["lm_head.weight"][5, 2].add_(1))
    verdict = compare(hf, tmp_path / "with_head")
    assert (verdict.differing[0].name, verdict.differing[0].where.index) == ("lm_head.weight", (5, 2))


def test_both_key_layouts_are_the_same_names(kit, pair):
    hf, other = pair
    tensors = load_file(other / "model.safetensors")
    new = {f"model.{n}" if n.startswith("visual.") else n.replace("model.", "model.language_model.", 1): t for n, t in tensors.items()}
    save_file(new, other / "model.safetensors")
    assert compare(hf, other).equal


def test_workers_and_slabs_do_not_change_the_verdict(kit, pair, monkeypatch):
    hf, other = pair
    kit.edit(other, lambda tensors: tensors["model.embed_tokens.weight"][200, 3].add_(1))
    monkeypatch.setattr("tangram.checkpoints.verify.SLAB", 61)
    verdicts = [verify(open_checkpoint(hf), open_checkpoint(other), workers=workers) for workers in (1, 4)]
    for verdict in verdicts:
        assert [(found.where.index, found.differing) for found in verdict.differing] == [((200, 3), 1)]


def test_progress_counts_bytes(golden):
    seen = []
    verify(open_checkpoint(golden / "hf_qwen2_vl"), open_checkpoint(golden / "hf_qwen2_vl"), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (288_512, 288_512) and [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_the_command(kit, pair, capsys):
    hf, other = pair
    assert main(["verify", str(hf), str(other)]) == 0
    assert capsys.readouterr().out.startswith("equal: 105 tensors")
    kit.edit(other, lambda tensors: tensors["model.norm.weight"].fill_(9))
    assert main(["verify", str(hf), str(other), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["equal"] is False and report["differing"][0]["name"] == NORM
    assert main(["verify", str(hf), str(other.parent / "none")]) == 2
    assert "none: no such folder; give a folder of weights" in capsys.readouterr().err


def test_a_damaged_file_ends_in_one_line(kit, pair, capsys):
    hf, other = pair
    file = other / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert main(["verify", str(hf), str(other)]) == 2
    assert "it is truncated, copy or download it again" in capsys.readouterr().err


def test_a_converter_of_another_family_refuses(golden):
    options = VerifyOptions(source_dir=str(golden / "hf_qwen2_vl"), target_dir=str(golden / "hf_qwen2_vl"))
    with pytest.raises(ConfigError, match="is a qwen2_vl model but the converter is for qwen2_5_vl; use the converter for qwen2_vl"):
        run_verify(options, ("qwen2_5_vl",))
