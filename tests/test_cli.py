"""The command line from outside: start-up, help, faults, exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tangram
from tangram.cli.main import COMMANDS, main
from tangram.errors import ConfigError
from tangram.guard import guarded


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tangram", *arguments], capture_output=True, text=True, timeout=250, env={**os.environ, **environment}
    )


def faults(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1, shown.err
    return shown.err


@pytest.mark.parametrize("arguments", [["--help"], *[[name, "--help"] for name in COMMANDS]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom tangram.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "print([m for m in ('torch', 'transformers', 'megatron', 'numpy', 'pydantic') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=250, check=True).stdout
    assert shown.startswith("usage: tangram")
    assert shown.endswith("[]\n")


def test_a_reader_that_goes_away_is_no_fault() -> None:
    """As ``mm-convert --help | true``: 141 is 128 + SIGPIPE."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "tangram.cli.mm_convert", "--help"]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=250)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"tangram {tangram.__version__}\n"


def test_unknown_words_get_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown command 'tinny' (did you mean 'tiny'?)" in faults(capsys, "tinny")
    assert "unknown argument '--hiden' (did you mean '--hidden'?)" in faults(capsys, "tiny", "qwen2_vl", "x", "--hiden", "8")
    assert "unknown model family 'qwen25_vl' (did you mean 'qwen2_5_vl'?)" in faults(capsys, "tiny", "qwen25_vl", "x")


def test_argument_faults_name_the_argument_and_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert faults(capsys) == "tangram: error: the following arguments are required: COMMAND; see tangram --help\n"
    assert faults(capsys, "tiny", "qwen2_vl") == "tangram: error: the following arguments are required: OUT; see tangram tiny --help\n"
    assert "argument --hidden: invalid int value: 'wide'; see tangram tiny --help" in faults(capsys, "tiny", "qwen2_vl", "x", "--hidden", "wide")


def test_options_are_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown argument '--voc'" in faults(capsys, "tiny", "qwen2_vl", "x", "--voc", "64")


