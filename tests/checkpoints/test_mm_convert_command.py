"""The mm-convert command as users type it: words, help, config files, and faults as one line with the right exit code."""

import subprocess
import sys
from pathlib import Path

import pytest

from tangram.cli.mm_convert import COMMANDS, CONVERTERS, main

CONVERTER = "Qwen2_5_VLConverter"
TOY = Path(__file__).parents[1] / "data" / "plugins" / "toy_vl"


def test_there_and_back(golden, kit, tmp_path, capsys):
    hf, mm, out = golden / "hf_qwen2_5_vl", tmp_path / "mm", tmp_path / "out"
    options = ["--cfg.hf_config.hf_dir", str(hf), "--cfg.mm_dir", str(mm), "--cfg.parallel_config.tp_size", "2"]
    nested = ["--cfg.parallel_config.llm_pp_layers", "[[1,3]]", "--cfg.parallel_config.vit_pp_layers", "[[4,0]]"]
    assert main([CONVERTER, "hf_to_mm", *options, *nested]) == 0
    assert capsys.readouterr().out == f"{mm}: 105 tensors, 4 model-parallel rank(s), 363008 bytes\n"
    flat = ["--cfg.parallel_config.llm_pp_layers", "[1,3]", "--cfg.parallel_config.vit_pp_layers", "[4,0]"]
    assert main([CONVERTER, "mm_to_hf", *options, *flat, "--cfg.save_hf_dir", str(out)]) == 0
    assert (out / "model.safetensors").read_bytes() == (hf / "model.safetensors").read_bytes()


