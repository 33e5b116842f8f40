"""The first-difference finder: honest runs agree at every split, and a planted fault is named by its module."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tangram.align.batch import write_batch
from tangram.align.default_batch import STEPS, SyntheticRow, synthetic_batch
from tangram.align.run import align, open_subject
from tangram.align.sharded import Sharded
from tangram.align.task import Split
from tangram.align.trace.find import Finding, first_difference
from tangram.cli.main import main
from tangram.errors import ConfigError
from tangram.families.base import get_family
from tangram.families.plugins import load_plugins
from tangram.families.tiny import TinySpec

pytestmark = pytest.mark.usefixtures("forked")
CROOKED = Path(__file__).parent.parent / "data" / "plugins" / "crooked_vl"
LAYER = "model.language_model.layers"
ROWS: tuple[SyntheticRow, ...] = ((((1, 8, 12),), 5, 4), (((1, 4, 4), (1, 6, 10)), 7, 3), ((), 9, 6), (((STEPS, 4, 10),), 4, 5), (((1, 4, 4),), 3, 2))
"""A picture beside two of other sizes; text alone beside a video; a picture. By twos they make three micro-batches, to which copies add one."""

TENSOR = Split(tensor=2, sequence_parallel=True)
VIRTUAL = Split(pipeline=2, virtual=2, vit_pp_layers=[[1, 1], [0, 0]], llm_pp_layers=[[0, 0], [1, 1]])
RING = Split(context=2, context_algo="ring")
COPIES = Split(data=2, distributed_optimizer=True)
STAGES = Split(tensor=2, sequence_parallel=True, pipeline=2)


def write_model(family: str, folder: Path) -> Path:
    deepstack = {"deepstack": (0, 1)} if family.startswith("qwen3") else {}
    spec = TinySpec(hidden=32, vocab=515, weight_std=0.1, text_layers=2, vision_layers=2, **deepstack)
    get_family(family).tiny(folder, 0, family == "qwen2_5_vl", spec)
    return folder


def write_rows(family: str, hf: Path, folder: Path) -> Path:
    return write_batch(synthetic_batch(get_family(family), open_subject(hf, folder / "work").model, ROWS), folder)


@pytest.mark.parametrize(
    ("family", "splits"),
    [
        ("qwen2_5_vl", [TENSOR, VIRTUAL, RING, COPIES]),
        ("qwen3_vl", [VIRTUAL]),
        ("qwen3_vl_moe", [Split(data=2, expert=2), Sharded(processes=2)]),
        ("llava", [TENSOR]),
    ],
)
def test_a_split_gives_what_transformers_gives_module_by_module(family: str, splits: list[Split | Sharded], tmp_path: Path) -> None:
    hf = write_model(family, tmp_path / "hf")
    align(hf, splits, batch_file=write_rows(family, hf, tmp_path), micro_batch_size=2, trace_to=tmp_path / "traces")
    for split, finding in zip(splits, walks(tmp_path / "traces", len(splits)), strict=True):
        assert finding.passed, f"{split}: {finding.summary}"
        assert min(len(walked.steps) for walked in finding.walks) > 130


def walks(traces: Path, count: int) -> list[Finding]:
    names = ["split"] if count == 1 else [f"split_{number}" for number in range(count)]
    return [first_difference(traces / "reference", traces / name) for name in names]


@pytest.mark.parametrize(
    ("fault", "splits", "module", "step"),
    [
        ("rope", [STAGES], f"{LAYER}.0.self_attn", (f"{LAYER}.0.self_attn.o_proj", "input")),
        ("norms", [TENSOR], f"{LAYER}.0.input_layernorm", (f"{LAYER}.0.input_layernorm", "input")),
        ("scale", [Split()], f"{LAYER}.0.self_attn", (f"{LAYER}.0.self_attn.o_proj", "input")),
        ("embedding", [Split(pipeline=2)], "model.language_model", (f"{LAYER}.0", "input")),
        ("vision", [Split()], "model.visual.blocks.1.attn", ("model.visual.blocks.1.attn.proj", "input")),
    ],
)
def test_a_fault_of_a_copied_family_is_named_by_its_module(
    fault: str, splits: list[Split], module: str, step: tuple[str, str], tmp_path: Path
) -> None:
    for finding in _walk_crooked(fault, splits, tmp_path):
        verdict, _ = finding.verdicts
        assert verdict is not None
        assert (verdict.module, verdict.step.event) == (module, step)
        assert verdict.agreed > 20
        assert f"look in {module}" in finding.summary


def _walk_crooked(fault: str, splits: list[Split], folder: Path) -> list[Finding]:
    load_plugins([CROOKED])
    family, hf, traces = f"crooked_{fault}", folder / "hf", folder / "traces"
    get_family(family).tiny(hf, 0, True, TinySpec(hidden=32, vocab=515, weight_std=0.1, text_layers=2, vision_layers=2))
    align(hf, splits, batch_file=write_rows(family, hf, folder), micro_batch_size=2, plugins=[str(CROOKED)], trace_to=traces)
    return walks(traces, len(splits))


def test_a_gradient_that_ranks_do_not_sum_is_named_by_its_parameter(tmp_path: Path) -> None:
    (finding,) = _walk_crooked("gradient", [TENSOR], tmp_path)
    forward, backward = finding.verdicts
    assert forward is None
    assert backward is not None
    assert backward.step.event == (f"{LAYER}.1.post_attention_layernorm.weight", "gradient")
    assert backward.module == f"{LAYER}.1.post_attention_layernorm"
    assert "so the sum over tokens or over ranks differs" in backward.why
    assert [step.name for step in finding.walks[1].steps if not step.within(1e-5)] == [
        f"{LAYER}.{number}.post_attention_layernorm.weight" for number in (1, 0)
    ]


def test_traces_are_kept_and_compared_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """fp32 against bf16 of the same split, and of a few modules."""
    hf = write_model("qwen2_vl", tmp_path / "hf")
    rows = str(write_rows("qwen2_vl", hf, tmp_path))
    run = ["align", "--hf", str(hf), "--batch", rows, "--micro-batch-size", "2"]
    assert main([*run, "--trace", "--trace-to", str(tmp_path / "fp32")]) == 0
    assert "steps agree within 1e-05" in capsys.readouterr().out
    some = f"{LAYER}.{{0-1}}.*"
    assert main([*run, "--dtype", "bf16", "--trace-to", str(tmp_path / "bf16"), "--trace-only", some]) == 0
    assert f"traces: {tmp_path / 'bf16' / 'reference'}, " in capsys.readouterr().out
    reference, split = (str(tmp_path / "fp32" / name) for name in ("reference", "split"))
    assert main(["align", "--trace", reference, split, "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["passed"]
    assert found["forward"]["verdict"] is None
    assert {step["what"] for step in found["backward"]["steps"]} == {"grad_input", "grad_output", "gradient"}
    # bf16 is within its own tolerance, which the coarser of two types sets, and not within that of fp32.
    only = [str(tmp_path / "bf16" / name) for name in ("reference", "split")]
    assert main(["align", "--trace", *only]) == 0
    assert f"second: megatron, TP1 PP1, {only[1]}" in capsys.readouterr().out.splitlines()
    assert main(["align", "--trace", *only, "--tolerance", "1e-5"]) == 1
    assert f"look in {LAYER}" in capsys.readouterr().out.splitlines()[-1]
    # A trace of some modules lacks the others, and says so.
    assert main(["align", "--trace", split, only[1]]) == 0
    assert "not chosen by --trace-only" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trace", "A"], "--trace takes two traces, or none and a model by --hf; it got 1"),
        (["--trace", "A", "B", "--pack"], "--pack: --trace with two directories runs nothing"),
        (["--trace", "A", "B", "--tp", "2", "--dtype", "bf16"], "--tp, --dtype: --trace with two directories runs nothing"),
        (["--backend", "fsdp2", "--hf", "H", "--trace", "a.b=1", "a.c=2"], "it got a.b=1 a.c=2; write section.key=value before --trace"),
        (["--trace", "A", "B"], "A: no such directory; a trace is written by 'tangram align --trace-to DIR'"),
        (["--hf", "H", "--trace-only", "lm_head"], "--trace-only says what is in a trace"),
        (["--hf", "H", "--trace", "--pack"], "transformers runs each row alone"),
        (["--tp", "2"], "--hf DIR is missing"),
    ],
)
def test_the_command_refuses(options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    assert main(["align", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_pattern_that_names_no_module_is_refused(tmp_path: Path) -> None:
    hf = write_model("qwen2_vl", tmp_path / "hf")
    with pytest.raises(ConfigError, match="--trace-only 'model.language_model.layer' matches no module of the model"):
        align(
            hf, [Split()], batch_file=write_rows("qwen2_vl", hf, tmp_path), trace_to=tmp_path / "t", trace_only=["model.language_model.layer"]
        )
