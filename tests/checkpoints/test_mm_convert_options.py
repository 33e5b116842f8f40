"""Every option of mm-convert changes what is written, and every fault of the weights is one line, exit code 1 and no directory."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from tangram.cli.mm_convert import main

CONVERTER = "Qwen2_5_VLConverter"
VISION = "image_encoder.encoder.blocks.layers.0.self_attention."
TEXT = "text_decoder.decoder.layers.0."


def to_mm(hf, mm, *options):
    return main([CONVERTER, "hf_to_mm", "--cfg.hf_config.hf_dir", str(hf), "--cfg.mm_dir", str(mm), *map(str, options)])


def to_hf(mm, hf, out, *options):
    words = ["--cfg.mm_dir", str(mm), "--cfg.hf_config.hf_dir", str(hf), "--cfg.save_hf_dir", str(out)]
    return main([CONVERTER, "mm_to_hf", *words, *map(str, options)])


CANONICAL = ("--cfg.common_model_config.enable_canonical_hf_struct", "true")
TP2 = ("--cfg.parallel_config.tp_size", "2")


def test_canonical_form_keeps_projections_apart_and_splits_whole_heads(kit, tmp_path):
    """4 vision heads of 8 in a width of 32: q is rows 0..31, k 32..63, v 64..95; rank 1 of 2 holds heads 2 and 3 of each."""
    hf, mm = kit.write_hf(tmp_path / "hf", heads=4, groups=2, hidden=32), tmp_path / "mm"
    assert to_mm(hf, mm, *TP2, *CANONICAL) == 0
    second, whole = kit.load_rank(mm, "mp_rank_01")["model"], kit.hf_tensors(hf)
    rows = [*range(16, 32), *range(48, 64), *range(80, 96)]
    assert torch.equal(second[f"{VISION}linear_qkv.weight"], whole["visual.blocks.0.attn.qkv.weight"][rows])
    assert torch.equal(second[f"{VISION}linear_qkv.bias"], whole["visual.blocks.0.attn.qkv.bias"][rows])
    for name in ("q_proj.weight", "k_proj.bias", "v_proj.weight"):
        part = whole[f"model.layers.0.self_attn.{name}"]
        assert torch.equal(second[f"{TEXT}self_attention.{name}"], part[len(part) // 2 :])
    for name in ("gate_proj", "up_proj"):
        part = whole[f"visual.blocks.0.mlp.{name}.weight"]
        assert torch.equal(second[f"image_encoder.encoder.blocks.layers.0.mlp.{name}.weight"], part[len(part) // 2 :])
        assert f"{TEXT}mlp.{name}.weight" in second
    assert not [name for name in second if "linear_fc1" in name and "projector" not in name]
    assert to_hf(mm, hf, tmp_path / "back") == 0
    kit.assert_same(kit.hf_tensors(tmp_path / "back"), whole)


def test_canonical_form_refuses_half_a_key_head(kit, tmp_path, capsys):
    hf = kit.write_hf(tmp_path / "hf", heads=4, groups=2)
    assert to_mm(hf, tmp_path / "mm", "--cfg.parallel_config.tp_size", "4", *CANONICAL) == 1
    assert "number of key/value heads 2 is not divisible by tensor-parallel size 4" in capsys.readouterr().err


def test_without_a_manifest_the_order_of_packed_rows_is_not_guessed(kit, tmp_path, capsys):
    hf, mm = kit.write_hf(tmp_path / "hf"), tmp_path / "mm"
    assert to_mm(hf, mm, *TP2, *CANONICAL) == 0
    (mm / "tangram_manifest.json").unlink()
    assert to_hf(mm, hf, tmp_path / "back", *TP2, *CANONICAL) == 1
    assert "nothing in the files tells how the rows" in capsys.readouterr().err and not (tmp_path / "back").exists()


def test_the_vision_encoder_has_its_own_tensor_parallel_size(kit, tmp_path):
    hf, mm = kit.write_hf(tmp_path / "hf"), tmp_path / "mm"
    assert to_mm(hf, mm, *TP2, "--cfg.parallel_config.vit_tp_size", "1") == 0
    ranks = [kit.load_rank(mm, f"mp_rank_0{rank}")["model"] for rank in (0, 1)]
    assert ranks[0][f"{VISION}linear_qkv.weight"].shape == (96, 32)
    assert torch.equal(ranks[0][f"{VISION}linear_qkv.weight"], ranks[1][f"{VISION}linear_qkv.weight"])
    assert ranks[0]["text_decoder.output_layer.weight"].shape == (160, 32)
    assert to_hf(mm, hf, tmp_path / "back") == 0
    kit.assert_same(kit.hf_tensors(tmp_path / "back"), kit.hf_tensors(hf))


@pytest.mark.parametrize("stages", ["[4]", "[2,2]"])
def test_the_vision_encoder_alone(stages, kit, tmp_path, capsys):
    hf, mm, out, alone = kit.write_hf(tmp_path / "hf"), tmp_path / "mm", tmp_path / "out", ("--cfg.save_vit_only", "true")
    assert to_mm(hf, mm, "--cfg.parallel_config.llm_pp_layers", stages, *alone) == 0
    first = kit.load_rank(mm, "mp_rank_00" if stages == "[4]" else "mp_rank_00_000")["model"]
    assert first and all(name.startswith("image_encoder.") for name in first)
    assert to_hf(mm, hf, out) == 1
    assert "holds the vision encoder alone; add --cfg.save_vit_only true" in capsys.readouterr().err
    assert to_hf(mm, hf, out, *alone) == 0
    vision = {name: tensor for name, tensor in kit.hf_tensors(hf).items() if name.startswith("visual.")}
    kit.assert_same(kit.hf_tensors(out), vision)
    assert to_mm(out, tmp_path / "again", *alone) == 0


def text_model(kit, path, source, **changes):
    """The text decoder of a directory as a text-only model with other values."""
    config = json.loads((source / "config.json").read_text())["text_config"] | changes
    tensors = {name: tensor + 1 for name, tensor in kit.hf_tensors(source).items() if not name.startswith("visual.")}
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config | {"model_type": "qwen2"}))
    return tensors


@pytest.mark.parametrize("option", ["--cfg.llm_hf_config.hf_dir", "--cfg.common_model_config.llm_hf_dir"])
def test_another_language_model_replaces_the_text_decoder_alone(option, kit, tmp_path):
    hf, mm = kit.write_hf(tmp_path / "hf"), tmp_path / "mm"
    text = text_model(kit, tmp_path / "llm", hf)
    assert to_mm(hf, mm, *TP2, option, tmp_path / "llm") == 0
    assert to_hf(mm, hf, tmp_path / "out") == 0
    kit.assert_same(kit.hf_tensors(tmp_path / "out"), {**kit.hf_tensors(hf), **text})


def test_a_tied_language_model_gives_its_embedding_as_head(kit, tmp_path):
    hf, mm = kit.write_hf(tmp_path / "hf"), tmp_path / "mm"
    text = text_model(kit, tmp_path / "llm", hf, tie_word_embeddings=True)
    kit.edit(tmp_path / "llm", lambda tensors: tensors.pop("lm_head.weight"))
    assert to_mm(hf, mm, "--cfg.llm_hf_config.hf_dir", tmp_path / "llm") == 0
    assert torch.equal(kit.load_rank(mm, "mp_rank_00")["model"]["text_decoder.output_layer.weight"], text["model.embed_tokens.weight"])


def test_a_language_model_of_other_sizes_is_refused_with_both_numbers(kit, tmp_path, capsys):
    hf = kit.write_hf(tmp_path / "hf")
    text_model(kit, tmp_path / "llm", hf, num_hidden_layers=3, vocab_size=99)
    assert to_mm(hf, tmp_path / "mm", "--cfg.llm_hf_config.hf_dir", tmp_path / "llm") == 1
    error = capsys.readouterr().err
    assert "num_hidden_layers is 3 there but 4 in the vision-language model; vocab_size is 99 there but 320" in error
    assert not (tmp_path / "mm").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is gelu there but silu"),
        ({"head_dim": 16}, "head_dim is 16 there but 4"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling is yarn there but default"),
        ({"use_sliding_window": True}, "use_sliding_window is True there but False"),
        ({"rope_theta": None, "rope_scaling": None, "rope_parameters": None}, "rope_theta is 10000.0 there but 1000000.0"),
    ],
)
def test_a_language_model_that_computes_otherwise_is_refused(changes, message, kit, tmp_path, capsys):
    """What its config leaves out is as transformers' Qwen2Config has it: rope_theta 10000."""
    hf = kit.write_hf(tmp_path / "hf")
    text_model(kit, tmp_path / "llm", hf, **changes)
    assert to_mm(hf, tmp_path / "mm", "--cfg.llm_hf_config.hf_dir", tmp_path / "llm") == 1
    assert message in capsys.readouterr().err and not (tmp_path / "mm").exists()


