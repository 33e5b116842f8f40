"""The mm-convert command as users type it."""

import subprocess
import sys

import pytest

from tangram.cli.mm_convert import main

CONVERTER = "Qwen2_5_VLConverter"


def test_there_and_back(golden, kit, tmp_path, capsys):
    hf, mm, out = golden / "hf_qwen2_5_vl", tmp_path / "mm", tmp_path / "out"
    options = ["--cfg.hf_config.hf_dir", str(hf), "--cfg.mm_dir", str(mm), "--cfg.parallel_config.tp_size", "2"]
    main([CONVERTER, "hf_to_mm", *options, "--cfg.parallel_config.llm_pp_layers", "[[1,3]]", "--cfg.parallel_config.vit_pp_layers", "[[4,0]]"])
    assert capsys.readouterr().out == f"{mm}: 105 tensors, 4 model-parallel rank(s), 363008 bytes\n"
    flat = ["--cfg.parallel_config.llm_pp_layers", "[1,3]", "--cfg.parallel_config.vit_pp_layers", "[4,0]"]
    main([CONVERTER, "mm_to_hf", *options, *flat, "--cfg.save_hf_dir", str(out)])
    assert (out / "model.safetensors").read_bytes() == (hf / "model.safetensors").read_bytes()


def test_printed_config_is_read_back(golden, kit, tmp_path, capsys):
    options = ["--cfg.hf_config.hf_dir", str(golden / "hf_qwen2_vl"), "--cfg.mm_dir", str(tmp_path / "mm"), "--cfg.parallel_config.tp_size=2"]
    with pytest.raises(SystemExit, match="0"):
        main(["Qwen2VLConverter", "hf_to_mm", *options, "--print_config"])
    (tmp_path / "convert.yaml").write_text(capsys.readouterr().out)
    main(["Qwen2VLConverter", "hf_to_mm", "--config", str(tmp_path / "convert.yaml")])
    assert kit.files(tmp_path / "mm" / "release") == [
        "mp_rank_00",
        "mp_rank_00/model_optim_rng.pt",
        "mp_rank_01",
        "mp_rank_01/model_optim_rng.pt",
    ]


HF = ["--cfg.mm_dir", "{tmp}/mm", "--cfg.hf_config.hf_dir", "{hf}"]
LAYERS = "--cfg.parallel_config.llm_pp_layers"
FAULTS = {
    "unknown converter": (["Qwen2_5VLConverter", "hf_to_mm"], "invalid choice: 'Qwen2_5VLConverter'", "did you mean 'Qwen2_5_VLConverter'?"),
    "unknown direction": ([CONVERTER, "hf_to_m"], "invalid choice: 'hf_to_m'", "did you mean 'hf_to_mm'?"),
    "nothing": ([], "required: CONVERTER, DIRECTION"),
    "no options": ([CONVERTER, "hf_to_mm"], "required: ", "--cfg.mm_dir", "--cfg.hf_config.hf_dir"),
    "missing directory": ([CONVERTER, "hf_to_mm", *HF[:3], "/nowhere/hf"], "--cfg.hf_config.hf_dir: /nowhere/hf: no such directory"),
    "broken list": ([CONVERTER, "hf_to_mm", *HF, LAYERS, "[12,16"], f"{LAYERS}: [12,16 is not a list of layers; write [12,16] or [[12,16]]"),
    "words in a list": ([CONVERTER, "hf_to_mm", *HF, LAYERS, "[1,x]"], f"{LAYERS}: ", "is not a list of layers"),
    "negative layers": ([CONVERTER, "hf_to_mm", *HF, LAYERS, "[5,-1]"], "llm_pp_layers: layers per stage: -1 in [5, -1] is not a number of layers"),
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
    "size zero": ([CONVERTER, "hf_to_mm", *HF, "--cfg.parallel_config.tp_size", "0"], "--cfg.parallel_config.tp_size: ", "got 0"),
    "size in words": ([CONVERTER, "hf_to_mm", *HF, "--cfg.parallel_config.tp_size", "two"], "--cfg.parallel_config.tp_size: two is not of the type"),
    "misspelt option": (
        [CONVERTER, "hf_to_mm", *HF, "--cfg.parallel_config.tp_sizes", "2"],
        "unknown option --cfg.parallel_config.tp_sizes (did you mean '--cfg.parallel_config.tp_size'?)",
    ),
    "abbreviated option": ([CONVERTER, "hf_to_mm", *HF, "--cfg.parallel_config.tp", "2"], "unknown option --cfg.parallel_config.tp"),
    "missing config": ([CONVERTER, "hf_to_mm", "--config", "/nowhere.yaml"], "--config: ", "/nowhere.yaml"),
    "converter of another family": (
        ["Qwen2VLConverter", "hf_to_mm", *HF],
        "--cfg.hf_config.hf_dir: ",
        "is a qwen2_5_vl model but the converter is for qwen2_vl",
    ),
    "nothing to read back": ([CONVERTER, "mm_to_hf", *HF, "--cfg.save_hf_dir", "{tmp}/out"], "mm: no latest_checkpointed_iteration.txt"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_one_line_and_status_2(fault, golden, kit, tmp_path, capsys):
    words, *expected = FAULTS[fault]
    with pytest.raises(SystemExit) as ended:
        main([word.format(tmp=tmp_path, hf=golden / "hf_qwen2_5_vl") for word in words])
    printed = capsys.readouterr()
    assert ended.value.code == 2 and printed.out == ""
    assert printed.err.startswith("mm-convert: error: ") and printed.err.count("\n") == 1
    for part in expected:
        assert part in printed.err
    assert kit.files(tmp_path) == []


def test_unknown_keys_of_a_config_file_are_named(tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("cfg: {mm_dir: x, hf_config: {hf_dirr: 3}}\n")
    with pytest.raises(SystemExit, match="2"):
        main([CONVERTER, "hf_to_mm", "--config", str(tmp_path / "c.yaml")])
    printed = capsys.readouterr().err
    assert "hf_dirr" in printed and printed.count("\n") == 1


@pytest.mark.parametrize("words", [["--help"], [CONVERTER, "hf_to_mm", "--help"], [CONVERTER, "mm_to_hf", "--help"]])
def test_help_comes_without_torch(words):
    heavy = {"torch", "transformers", "megatron", "numpy"}
    code = f"import sys\nfrom tangram.cli.mm_convert import main\ntry: main({words!r})\nexcept SystemExit as e: assert not e.code\n"
    code += f"assert not {heavy!r} & set(sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "hf_to_mm" in ended.stdout or "--cfg.mm_dir" in ended.stdout