def test_printed_config_is_read_back(golden, kit, tmp_path, capsys):
    options = ["--cfg.hf_config.hf_dir", str(golden / "hf_qwen2_vl"), "--cfg.mm_dir", str(tmp_path / "mm"), "--cfg.parallel_config.tp_size=2"]
    assert main(["Qwen2VLConverter", "hf_to_mm", *options, "--workers", "1", "--print_config"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "convert.yaml").write_text(printed)
    file = ["--config", str(tmp_path / "convert.yaml")]
    assert main(["Qwen2VLConverter", "hf_to_mm", *file, "--print_config"]) == 0
    assert capsys.readouterr().out == printed and "workers: 1\n" in printed
    assert main(["Qwen2VLConverter", "hf_to_mm", *file, "--cfg.parallel_config.llm_pp_layers", "[2,2]"]) == 0
    assert kit.files(tmp_path / "mm" / "release")[0::2] == [f"mp_rank_0{tp}_00{pp}" for tp in (0, 1) for pp in (0, 1)]


def test_printed_configs_of_the_commands_with_optional_parts_are_read_back(kit, pair, tmp_path, capsys):
    """What is not given is printed as null, and means the same as before when it is read."""
    base, adapter = pair
    kit.to_mm(base, tmp_path / "mm", tp_size=2, llm_pp_layers=[1, 3])
    (tmp_path / "mm" / "tangram_manifest.json").unlink()
    lora = ["--cfg.hf_config.hf_dir", str(adapter), "--cfg.mm_dir", str(tmp_path / "lora_mm")]
    assert main([CONVERTER, "lora_hf_to_mm", *lora]) == 0
    words = {
        "lora_mm_to_hf": ["--cfg.mm_dir", str(tmp_path / "lora_mm"), "--cfg.save_hf_dir", str(tmp_path / "back")],
        "verify": ["--cfg.source_dir", str(base), "--cfg.target_dir", str(tmp_path / "mm")],
        "inspect": ["--cfg.dir", str(tmp_path / "mm")],
    }
    for command, options in words.items():
        capsys.readouterr()
        assert main([CONVERTER, command, *options, "--print_config"]) == 0
        (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
        assert main([CONVERTER, command, "--config", str(tmp_path / "printed.yaml")]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_prints_a_config_of_all_its_options(command, capsys):
    assert main([CONVERTER, command, "--print_config"]) == 0
    template = capsys.readouterr().out
    assert "dry_run: false" in template and "null" in template


def test_a_family_of_a_plug_in_is_a_converter(kit, tmp_path, capsys):
    words = ["toy_vl", "hf_to_mm", "--cfg.mm_dir", str(tmp_path / "mm"), "--cfg.hf_config.hf_dir", str(kit.write_hf(tmp_path / "hf"))]
    assert main(["toy_v", *words[1:], "--plugin", str(TOY)]) == 2
    assert "unknown converter 'toy_v' (did you mean 'toy_vl'?)" in capsys.readouterr().err
    assert main([*words, "--plugin", str(TOY)]) == 1
    assert "is a qwen2_5_vl model but the converter is for toy_vl" in capsys.readouterr().err
    assert main(["HFConverter", *words[1:], "--plugin", str(TOY)]) == 0


HF = ["--cfg.mm_dir", "{tmp}/mm", "--cfg.hf_config.hf_dir", "{hf}"]
LAYERS = "--cfg.parallel_config.llm_pp_layers"
SYNTAX = {
    "unknown converter": (["Qwen2_5VLConverter", "hf_to_mm"], "unknown converter 'Qwen2_5VLConverter' (did you mean 'Qwen2_5_VLConverter'?)"),
    "unknown command": ([CONVERTER, "hf_to_m"], "unknown command 'hf_to_m' (did you mean 'hf_to_mm'?)"),
    "nothing": ([], "converter and command are missing", "Qwen2VLConverter", "resplit"),
    "no command": ([CONVERTER], "command is missing after Qwen2_5_VLConverter", "resplit"),
    "value missing": ([CONVERTER, "hf_to_mm", "--cfg.mm_dir", "--dry-run"], "--cfg.mm_dir needs a value"),
    "stray word": ([CONVERTER, "hf_to_mm", *HF, "8"], "unexpected word 8"),
    "remote code": ([CONVERTER, "hf_to_mm", *HF, "--cfg.trust_remote_code", "true"], "--cfg.trust_remote_code: ", "got True"),
    "size without a number": ([CONVERTER, "mm_to_hf", *HF, "--cfg.save_hf_dir", "x", "--max-shard-size", "GB"], "--max-shard-size: ", "'GB'"),
    "size of nothing": ([CONVERTER, "mm_to_hf", *HF, "--cfg.save_hf_dir", "x", "--max-shard-size", "0GB"], "'0GB' is less than one byte"),
    "size without end": ([CONVERTER, "mm_to_hf", *HF, "--cfg.save_hf_dir", "x", "--max-shard-size", "9" * 400], "--max-shard-size: "),
    "workers of one file": ([CONVERTER, "hf_to_dcp", "--hf_dir", "{hf}", "--dcp_dir", "{tmp}/x", "--workers", "3"], "unknown option --workers"),
    "unknown type": ([CONVERTER, "hf_to_mm", *HF, "--dtype", "bfloat"], "--dtype: ", "'bfloat'"),
    "two language models": (
        [CONVERTER, "hf_to_mm", *HF, "--cfg.llm_hf_config.hf_dir", "a", "--cfg.common_model_config.llm_hf_dir", "b"],
        "llm_hf_config.hf_dir a and common_model_config.llm_hf_dir b differ",
    ),
    "no plug-in": (["toy", "hf_to_mm", *HF, "--plugin", "/nowhere.py"], "plug-in /nowhere.py: no such file or folder"),
    "no options": ([CONVERTER, "hf_to_mm"], "required: ", "--cfg.mm_dir", "--cfg.hf_config.hf_dir"),
    "broken list": ([CONVERTER, "hf_to_mm", *HF, LAYERS, "[12,16"], f"{LAYERS}: [12,16 cannot be read; write [12,16] or [[12,16]]"),
    "words in a list": ([CONVERTER, "hf_to_mm", *HF, LAYERS, "[1,x]"], f"{LAYERS}: ", "'x' in [1, 'x'] is not a number of layers"),
    "negative layers": ([CONVERTER, "hf_to_mm", *HF, LAYERS, "[5,-1]"], "llm_pp_layers: layers per stage: -1 in [5, -1] is not a number of layers"),
    "size zero": ([CONVERTER, "hf_to_mm", *HF, "--cfg.parallel_config.tp_size", "0"], "--cfg.parallel_config.tp_size: ", "got 0"),
    "size in words": ([CONVERTER, "hf_to_mm", *HF, "--cfg.parallel_config.tp_size", "two"], "--cfg.parallel_config.tp_size: ", "got 'two'"),
    "misspelt option": (
        [CONVERTER, "hf_to_mm", *HF, "--cfg.parallel_config.tp_sizes", "2"],
        "unknown option --cfg.parallel_config.tp_sizes (did you mean '--cfg.parallel_config.tp_size'?)",
    ),
    "abbreviated option": ([CONVERTER, "hf_to_mm", *HF, "--cfg.parallel_config.tp", "2"], "unknown option --cfg.parallel_config.tp"),
    "missing config": ([CONVERTER, "hf_to_mm", "--config", "/nowhere.yaml"], "--config: ", "/nowhere.yaml"),
}
"""Command lines that cannot be understood: exit code 2."""

FAULTS = {
    "missing directory": ([CONVERTER, "hf_to_mm", *HF[:3], "/nowhere/hf"], "--cfg.hf_config.hf_dir: /nowhere/hf: no such directory"),
    "wrong sum": ([CONVERTER, "hf_to_mm", *HF, LAYERS, "[[2,1]]"], "llm_pp_layers [2, 1] sums to 3, but the model has 4 layers"),
    "wrong sum of one stage": ([CONVERTER, "hf_to_mm", *HF, LAYERS, "[[3]]"], "llm_pp_layers [3] sums to 3, but the model has 4 layers"),
    "an empty stage": ([CONVERTER, "hf_to_mm", *HF, LAYERS, "[2,2,0]"], "[2, 2, 0]", "pipeline rank 2, virtual stage 0 holds no layer"),
    "lists of different length": (
        [CONVERTER, "hf_to_mm", *HF, LAYERS, "[2,2]", "--cfg.parallel_config.vit_pp_layers", "[4]"],
        "vit_pp_layers [4] holds 1 x 1 stages",
        "llm_pp_layers [2, 2] holds 1 x 2",
    ),
    "text before vision ends": (
        [CONVERTER, "hf_to_mm", *HF, LAYERS, "[2,2]", "--cfg.parallel_config.vit_pp_layers", "[2,2]"],
        "the text decoder starts on stage 0 but the vision encoder ends on stage 1",
    ),
    "indivisible heads": (
        [CONVERTER, "hf_to_mm", *HF, "--cfg.parallel_config.tp_size", "4"],
        "key/value heads 2 is not divisible by tensor-parallel size 4",
    ),
    "converter of another family": (
        ["Qwen2VLConverter", "hf_to_mm", *HF],
        "--cfg.hf_config.hf_dir: ",
        "is a qwen2_5_vl model but the converter is for qwen2_vl",
    ),
    "nothing to read back": ([CONVERTER, "mm_to_hf", *HF, "--cfg.save_hf_dir", "{tmp}/out"], "--cfg.mm_dir: ", "mm: no such directory"),
    "converter of a family that is not there": (["LlavaConverter", "hf_to_mm", *HF], "is a qwen2_5_vl model but the converter is for llava"),
    "vision heads": ([CONVERTER, "hf_to_mm", *HF, "--cfg.parallel_config.vit_tp_size", "8"], "number of attention heads 4 is not divisible by"),
    "nothing to make a checkpoint of": ([CONVERTER, "mm_to_dcp", "--cfg.mm_dir", "{tmp}/mm", "--dcp-dir", "{tmp}/out"], "--cfg.mm_dir: "),
}
"""What cannot be converted: exit code 1."""


def refused(words, expected, code, capsys):
    assert main(words) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("mm-convert: error: ") and printed.err.count("\n") == 1
    for part in expected:
        assert part in printed.err


@pytest.mark.parametrize("fault", SYNTAX)
def test_what_cannot_be_understood_is_one_line_and_status_2(fault, golden, kit, tmp_path, capsys):
    words, *expected = SYNTAX[fault]
    refused([word.format(tmp=tmp_path, hf=golden / "hf_qwen2_5_vl") for word in words], expected, 2, capsys)
    assert kit.files(tmp_path) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_converted_is_one_line_and_status_1(fault, golden, kit, tmp_path, capsys):
    words, *expected = FAULTS[fault]
    refused([word.format(tmp=tmp_path, hf=golden / "hf_qwen2_5_vl") for word in words], expected, 1, capsys)
    assert kit.files(tmp_path) == []


def test_unknown_keys_of_a_config_file_are_named(tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("cfg: {mm_dir: x, hf_config: {hf_dir: y, hf_dirr: 3}}\n")
    refused([CONVERTER, "hf_to_mm", "--config", str(tmp_path / "c.yaml")], ["hf_dirr", "did you mean 'hf_dir'?"], 2, capsys)


def test_ctrl_c_is_one_line_and_leaves_nothing(golden, kit, tmp_path, capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.pwrite", interrupt)
    words = [word.format(tmp=tmp_path, hf=golden / "hf_qwen2_5_vl") for word in HF]
    assert main([CONVERTER, "hf_to_mm", *words]) == 130
    assert capsys.readouterr().err == "mm-convert: interrupted\n" and kit.files(tmp_path) == []


HELPS = [["--help"], [CONVERTER, "--help"], *([CONVERTER, command, "--help"] for command in COMMANDS)]


def test_help_comes_without_what_takes_long_to_import():
    heavy = {"torch", "transformers", "megatron", "numpy"}
    code = f"import sys\nfrom tangram.cli.mm_convert import main\nfor words in {HELPS!r}: assert main(words) == 0\n"
    code += f"assert not {heavy!r} & set(sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    for word in (*CONVERTERS, *COMMANDS, "--cfg.parallel_config.vit_tp_size", "--max-shard-size", "--dry-run"):
        assert word in ended.stdout