def test_experts_that_the_model_has_not_are_not_split(kit, tmp_path, capsys):
    assert to_mm(kit.write_hf(tmp_path / "hf"), tmp_path / "mm", "--cfg.parallel_config.ep_size", "2") == 1
    assert "ep_size 2: the model has no experts; leave the option out" in capsys.readouterr().err


def test_a_language_model_that_lacks_a_tensor_is_refused(kit, tmp_path, capsys):
    hf = kit.write_hf(tmp_path / "hf")
    text_model(kit, tmp_path / "llm", hf)
    kit.edit(tmp_path / "llm", lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"))
    assert to_mm(hf, tmp_path / "mm", "--cfg.llm_hf_config.hf_dir", tmp_path / "llm") == 1
    assert "1 missing: model.language_model.layers.2.mlp.up_proj.weight" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "kind"), [("bf16", torch.bfloat16), ("float16", torch.float16)])
def test_a_narrowing_cast_says_that_it_is_lossy(name, kind, kit, tmp_path, capsys):
    """1 + 2^-12 needs 12 bits after the point: fp32 has them, bf16 (7) and fp16 (10) round it to 1."""
    hf, mm = kit.write_hf(tmp_path / "hf", dtype=torch.float32, fill=lambda name, shape: torch.full(shape, 1 + 2**-12)), tmp_path / "mm"
    assert to_mm(hf, mm, "--dtype", name) == 0
    assert "105 tensors are cast from float32 to" in (said := capsys.readouterr().out) and "lossy" in said
    norm = kit.load_rank(mm, "mp_rank_00")["model"]["text_decoder.decoder.final_layernorm.weight"]
    assert norm.dtype == kind and (norm == 1).all()
    assert to_hf(mm, hf, tmp_path / "out", "--dtype", "fp32") == 0
    assert "lossy" not in capsys.readouterr().out
    assert {tensor.dtype for tensor in kit.hf_tensors(tmp_path / "out").values()} == {torch.float32}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


