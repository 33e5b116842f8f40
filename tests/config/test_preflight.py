"""Every rule of the checks before a run starts, by the text of its message."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tangram.config.preflight import Report, check_run
from tangram.config.yaml_config import read_run
from tangram.data.check import check_data
from tangram.errors import ConfigError, DataError, TangramError
from tests.config.conftest import EXAMPLES, Files


def report(files: Files, *flags: str, world: int | None = None) -> Report:
    return check_run(files.run(*flags), world)


def fault(files: Files, *flags: str, world: int | None = None) -> str:
    """The message of the one rule that does not hold."""
    errors = report(files, *flags, world=world).errors
    assert len(errors) == 1, errors
    return str(errors[0])


def fault_of(files: Files, rule: str, *flags: str) -> str:
    return next(str(finding.error) for finding in report(files, *flags).findings if finding.rule == rule and finding.error is not None)


PP2 = ["--pipeline-model-parallel-size", "2"]


def split(files: Files, vit: Any, llm: Any) -> None:
    files.vision["pipeline_num_layers"], files.text["pipeline_num_layers"] = vit, llm


def test_a_good_run_passes_every_rule(files: Files) -> None:
    split(files, [4, 0], [1, 3])
    found = report(files, *PP2, "--tensor-model-parallel-size", "2", "--global-batch-size", "4", world=8)
    assert not found.errors
    found.raise_errors()
    details = {finding.rule: finding.detail for finding in found.findings}
    assert details["processes"] == "8 processes = TP 2 x PP 2 x DP 2"
    assert details["global batch"] == "4 samples = 1 x DP 2 x 2 micro-batches"
    assert found.split == [
        "stage 0: patch embedding > vision layers 0-3 > projector | embedding > text layer 0",
        "stage 1: text layers 1-3 > norm, head, loss",
    ]


@pytest.mark.parametrize(
    ("vit", "llm", "flags", "message"),
    [
        ([4, 0], [2, 1], PP2, "llm_pp_layers [2, 1] sums to 3, but the model has 4 layers; correct the list"),
        ([3, 0], [2, 2], PP2, "vit_pp_layers [3, 0] sums to 3, but the model has 4 layers"),
        ([4], [3], [], "llm_pp_layers [3] sums to 3, but the model has 4 layers"),
        ([4, 0, 0], [2, 2, 0], PP2, "vit_pp_layers [4, 0, 0] has 3 numbers per row, but pipeline_model_parallel_size is 2"),
        (
            [4, 0],
            [2, 2, 0],
            PP2,
            "llm_pp_layers [2, 2, 0] has 3 numbers per row, but pipeline_model_parallel_size is 2; give one number per",
        ),
        ([4, 0], [2, 2], [], "vit_pp_layers [4, 0] has 2 numbers per row, but pipeline_model_parallel_size is 1"),
        ([[4, 0], [0, 0]], [[1, 1], [1, 1]], PP2, "has 2 rows, but virtual_pipeline_model_parallel_size is 1; give one row per virtual stage"),
        ([4, 0], [1, 3], [*PP2, "--virtual-pipeline-model-parallel-size", "2"], "[4, 0] has 1 rows, but virtual_pipeline_model_parallel_size is 2"),
        ([1, 3], [2, 2], PP2, "the text decoder starts on stage 0 but the vision encoder ends on stage 1"),
        ([4, 0], [4, 0], PP2, "pipeline rank 1, virtual stage 0 holds no layer; give every stage at least one"),
        (None, None, PP2, "pipeline_model_parallel_size 2 x 1 virtual stages needs the layers of each stage: give pipeline_num_layers"),
    ],
)
def test_layer_lists(files: Files, vit: Any, llm: Any, flags: list[str], message: str) -> None:
    if vit is not None:
        split(files, vit, llm)
    assert message in fault(files, *flags)


def test_lists_given_twice_must_agree(files: Files) -> None:
    from tangram.config.yaml_config import read_run

    split(files, [4, 0], [1, 3])
    text = "model: {config: model.json}\ndata: {config: data.json}\ntraining: {lr: 1e-3}\n"
    text += "parallel: {pipeline_model_parallel_size: 2, llm_pp_layers: [[2, 2]]}\n"
    errors = check_run(read_run(files.run_file(text)), None).errors
    assert str(errors[0]) == (
        "parallel.llm_pp_layers [[2, 2]] and text_decoder.pipeline_num_layers [1, 3] of the model differ; correct one, or give only one of them"
    )
    check_run(read_run(files.run_file(text.replace("[[2, 2]]", "[[1, 3]]"))), None).raise_errors()


@pytest.mark.parametrize(
    ("section", "values", "tensor", "message"),
    [
        ("text", {}, 4, "tensor_model_parallel_size 4 does not divide text_decoder.num_query_groups (key/value heads) 2; use 1 or 2"),
        (
            "text",
            {"num_attention_heads": 6, "num_query_groups": 3, "kv_channels": 8},
            2,
            "not divide text_decoder.num_query_groups (key/value heads) 3",
        ),
        ("text", {"ffn_hidden_size": 49}, 2, "does not divide text_decoder.ffn_hidden_size 49; use 1"),
        (
            "vision",
            {"num_attention_heads": 2, "hidden_size": 32},
            4,
            "(key/value heads) 2, vision_encoder.num_attention_heads 2",
        ),
        ("vision", {"ffn_hidden_size": 41}, 2, "does not divide vision_encoder.ffn_hidden_size 41; use 1"),
        ("vision", {"num_attention_heads": 1}, 2, "does not divide vision_encoder.num_attention_heads 1; use 1"),
    ],
)
def test_tensor_parallel_sizes(files: Files, section: str, values: dict[str, int], tensor: int, message: str) -> None:
    getattr(files, section).update(values)
    assert message in fault(files, "--tensor-model-parallel-size", str(tensor))


OWN = "--vision-tensor-model-parallel-size"


def test_a_vision_encoder_divided_otherwise_than_the_text_decoder(files: Files) -> None:
    files.vision.update(num_attention_heads=1)
    message = fault(files, "--tensor-model-parallel-size", "2")
    assert message.endswith("vision_encoder.num_attention_heads 1; use 1, or vision_tensor_model_parallel_size 1 for the vision encoder alone")
    found = report(files, "--tensor-model-parallel-size", "2", OWN, "1", world=2)
    assert not found.errors
    assert next(f.detail for f in found.findings if f.rule == "tensor parallel") == "3 sizes divide by 2, 2 copies of the vision encoder by 1"
    files.text.update(num_query_groups=4)
    assert "vision_tensor_model_parallel_size 2 does not divide vision_encoder.num_attention_heads 1; use 1" in fault(
        files, "--tensor-model-parallel-size", "4", OWN, "2"
    )


def test_a_size_of_the_vision_encoder_that_cannot_be_had(files: Files) -> None:
    message = fault(files, "--tensor-model-parallel-size", "2", OWN, "4")
    assert "vision_tensor_model_parallel_size 4 does not divide tensor_model_parallel_size 2" in message and message.endswith("use 1 or 2")
    files.vision["hidden_dropout"] = 0.1
    message = fault(files, "--tensor-model-parallel-size", "2", OWN, "1")
    assert "vision_tensor_model_parallel_size 1 with vision_encoder.hidden_dropout 0.1" in message and "set the dropout to 0" in message
    assert not report(files, "--tensor-model-parallel-size", "2", OWN, "2").errors, "one copy draws as ever"
    files.model["image_encoder"] = None
    assert "has no effect: the model has no image_encoder" in fault(files, "--tensor-model-parallel-size", "2", OWN, "1")


def test_heads_that_do_not_divide(files: Files) -> None:
    files.text.update(num_attention_heads=6, num_query_groups=6, kv_channels=8)
    message = fault(files, "--tensor-model-parallel-size", "4")
    assert "text_decoder.num_query_groups (key/value heads) 6, text_decoder.num_attention_heads 6; use 1 or 2" in message


def test_sequence_parallelism_needs_ranks_to_divide_over(files: Files) -> None:
    found = report(files, "--tensor-model-parallel-size", "2", "--sequence-parallel")
    assert not found.errors
    assert next(f.detail for f in found.findings if f.rule == "tensor parallel").endswith("divide by 2, activations divided along the sequence")
    with pytest.raises(ConfigError, match=r"sequence_parallel divides .* tensor_model_parallel_size is 1; raise it, or leave sequence_parallel out"):
        files.run("--sequence-parallel")


def test_projector_that_does_not_divide(files: Files) -> None:
    files.vision.update(hidden_size=12, num_attention_heads=3, ffn_hidden_size=96)
    files.model["image_encoder"]["vision_projector"].update(input_size=12, ffn_hidden_size=48)
    files.text.update(num_attention_heads=32, num_query_groups=32, kv_channels=8, ffn_hidden_size=96)
    assert "vision_encoder.num_attention_heads 3, vision_projector.ffn_hidden_size 48; use 1" in fault(files, "--tensor-model-parallel-size", "32")


def test_vocabulary(files: Files) -> None:
    found = report(files, "--make-vocab-size-divisible-by", "128", "--tensor-model-parallel-size", "2")
    assert next(f.detail for f in found.findings if f.rule == "vocabulary") == "320 rows padded to 512"
    files.model["img_context_token_id"] = 320  # rows are 0..319
    assert fault(files) == "text_decoder.vocab_size is 320, so the model has no embedding for img_context_token_id 320; correct the ids or vocab_size"
    files.model["img_context_token_id"] = 311
    assert "special token ids must differ, got img_context_token_id 311, video_token_id 311" in fault(files)


def test_processes(files: Files) -> None:
    split(files, [4, 0], [1, 3])
    message = fault(files, *PP2, "--tensor-model-parallel-size", "2", world=6)
    assert message.startswith("6 processes cannot be split into tensor-parallel 2 x pipeline-parallel 2 = 4; start a multiple of 4 processes")


def test_batch(files: Files) -> None:
    message = fault(files, "--global-batch-size", "7", "--micro-batch-size", "2", world=2)
    assert message == "global_batch_size 7 is not a multiple of micro_batch_size 2 x data-parallel size 2 = 4; use 4 or 8"
    assert (
        fault(files, "--global-batch-size", "3", "--micro-batch-size", "2")
        == "global_batch_size 3 is not a multiple of micro_batch_size 2; use 2 or 4"
    )


@pytest.mark.parametrize(
    ("packing", "budget", "found"),
    [
        (True, None, "4 packed rows = 1 x DP 2 x 2 micro-batches"),
        (False, 64, "4 samples, in micro-batches of up to 64 tokens"),
        (True, 64, "4 samples, in micro-batches of up to 64 tokens"),
    ],
)
def test_what_a_global_batch_counts(files: Files, packing: bool, budget: int | None, found: str) -> None:
    files.data["dataset_param"]["basic_parameters"]["packing"] = packing
    files.data["dataloader_param"] = {"token_budget": budget}
    details = {finding.rule: finding.detail for finding in report(files, "--global-batch-size", "4", world=2).findings}
    assert details["global batch"] == found
    shown = "micro_batch_size 1 x data-parallel size 2 = 2"
    assert fault(files, "--global-batch-size", "3", world=2) == f"global_batch_size 3 is not a multiple of {shown}; use 2 or 4"


def test_streaming_with_what_needs_all_samples(files: Files) -> None:
    files.data["dataset_param"]["basic_parameters"]["streaming"] = True
    assert not report(files).errors
    files.samples[7]["images"] = ["cat.png"]
    assert "record 7: 0 <image> placeholders but 1 images" in fault_of(files, "samples"), "the first 1,000 are looked at"
    files.samples[7]["images"] = []
    files.data["dataloader_param"] = {"token_budget": 64}
    assert "streaming reads samples in file order without looking ahead, and token_budget needs the whole dataset" in fault_of(files, "samples")


def test_videos_for_a_model_that_takes_images_alone(files: Files, tiny_hf: Callable[[str], Path]) -> None:
    hf = str(tiny_hf("llava"))
    (files.folder / "clip.mp4").write_bytes(b"")
    files.data["dataset_param"]["preprocess_parameters"]["model_name_or_path"] = hf
    files.samples[3]["videos"] = ["clip.mp4"]
    files.samples[3]["messages"][0]["content"] = "<video>What is it?"
    content = {"backend": "megatron", "model": {"hf_dir": hf}, "data": files.data, "training": {"train_iters": 10, "lr": 1e-3, "seq_length": 64}}
    run = read_run(files.run_file(json.dumps(content)))
    with pytest.raises(DataError, match=r"samples\.json, record 3: holds 1 videos but this model takes no videos; remove the sample"):
        check_data(run, read_headers=False)
    files.data["dataset_param"]["basic_parameters"]["bad_samples"] = "skip"
    said = check_data(read_run(files.run_file(json.dumps(content))), read_headers=False)
    assert said.endswith("; 1 of 8 samples of train cannot be used and will be skipped")


def test_virtual_stages(files: Files) -> None:
    split(files, [[4], [0]], [[2], [2]])
    assert "virtual_pipeline_model_parallel_size 2 needs pipeline_model_parallel_size of at least 2, got 1" in fault(
        files, "--virtual-pipeline-model-parallel-size", "2"
    )
    split(files, [[4, 0], [0, 0]], [[1, 1], [1, 1]])
    flags = [*PP2, "--virtual-pipeline-model-parallel-size", "2", "--global-batch-size"]
    message = fault(files, *flags, "6", world=4)
    assert (
        "pipeline_model_parallel_size 2, got 3 (global_batch_size 6 / (micro_batch_size 1 x data-parallel size 2)); change global_batch_size"
        in message
    )
    assert not report(files, *flags, "8", world=4).errors
    files.data["dataloader_param"] = {"token_budget": 64}
    assert not report(files, *flags, "6", world=4).errors, "empty micro-batches fill up"
    split(files, [4, 0], [2, 2])
    assert "virtual_pipeline_model_parallel_size 1 is no interleaving" in fault(files, *PP2, "--virtual-pipeline-model-parallel-size", "1")


def test_sequence_and_schedule(files: Files) -> None:
    files.text["max_position_embeddings"] = 32
    assert fault(files) == "seq_length 64 is longer than max_position_embeddings 32 of the text decoder; lower seq_length"
    files.text["max_position_embeddings"] = 64
    assert "lr_warmup_iters 10 must be smaller than the 10 steps of the schedule" in fault(files, "--lr-warmup-iters", "10")


def test_freezing(files: Files) -> None:
    files.text["freeze"] = True
    files.model["image_encoder"]["vision_projector"]["freeze"] = True
    assert (
        fault(files) == "text_decoder, vision_encoder, vision_projector: all are frozen, so nothing would be trained; set freeze false in one of them"
    )


def test_freezing_what_is_not_there(files: Files) -> None:
    from tangram.config.yaml_config import read_run

    files.model["image_encoder"] = None
    text = "model: {config: model.json}\ndata: {config: data.json}\ntraining: {lr: 1e-3}\nfeatures: {freeze_vision_encoder: false}\n"
    errors = check_run(read_run(files.run_file(text)), None).errors
    assert [str(error) for error in errors] == ["features.freeze_vision_encoder has no effect: the model has no image_encoder; remove it"]


def test_evaluation(files: Files) -> None:
    flags = ["--eval-interval", "5", "--eval-iters", "2"]
    assert "eval_iters 2 needs basic_parameters.val_dataset or val_rate of the data config" in fault(files, *flags)
    files.data["dataset_param"]["basic_parameters"]["val_dataset"] = str(files.folder / "samples.json")
    assert not report(files, *flags).errors
    assert "samples.json would never be read; set eval_interval and eval_iters, or remove val_dataset" in fault(files)
    del files.data["dataset_param"]["basic_parameters"]["val_dataset"]
    files.data["dataset_param"]["basic_parameters"]["val_rate"] = 0.5
    assert "the samples that val_rate 0.5 sets aside would never be read" in report(files).errors[0].args[0]


def test_notes(files: Files) -> None:
    files.text["untie_embeddings_and_output_weights"] = False
    files.vision["freeze"] = files.text["freeze"] = True
    split(files, [4, 0], [1, 3])
    found = report(files, *PP2, "--use-distributed-optimizer", world=2)
    assert not found.errors
    assert found.notes == [
        "tied embeddings over a pipeline: stages 0 and 1 each hold a copy, and their gradients are summed in every step",
        "use_distributed_optimizer saves nothing with data-parallel size 1",
        "pipeline stage 1 holds only frozen weights: its optimizer has nothing to do",
    ]
    ring = report(files, *PP2, "--context-parallel-algo", "megatron_cp_algo", world=2).notes
    assert "context_parallel_algo megatron_cp_algo has no effect with context_parallel_size 1" in ring
    balanced = report(files, *PP2, "--encoder-dp-balance", world=2).notes
    assert "encoder_dp_balance has nothing to deal out with data-parallel size 1" in balanced
    assert "encoder_dp_balance" not in "".join(report(files, *PP2, "--encoder-dp-balance", world=4).notes)


def test_the_first_error_is_raised_and_the_others_counted(files: Files) -> None:
    files.text["max_position_embeddings"] = 32
    files.data["dataset_param"]["basic_parameters"]["dataset"] = "nowhere.json"
    with pytest.raises(ConfigError, match=r"lower seq_length \(1 more problems: run tangram check\)"):
        report(files).raise_errors()
    files.text["max_position_embeddings"] = 64
    with pytest.raises(DataError):
        report(files).raise_errors()


SCRIPTS = [
    *(f"qwen2vl/finetune_{size}.sh" for size in ("2b", "7b", "72b")),
    *(f"qwen2.5vl/finetune_{size}.sh" for size in ("3b", "7b", "32b", "72b")),
    *(f"llava1.5/finetune_{size}.sh" for size in ("7b", "13b")),
    *(f"qwen3vl/finetune_{size}.sh" for size in ("2b", "4b", "8b", "30b", "32b")),
]


def check_script(script: str, tmp_path: Path, **variables: str) -> str:
    """What ``tangram check`` prints for a launch script on a machine without downloads."""
    code = (
        "import argparse, sys\nfrom tangram.cli.check import add_parser, run\n"
        "top = argparse.ArgumentParser()\nadd_parser(top.add_subparsers())\nsys.exit(run(top.parse_args()))\n"
    )
    fake = tmp_path / "tangram"
    fake.write_text(f"#!{sys.executable}\n{code}")
    fake.chmod(0o755)
    root = EXAMPLES.parents[1]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(root), "CHECK_ONLY": "1", "COLUMNS": "500"}
    command = ["bash", str(EXAMPLES.parent / script)]
    done = subprocess.run(command, env=environment | variables, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 2, done.stderr
    wrong = {line.split("wrong")[0].strip() for line in done.stdout.splitlines() if "wrong" in line}
    assert wrong == {"weights", "tokenizer", "samples"}, done.stdout
    return done.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_launch_scripts_pass_their_own_checks_up_to_the_missing_downloads(script: str, tmp_path: Path) -> None:
    check_script(script, tmp_path)


def test_a_launch_script_counts_context_parallel_ranks_when_it_makes_the_global_batch(tmp_path: Path) -> None:
    said = check_script("qwen2.5vl/finetune_7b.sh", tmp_path, CP="2")
    assert "8 processes = TP 1 x CP 2 x PP 2 x DP 2" in said
    assert "96 samples = 1 x DP 2 x 48 micro-batches" in said


def test_checking_imports_nothing_that_takes_long(files: Files) -> None:
    words = json.dumps(["check", "--world-size", "1", *files.flags()])
    code = (
        "import argparse, sys\n"
        "from tangram.cli.check import add_parser, run\n"
        "parser = argparse.ArgumentParser(); add_parser(parser.add_subparsers())\n"
        f"status = run(parser.parse_args({words}))\n"
        "heavy = {'torch', 'megatron', 'transformers', 'accelerate', 'pyarrow', 'av'} & set(sys.modules)\n"
        "print(status, sorted(heavy))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=True)
    assert done.stdout.splitlines()[-1] == "0 []", done.stdout


def test_errors_are_one_line(files: Files) -> None:
    files.text["num_query_groups"] = 1
    for error in report(files, "--tensor-model-parallel-size", "2", "--load", "x").errors:
        assert isinstance(error, TangramError)
        assert "\n" not in str(error)


def test_ranks_that_share_a_micro_batch_count_with_the_others(files: Files) -> None:
    found = report(files, "--context-parallel-size", "2", "--global-batch-size", "4", world=4)
    assert not found.errors
    details = {finding.rule: finding.detail for finding in found.findings}
    assert details["processes"] == "4 processes = TP 1 x CP 2 x PP 1 x DP 2"
    assert details["context parallel"] == "2 ranks: 2 ranks share 4 heads"
    assert details["global batch"] == "4 samples = 1 x DP 2 x 2 micro-batches"
    message = fault(files, "--context-parallel-size", "2", world=3)
    assert message.startswith(
        "3 processes cannot be split into tensor-parallel 1 x context-parallel 2 x pipeline-parallel 1 = 2; start a multiple of 2"
    )


def test_heads_that_context_ranks_cannot_share(files: Files) -> None:
    """4 heads and 2 key/value heads, of which a tensor-parallel rank of 2 has 2 and 1."""
    message = fault(files, "--context-parallel-size", "3")
    assert message.startswith("3 Ulysses ranks cannot share 4 attention heads and 2 key/value heads = 4 and 2:") and "use 1 or 2 or 4" in message
    message = fault(files, "--context-parallel-size", "4", "--tensor-model-parallel-size", "2")
    assert "2 key/value heads / tensor_model_parallel_size 2 = 2 and 1:" in message and "use 1 or 2, or megatron_cp_algo" in message
    assert not report(files, "--context-parallel-size", "3", "--context-parallel-algo", "megatron_cp_algo").errors
    files.text["attention_dropout"] = 0.1
    assert not report(files, "--context-parallel-size", "2").errors
    message = fault(files, "--context-parallel-size", "3", "--context-parallel-algo", "megatron_cp_algo")
    assert message == (
        "text_decoder.attention_dropout 0.1 cannot be drawn where keys travel round a ring (context_parallel_algo megatron_cp_algo); set it to 0, "
        "or use ulysses_cp_algo"
    )


def test_libraries_of_attention_that_cannot_be_had(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn, TransformerEngine and torch_npu are not installed where tests run."""
    flash = ["--attention-backend", "flash"]
    ring = ["--context-parallel-size", "2", "--context-parallel-algo", "megatron_cp_algo"]
    details = {finding.rule: finding.detail for finding in report(files, "--attention-backend", "torch").findings}
    assert details["attention"] == "vision_encoder by torch, text_decoder by torch"
    assert fault(files, *flash) == "vision_encoder: attention_backend flash takes float16 and bfloat16, not float32; set auto or torch"
    absent = "vision_encoder: attention_backend flash needs the package flash_attn; install it, or set auto or torch"
    assert fault(files, *flash, "--bf16") == absent
    files.vision["attention_backend"] = "auto"
    files.text["attention_backend"] = "npu"
    assert fault(files).startswith("text_decoder: attention_backend npu needs the package torch_npu")
    assert fault(files, *ring) == (
        "text_decoder: attention_backend npu has no attention round a ring of ranks; set auto, flash or torch, or use ulysses_cp_algo"
    )
    files.text["attention_backend"], files.text["kv_channels"], files.text["mrope_section"] = "flash", 320, [40, 60, 60]
    assert fault(files, "--bf16") == "text_decoder: attention_backend flash takes heads of a width of up to 256, not 320; set auto or torch"


