"""resplit: hand-worked layers, tied copies, padding, refusals."""

from __future__ import annotations

import json

import pytest
import torch

from tangram.checkpoints.manifest import check_manifest, read_manifest
from tangram.cli.mm_convert import main
from tangram.errors import CheckpointError
from tangram.families import get_family
from tangram.placement.topology import Topology

CONVERTER = "Qwen2_5_VLConverter"
HEAD, EMBEDDING = "text_decoder.output_layer.weight", "text_decoder.embedding.word_embeddings.weight"


def resplit(source, target, *options):
    return main([CONVERTER, "resplit", "--cfg.source_dir", str(source), "--cfg.target_dir", str(target), *map(str, options)])


def target(**split):
    return [word for key, value in split.items() for word in (f"--cfg.target_parallel_config.{key}", json.dumps(value))]


@pytest.mark.parametrize(("layers", "global_number"), [([2, 2], 2), ([1, 3], 1), ([[2, 2]], 2)])
def test_later_stages_hold_the_later_layers(layers, global_number, kit, tmp_path):
    """Every layer is filled with its own number; the second stage's first layer must hold the number it has in the whole model."""

    def number(name, shape):
        parts = name.split(".")
        return torch.full(shape, float(parts[parts.index("layers") + 1])) if "layers" in parts else torch.zeros(shape)

    kit.to_mm(kit.write_hf(tmp_path / "hf", fill=number), tmp_path / "mm")
    assert resplit(tmp_path / "mm", tmp_path / "out", *target(llm_pp_layers=layers, vit_pp_layers=[4, 0])) == 0
    second = kit.load_rank(tmp_path / "out", "mp_rank_00_001")["model"]
    assert (second["text_decoder.decoder.layers.0.mlp.linear_fc2.weight"] == global_number).all()


def test_tied_copies_come_and_go_with_the_stages_and_padding_with_its_unit(kit, tmp_path):
    kit.to_mm(kit.write_hf(tmp_path / "hf", tied=True), tmp_path / "one")
    assert resplit(tmp_path / "one", tmp_path / "two", *target(llm_pp_layers=[1, 1, 1, 1], tp_size=2, make_vocab_size_divisible_by=128)) == 0
    ranks = [kit.load_rank(tmp_path / "two", f"mp_rank_01_00{pp}")["model"] for pp in range(4)]
    assert [HEAD in rank for rank in ranks] == [False, False, False, True]
    assert ranks[3][HEAD].shape == (256, 32), "320 rows padded to 512, half of them"
    assert torch.equal(ranks[3][HEAD], ranks[0][EMBEDDING])
    assert resplit(tmp_path / "two", tmp_path / "back") == 0
    kit.assert_same(kit.load_rank(tmp_path / "back", "mp_rank_00")["model"], kit.load_rank(tmp_path / "one", "mp_rank_00")["model"])
    manifests = [json.loads((tmp_path / name / "tangram_manifest.json").read_text()) for name in ("one", "back")]
    assert manifests[0] == manifests[1]


def test_virtual_stages_on_both_sides(golden, kit, tmp_path):
    """The source was made by another converter and has no manifest."""
    source = [
        *("--cfg.source_parallel_config.llm_pp_layers", "[[1,1],[1,1]]", "--cfg.source_parallel_config.vit_pp_layers", "[[4,0],[0,0]]"),
        *("--cfg.hf_config.hf_dir", golden / "hf_qwen2_5_vl"),
    ]
    assert resplit(golden / "mm_25_tp1_pp2_vpp2", tmp_path / "out", *source, *target(llm_pp_layers=[1, 3], vit_pp_layers=[4, 0], tp_size=2)) == 0
    for rank in (golden / "mm_25_tp2_pp2" / "release").iterdir():
        kit.assert_same(kit.load_rank(tmp_path / "out", rank.name)["model"], kit.load_rank(golden / "mm_25_tp2_pp2", rank.name)["model"])


def test_a_source_without_manifest_needs_a_config(golden, tmp_path, capsys):
    assert resplit(golden / "mm_2_tp2_pp1", tmp_path / "out") == 1
    assert "has no tangram_manifest.json, so nothing says which model it holds; add --cfg.hf_config.hf_dir" in capsys.readouterr().err


def test_options_that_the_manifest_contradicts_are_refused_with_both_values(kit, tmp_path, capsys):
    kit.to_mm(kit.write_hf(tmp_path / "hf"), tmp_path / "mm", tp_size=2)
    assert resplit(tmp_path / "mm", tmp_path / "out", "--cfg.source_parallel_config.tp_size", "4") == 1
    assert "tp_size is 2 in the manifest but 4 by the options" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_file_of_the_source_that_lacks_a_parameter_is_refused(kit, tmp_path, capsys):
    kit.to_mm(kit.write_hf(tmp_path / "hf"), tmp_path / "mm", tp_size=2)
    state = kit.load_rank(tmp_path / "mm", "mp_rank_01")
    del state["model"]["text_decoder.decoder.final_layernorm.weight"]
    torch.save(state, kit.rank_file(tmp_path / "mm", "mp_rank_01"))
    assert resplit(tmp_path / "mm", tmp_path / "out") == 1
    error = capsys.readouterr().err
    assert "1 missing: text_decoder.decoder.final_layernorm.weight" in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


FORMS = {
    "canonical": (["--cfg.common_model_config.enable_canonical_hf_struct", "true"], "enable_canonical_hf_struct is True in the converter manifest"),
    "vision alone": (["--cfg.save_vit_only", "true"], "save_vit_only is True in the converter manifest but False by training"),
    "vision size": (target(tp_size=2, vit_tp_size=1), "vit_tp_size is 1 in the converter manifest but 2"),
}


@pytest.mark.parametrize("form", FORMS)
def test_training_refuses_forms_that_it_cannot_load(form, kit, tmp_path):
    options, expected = FORMS[form]
    kit.to_mm(kit.write_hf(tmp_path / "hf"), tmp_path / "mm")
    assert resplit(tmp_path / "mm", tmp_path / "out", *options) == 0
    model = get_family("qwen2_5_vl").from_hf_config(json.loads((tmp_path / "hf" / "config.json").read_text()))
    run = Topology.build(vision_layers=4, text_layers=4, tensor=2 if form == "vision size" else 1)
    with pytest.raises(CheckpointError) as refused:
        check_manifest(read_manifest(tmp_path / "out"), run, model)
    assert expected in str(refused.value)


def test_a_manifest_of_before_these_forms_is_read(kit, tmp_path):
    kit.to_mm(kit.write_hf(tmp_path / "hf"), tmp_path / "mm")
    file = tmp_path / "mm" / "tangram_manifest.json"
    content = json.loads(file.read_text())
    for key in ("expert_parallel", "vision_tensor_parallel", "canonical_form", "vit_only"):
        del content[key]
    file.write_text(json.dumps(content))
    assert resplit(tmp_path / "mm", tmp_path / "out") == 0
    assert read_manifest(tmp_path / "mm").topology == read_manifest(tmp_path / "out").topology