def test_largest_shard(kit, tmp_path):
    hf, mm = kit.write_hf(tmp_path / "hf"), tmp_path / "mm"
    assert to_mm(hf, mm) == 0
    assert to_hf(mm, hf, tmp_path / "out", "--max-shard-size", "76KB") == 0
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    sizes = [sum(tensor.nbytes for tensor in load_file(file).values()) for file in files]
    assert len(files) == 4 and max(sizes) <= 76_000
    kit.assert_same(kit.hf_tensors(tmp_path / "out"), kit.hf_tensors(hf))


def test_dry_run_says_every_file_and_size_and_writes_nothing(kit, tmp_path, capsys):
    hf, mm = kit.write_hf(tmp_path / "hf"), tmp_path / "mm"
    before = kit.files(tmp_path)
    assert to_mm(hf, mm, *TP2, "--dry-run") == 0
    said = capsys.readouterr().out
    assert kit.files(tmp_path) == before
    assert to_mm(hf, mm, *TP2) == 0
    for rank in ("mp_rank_00", "mp_rank_01"):
        assert f"{kit.rank_file(mm, rank).stat().st_size} bytes  release/{rank}/model_optim_rng.pt" in said
    assert to_hf(mm, hf, tmp_path / "out", "--dry-run", "--workers", "4") == 0
    said = capsys.readouterr().out
    assert f"{(hf / 'model.safetensors').stat().st_size} bytes  model.safetensors" in said and not (tmp_path / "out").exists()


