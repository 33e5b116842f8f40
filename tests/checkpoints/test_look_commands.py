"""verify, inspect and the LoRA commands as users type them, and directories of every form."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from tangram.checkpoints.find_split import find_split
from tangram.checkpoints.inspect import inspect
from tangram.checkpoints.look_options import VerifyOptions
from tangram.checkpoints.verify import run_verify
from tangram.cli.mm_convert import main
from tests.weights_kit import write_adapter

CONVERTER = "Qwen2_5_VLConverter"


def test_lora_there_back_and_merged(kit, tmp_path, capsys):
    base = kit.write_hf(tmp_path / "base")
    adapter = write_adapter(tmp_path / "lora", base)
    split = ["--cfg.parallel_config.tp_size", "2", "--cfg.parallel_config.llm_pp_layers", "[[1,3]]", "--cfg.parallel_config.vit_pp_layers", "[4,0]"]
    mm, back, merged = (str(tmp_path / name) for name in ("mm", "back", "merged"))
    assert main([CONVERTER, "lora_hf_to_mm", "--cfg.hf_config.hf_dir", str(adapter), "--cfg.mm_dir", mm, *split, "--dry-run"]) == 0
    assert "would write 4 weight file(s)" in capsys.readouterr().out and not (tmp_path / "mm").exists()
    assert main([CONVERTER, "lora_hf_to_mm", "--cfg.hf_config.hf_dir", str(adapter), "--cfg.mm_dir", mm, *split]) == 0
    assert main([CONVERTER, "lora_mm_to_hf", "--cfg.mm_dir", mm, "--cfg.save_hf_dir", back]) == 0
    assert (tmp_path / "back" / "adapter_model.safetensors").read_bytes() == (adapter / "adapter_model.safetensors").read_bytes()
    assert main([CONVERTER, "lora_merge", "--cfg.lora_dir", mm, "--cfg.hf_config.hf_dir", str(base), "--cfg.save_hf_dir", merged]) == 0
    capsys.readouterr()
    assert main(["verify", str(base), merged, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert len(report["differing"]) == 4 * 6 + 4 * 3 and not report["missing"][0] + report["missing"][1]
    assert main([CONVERTER, "inspect", "--cfg.mm_dir", mm]) == 0
    shown = capsys.readouterr().out
    assert "LoRA adapter, mp_rank directory" in shown and "[[1, 3]]" in shown
    assert main([CONVERTER, "verify", "--cfg.source_dir", str(adapter), "--cfg.target_dir", mm]) == 0


def test_merged_weights_can_be_cut_and_cast(kit, tmp_path):
    base = kit.write_hf(tmp_path / "base", dtype=torch.float32)
    adapter = write_adapter(tmp_path / "lora", base)
    command = [CONVERTER, "lora_merge", "--cfg.lora_dir", str(adapter), "--cfg.hf_config.hf_dir", str(base)]
    assert main([*command, "--cfg.save_hf_dir", str(tmp_path / "a")]) == 0
    assert main([*command, "--cfg.save_hf_dir", str(tmp_path / "b"), "--dtype", "bfloat16", "--max-shard-size", "100KB"]) == 0
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 1
    one, other = kit.hf_tensors(tmp_path / "a"), kit.hf_tensors(tmp_path / "b")
    assert set(one) == set(other) and all(torch.equal(other[name], one[name].bfloat16()) for name in one)


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["verify", "/nowhere/a", "/nowhere/b"], 2, "/nowhere/a: no such folder; give a folder of weights"),
        (["verify", "only-one"], 2, "the following arguments are required: SECOND; see mm-convert verify --help"),
        (["verify", "a", "b", "--tolerence", "1"], 2, "unknown argument '--tolerence' (did you mean '--tolerance'?)"),
        (["verify", "a", "b", "--tolerance", "nan"], 2, "--tolerance"),
        (["inspect"], 2, "the following arguments are required: DIR"),
        ([CONVERTER, "inspect"], 2, "give one of them"),
        ([CONVERTER, "inspec"], 2, "unknown command 'inspec' (did you mean 'inspect'?)"),
        ([CONVERTER, "lora_merge", "--cfg.lora_dir", "x"], 2, "required: --cfg.hf_config.hf_dir, --cfg.save_hf_dir"),
        ([CONVERTER, "lora_hf_to_mm", "--cfg.hf_config.hf_dir", "/nowhere", "--cfg.mm_dir", "x"], 1, "/nowhere/adapter_config.json: no such file"),
    ],
)
def test_faults_are_one_line(words, status, message, capsys):
    assert main(words) == status
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and message in shown.err


@pytest.mark.parametrize("words", [["verify"], ["inspect"], [CONVERTER, "verify"], [CONVERTER, "inspect"], [CONVERTER, "lora_merge"]])
def test_help_comes_without_torch(words):
    words = [*words, "--help"]
    heavy = {"torch", "transformers", "megatron", "numpy"}
    code = f"import sys\nfrom tangram.cli.mm_convert import main\ntry: main({words!r})\nexcept SystemExit as e: assert not e.code\n"
    code += f"assert not {heavy!r} & set(sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=250)
    assert ended.returncode == 0 and "usage: mm-convert" in ended.stdout, ended.stderr


def test_directories_of_every_form_are_opened(kit, tmp_path):
    """Unfused, the vision encoder alone, another tensor-parallel size for vision; with the manifest and, where the names tell enough, without."""
    hf = kit.write_hf(tmp_path / "hf")
    convert = [CONVERTER, "hf_to_mm", "--cfg.hf_config.hf_dir", str(hf)]
    forms = {
        "unfused": ["--cfg.common_model_config.enable_canonical_hf_struct", "true", "--cfg.parallel_config.llm_pp_layers", "[1,3]"],
        "vision": ["--cfg.save_vit_only", "true", "--cfg.parallel_config.tp_size", "2"],
        "vision_tp": ["--cfg.parallel_config.tp_size", "2", "--cfg.parallel_config.vit_tp_size", "1"],
    }
    for name, options in forms.items():
        mm = tmp_path / name
        assert main([*convert, "--cfg.mm_dir", str(mm), *options]) == 0
        assert inspect(mm).problems == []
        verdict = run_verify(VerifyOptions(source_dir=str(hf), target_dir=str(mm)))
        text = [] if name != "vision" else [n for n in verdict.missing[1] if not n.startswith("model.visual.")]
        assert verdict.missing == ([], text) and not verdict.differing and verdict.tensors > 40
        if name != "vision_tp":
            (mm / "tangram_manifest.json").unlink()
            found = run_verify(VerifyOptions(source_dir=str(hf), target_dir=str(mm)))
            assert (found.tensors, found.differing) == (verdict.tensors, [])
    assert inspect(tmp_path / "unfused").split["canonical_form"] and inspect(tmp_path / "vision").split["vit_only"]


def test_packed_vision_qkv_is_split_as_the_unfused_base_is(kit, tmp_path):
    """At tensor-parallel size 2 a rank's rows of B belong to the same heads of q, k and v as its rows of the base's packed weight."""
    base = kit.write_hf(tmp_path / "base")
    adapter = write_adapter(tmp_path / "lora", base, targets=("attn.qkv",))
    split = ["--cfg.parallel_config.tp_size", "2"]
    unfused = ["--cfg.common_model_config.enable_canonical_hf_struct", "true"]
    assert main([CONVERTER, "lora_hf_to_mm", "--cfg.hf_config.hf_dir", str(adapter), "--cfg.mm_dir", str(tmp_path / "lmm"), *split]) == 0
    assert main([CONVERTER, "hf_to_mm", "--cfg.hf_config.hf_dir", str(base), "--cfg.mm_dir", str(tmp_path / "bmm"), *split, *unfused]) == 0
    module = "image_encoder.encoder.blocks.layers.3.self_attention.linear_qkv"
    whole_w = kit.hf_tensors(base)["visual.blocks.3.attn.qkv.weight"]
    whole_b = load_file(adapter / "adapter_model.safetensors")["base_model.model.visual.blocks.3.attn.qkv.lora_B.weight"]
    for rank in ("mp_rank_00", "mp_rank_01"):
        rows = kit.load_rank(tmp_path / "bmm", rank)["model"][f"{module}.weight"]
        order = [int((whole_w == row).all(dim=1).nonzero()[0, 0]) for row in rows]
        assert torch.equal(kit.load_rank(tmp_path / "lmm", rank)["model"][f"{module}.lora_B.default.weight"], whole_b[order])


def test_experts_and_stages_are_told_apart_by_the_embedding(tmp_path):
    """Folders of one number after the tensor rank: expert-parallel ranks all hold the embedding, stages do not."""
    names = {"text_decoder.embedding.word_embeddings.weight": torch.zeros(8, 2), "text_decoder.decoder.layers.0.mlp.router.weight": torch.zeros(2, 2)}
    for part in (0, 1):
        folder = tmp_path / "release" / f"mp_rank_00_{part:03}"
        folder.mkdir(parents=True)
        torch.save({"model": names, "checkpoint_version": 3.0}, folder / "model_optim_rng.pt")
    found = find_split(tmp_path / "release")
    assert (found.tensor, found.expert, found.llm_pp_layers, found.padded_vocab) == (1, 2, [[1]], 8)
    del names["text_decoder.embedding.word_embeddings.weight"]
    torch.save({"model": names, "checkpoint_version": 3.0}, tmp_path / "release" / "mp_rank_00_001" / "model_optim_rng.pt")
    found = find_split(tmp_path / "release")
    assert (found.tensor, found.expert, found.llm_pp_layers) == (1, 1, [[1, 1]])