def test_offload_that_would_move_nothing(files: Files) -> None:
    """Four vision layers, frozen by default, and four text layers; the last two calls of a run of layers stay on the device."""
    details = {finding.rule: finding.detail for finding in report(files, "--enable-activation-offload").findings}
    assert details["activation offload"] == "text_decoder"
    assert {finding.rule: finding.detail for finding in report(files).findings}["activation offload"] == "off"
    together = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "2"]
    assert fault(files, "--enable-activation-offload", *together) == (
        "activation_offload would move nothing: vision_encoder is frozen and saves nothing; text_decoder has 2 layers, or groups of layers that are "
        "recomputed together, and the last 2 stay on the device; leave it out"
    )
    files.vision["activation_offload"] = True
    assert fault(files) == "activation_offload would move nothing: vision_encoder is frozen and saves nothing; leave it out"
    files.vision["freeze"] = False
    details = {finding.rule: finding.detail for finding in report(files).findings}
    assert details["activation offload"] == "vision_encoder"
    files.vision["activation_offload"], files.text["activation_offload"] = False, True
    split(files, [4, 0], [2, 2])
    found = {finding.rule: finding.detail for finding in report(files, *PP2).findings}
    assert found["activation offload"] == "text_decoder", "micro-batches wait for the second stage"