def drop(hf):
    tensors = load_file(hf / "model.safetensors")
    del tensors["visual.blocks.1.norm2.weight"]
    save_file(tensors, hf / "model.safetensors")


def add(hf):
    save_file({**load_file(hf / "model.safetensors"), "model.layers.0.mtp.weight": torch.ones(2)}, hf / "model.safetensors")


def reshape(hf):
    tensors = load_file(hf / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(31)
    save_file(tensors, hf / "model.safetensors")


def truncate(hf):
    os.truncate(hf / "model.safetensors", (hf / "model.safetensors").stat().st_size - 100)


def index(hf, name):
    keys = load_file(hf / "model.safetensors")
    (hf / "model.safetensors").rename(hf / "model-00001-of-00001.safetensors")
    (hf / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(keys, name)}))


DAMAGE = {
    "missing tensor": (drop, "1 missing: model.visual.blocks.1.norm2.weight"),
    "unknown tensor": (add, "1 unexpected: model.language_model.layers.0.mtp.weight"),
    "wrong shape": (reshape, "model.language_model.norm.weight has (31,) in the file and (32,) in the model"),
    "truncated file": (truncate, "it is truncated"),
    "index naming an absent file": (lambda hf: index(hf, "model-00009-of-00009.safetensors"), "model-00009-of-00009.safetensors"),
    "index out of the directory": (lambda hf: index(hf, "../secret.safetensors"), "'../secret.safetensors', which is not the plain name"),
    "no config": (lambda hf: (hf / "config.json").unlink(), "config.json: no such file"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_weights_end_in_one_line_and_no_directory(damage, kit, tmp_path, capsys):
    hf = kit.write_hf(tmp_path / "hf")
    spoil, expected = DAMAGE[damage]
    spoil(hf)
    for words in (["hf_to_mm", "--cfg.hf_config.hf_dir", str(hf), "--cfg.mm_dir"], ["hf_to_dcp", "--hf_dir", str(hf), "--dcp_dir"]):
        assert main([CONVERTER, *words, str(tmp_path / "out")]) == 1
        error = capsys.readouterr().err
        assert expected in error and error.count("\n") == 1
        assert [entry.name for entry in tmp_path.iterdir()] == ["hf"]


def test_an_output_with_content_is_left_alone(kit, tmp_path, capsys):
    hf, taken = kit.write_hf(tmp_path / "hf"), tmp_path / "taken"
    taken.mkdir()
    (taken / "mine").write_text("1")
    assert to_mm(hf, tmp_path / "mm") == 0
    source = ["--cfg.source_dir", str(tmp_path / "mm"), "--cfg.target_dir", str(taken)]
    for write in (lambda: to_mm(hf, taken), lambda: to_hf(tmp_path / "mm", hf, taken), lambda: main([CONVERTER, "resplit", *source])):
        assert write() == 1 and "exists already; remove it or write elsewhere" in capsys.readouterr().err
    assert kit.files(taken) == ["mine"]


def test_rows_of_a_gated_mlp_that_do_not_divide_are_refused(kit, tmp_path, capsys):
    """The published 3B and 7B have 3420 rows in the vision MLP: 427.5 at tensor-parallel size 8."""
    hf = kit.write_hf(tmp_path / "hf", heads=8, groups=8, hidden=64, vision={"intermediate_size": 3420, "num_heads": 8})
    assert to_mm(hf, tmp_path / "mm", "--cfg.parallel_config.tp_size", "8") == 1
    assert "feed-forward size 3420 is not divisible by tensor-parallel size 8" in capsys.readouterr().err
    assert not (tmp_path / "mm").exists()


def test_a_place_that_cannot_be_written_is_one_line(kit, tmp_path, capsys):
    assert to_mm(kit.write_hf(tmp_path / "hf"), "/proc/mm") == 1
    error = capsys.readouterr().err
    assert error.startswith("mm-convert: error: ") and "/proc/mm" in error and error.count("\n") == 1