def test_overrides_may_stand_behind_options() -> None:
    """argparse itself reads positional words only before the first option that follows one of them."""
    from tangram.cli.main import build_parser

    for words in (["a.b=1", "c.d=2", "--nproc-per-node", "2"], ["--nproc-per-node", "2", "a.b=1", "c.d=2"], ["a.b=1", "--nproc-per-node=2", "c.d=2"]):
        args = build_parser().parse_args(["train", "run.yaml", *words])
        assert (args.run_file, args.overrides, args.nproc_per_node) == ("run.yaml", ["a.b=1", "c.d=2"], 2)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--tolerance", "nan", "--tolerance nan must be a number from 0 up"),
        ("--tolerance", "inf", "--tolerance inf must be a number from 0 up"),
        ("--tolerance", "-1", "--tolerance -1.0 must be a number from 0 up"),
        ("--lr", "nan", "--lr nan must be a number above 0"),
        ("--lr", "0", "--lr 0.0 must be a number above 0"),
        ("--rows", "-1", "--rows -1 must be at least 0"),
        ("--steps", "0", "--steps 0 must be at least 1"),
        ("--cp-algo", "ring", "--cp-algo ring has no effect without context-parallel ranks; give --cp of 2 or more, or leave it out"),
    ],
)
def test_numbers_that_align_cannot_use_are_refused_first(option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert faults(capsys, "align", "--hf", "nowhere", option, value) == f"tangram: error: {message}\n"


@pytest.mark.parametrize(
    ("words", "processes", "said"),
    [
        (["--dp", "2", "--balance"], 2, "TP1 PP1 DP2 balanced"),
        (["--cp", "2", "--ep", "4"], 4, "TP1 PP1 CP2 ulysses DP2 EP4"),
        (["--cp", "4", "--ep", "2"], 4, "TP1 PP1 CP4 ulysses EP2"),
        (["--ep", "2"], 2, "TP1 PP1 DP2 EP2"),
    ],
)
def test_options_of_align_are_a_split(words: list[str], processes: int, said: str) -> None:
    from tangram.cli.align import read_split
    from tangram.cli.main import build_parser

    split = read_split(build_parser().parse_args(["align", "--hf", "nowhere", *words]))
    assert (split.processes, str(split)) == (processes, said)


def test_balance_needs_copies_of_the_model_and_the_megatron_backend(capsys: pytest.CaptureFixture[str]) -> None:
    message = "--balance has nothing to deal out with one copy of the model; give --dp of 2 or more, or leave it out"
    assert faults(capsys, "align", "--hf", "nowhere", "--balance") == f"tangram: error: {message}\n"
    assert "--balance: not of --backend fsdp2" in faults(capsys, "align", "--hf", "nowhere", "--backend", "fsdp2", "--balance")


def test_a_number_of_processes_below_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for number in ("0", "-1"):
        assert f"--nproc-per-node {number} must be at least 1" in faults(capsys, "train", "run.yaml", "--nproc-per-node", number)
    assert "unknown argument '--nproc' (did you mean '--nproc-per-node'?)" in faults(capsys, "train", "run.yaml", "--nproc", "2")


def test_a_fault_of_the_user_is_one_line_and_status_2(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    ended = run("tiny", "qwen2_vl", str(tmp_path), "--vocab", "64")
    assert ended.returncode == 2
    mend = "give another one, or --force to replace the checkpoint that lies there"
    assert ended.stderr == f"tangram: error: {tmp_path}: not an empty directory; {mend}\n"


def raising(error: BaseException):
    def action() -> int:
        raise error

    return action


def test_the_stack_trace_of_a_users_fault_is_shown_if_asked_for(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANGRAM_TRACEBACK", "1")
    assert guarded("prog", raising(ConfigError("wrong"))) == 2
    first, *_, last = capsys.readouterr().err.splitlines()
    assert (first, last) == ("Traceback (most recent call last):", "prog: error: wrong")


def test_exit_status_by_kind_of_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded("prog", lambda: 5) == 5
    assert guarded("prog", raising(ConfigError("two\nlines"))) == 2
    assert capsys.readouterr().err == "prog: error: two lines\n"
    assert guarded("prog", raising(KeyboardInterrupt())) == 130
    capsys.readouterr()
    assert guarded("prog", lambda: len(Path("/proc/nobody/file").read_bytes())) == 2
    mend = "check the path, its permissions and the free space"
    assert capsys.readouterr().err == f"prog: error: /proc/nobody/file: No such file or directory; {mend}\n"
    assert guarded("prog", lambda: os.write(os.open("/dev/full", os.O_WRONLY), b"x")) == 2
    assert capsys.readouterr().err == f"prog: error: No space left on device; {mend}\n"
    with pytest.raises(ZeroDivisionError):
        guarded("prog", raising(ZeroDivisionError()))


def launch(code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` on two ranks that torchrun starts."""
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=250,
    )


def test_a_fault_that_all_ranks_share_prints_once(tmp_path: Path) -> None:
    """They come to it together: what imports take on a busy machine is no part of it."""
    code = (
        "import os, sys, time\nfrom pathlib import Path\nimport tangram.families\nfrom tangram.cli.main import main\n"
        f"here = Path({str(tmp_path)!r})\n(here / os.environ['RANK']).touch()\n"
        "while len(list(here.iterdir())) < 2:\n    time.sleep(0.01)\n"
        "sys.exit(main(['tiny', 'qwen9_vl', 'x']))"
    )
    ended = launch(code)
    assert ended.returncode != 0
    assert ended.stderr.count("unknown model family 'qwen9_vl'") == 1


def test_a_fault_of_one_rank_ends_a_launch_whose_other_rank_waits() -> None:
    code = (
        "import os, time\nfrom tangram.guard import guarded\nfrom tangram.errors import DataError\n"
        "def action():\n    if os.environ['RANK'] == '1':\n        raise DataError('cat.png: no such file')\n    time.sleep(3600)\n"
        "guarded('tangram', action)"
    )
    ended = launch(code)
    assert ended.returncode != 0
    assert ended.stderr.count("tangram: error: [rank 1] cat.png: no such file") == 1


@pytest.mark.parametrize("kind", ["ValueError", "DataError"])
def test_a_failed_rank_does_not_wait_for_threads(kind: str) -> None:
    code = (
        "import threading, time\nfrom tangram.guard import guarded\nfrom tangram.errors import DataError\n"
        f"def action():\n    threading.Thread(target=time.sleep, args=(3600,)).start()\n    raise {kind}('lost')\nguarded('tangram', action)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=250, env={**os.environ, "TORCHELASTIC_RUN_ID": "x", "RANK": "0"}
    )
    assert ended.returncode == {"ValueError": 1, "DataError": 2}[kind]
    assert ("Traceback" in ended.stderr) == (kind == "ValueError")


def test_tiny_writes_what_its_options_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import json

    from safetensors import safe_open

    sizes = {"hidden": 32, "ffn": 40, "text-layers": 2, "heads": 4, "kv-heads": 4, "vision-hidden": 16, "vision-ffn": 24, "vision-layers": 3}
    options = [word for name, size in {**sizes, "vision-heads": 2, "max-pixels": 12544, "vocab": 72}.items() for word in (f"--{name}", str(size))]
    assert main(["tiny", "qwen2_5_vl", str(tmp_path / "hf"), "--tied", "--dtype", "bfloat16", "--weight-std", "0.001", "--seed", "4", *options]) == 0
    config = json.loads((tmp_path / "hf/config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    assert [text[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads")] == [32, 40, 2, 4]
    assert [vision[k] for k in ("hidden_size", "intermediate_size", "depth", "num_heads")] == [16, 24, 3, 2]
    assert json.loads((tmp_path / "hf/preprocessor_config.json").read_text())["max_pixels"] == 12544
    with safe_open(tmp_path / "hf/model.safetensors", "pt") as file:
        embedding = file.get_tensor("model.embed_tokens.weight")
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118  no container
    assert tuple(embedding.shape) == (72, 32)
    assert 0.0005 < embedding.float().std() < 0.002
    assert "random qwen2_5_vl, seed 4" in capsys.readouterr().out


def test_a_process_of_a_launch_ends_without_the_shutdown_of_the_interpreter() -> None:
    """What is to be done at exit is done; what comes after it, where threads that wait for the interpreter abort the process, is not."""
    code = (
        "import atexit\nfrom tangram.guard import leave\n"
        "class Last:\n    def __del__(self):\n        print('shut down', flush=True)\n"
        "last = Last()\natexit.register(print, 'at exit')\nprint('work')\nleave(3)"
    )
    for environment, said in (({"TORCHELASTIC_RUN_ID": "1"}, "work\nat exit\n"), ({}, "work\nat exit\nshut down\n")):
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, env={**os.environ, **environment})
        assert (ended.returncode, ended.stdout, ended.stderr) == (3, said, "")
