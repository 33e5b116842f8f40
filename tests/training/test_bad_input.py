"""What a user gets wrong, as two ranks answer it: one line with the mend, a failing status on every rank, no traceback, no hang."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.trial import PICTURES, Trial, records, run, split

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
PP2 = split(1, [4, 0], [2, 2])


def refused(folder: Path, trial: Trial, overrides: list[str], *parts: str, ranks: int = 2, file: Path | None = None) -> str:
    """Both ranks end by themselves with a failing status, and the first line of error holds ``parts``."""
    outcome = run(folder, ["tangram", "train", str(file or trial.run_file), f"training.metrics_file={folder}/metrics", *overrides], ranks)
    assert all(outcome.codes), f"{outcome.codes}: {outcome.output[-2000:]}"
    assert 2 in outcome.codes and set(outcome.codes) <= {1, 2}, f"{outcome.codes}: {outcome.output[-2000:]}"
    assert "Traceback" not in outcome.output, outcome.output[-3000:]
    lines = outcome.errors()
    assert lines, outcome.output[-2000:]
    for part in parts:
        assert part in lines[0], lines[0]
    return lines[0]


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (split(1, [4, 0], [1, 2]), ["llm_pp_layers", "sums to 3", "4"]),
        (split(1, [4, 0, 0], [1, 3]), ["vit_pp_layers [4, 0, 0]", "3 numbers per row", "pipeline_model_parallel_size is 2"]),
        (split(1, [2, 2], [2, 2]), ["vision", "stage"]),
        ([*split(4), "training.global_batch_size=8"], ["tensor_model_parallel_size 4 does not divide", "num_query_groups", "use 1 or 2"]),
        (["training.micro_batch_sise=1"], ["training.micro_batch_sise", "did you mean", "micro_batch_size"]),
        (["model.overrides={text_decoder: {activation_func: swishy}}"], ["activation_func", "swishy"]),
        (["training.global_batch_size=9"], ["global_batch_size 9 is not a multiple of", "use 8 or 12"]),
        (["training.global_batch_size=80"], ["the dataset has 40 samples, too few for one global batch of 80", "at most 40"]),
        (["training.save_interval=2"], ["save_interval 2 needs save"]),
    ],
    ids=["layer sum", "list length", "text before vision ends", "kv heads", "unknown key", "activation", "batch", "too few samples", "save"],
)
def test_settings(overrides: list[str], parts: list[str], trial: Trial, folder: Path) -> None:
    refused(folder, trial, overrides, *parts, ranks=2)


@pytest.fixture
def damaged(trial: Trial, folder: Path) -> Callable[..., Path]:
    """A copy of the weights with another content."""

    def make(change: Callable[[dict[str, Any]], None]) -> Path:
        shutil.copytree(trial.hf, folder / "hf")
        file = folder / "hf" / "model.safetensors"
        weights = load_file(file)
        change(weights)
        save_file(weights, file, metadata={"format": "pt"})
        return folder / "hf"

    return make


def test_a_missing_tensor(trial: Trial, damaged: Callable[..., Path], folder: Path) -> None:
    """Of the second stage alone: the first has all it needs."""
    hf = damaged(lambda weights: weights.pop("model.layers.3.mlp.up_proj.weight"))
    refused(folder, trial, [f"model.load={hf}", *PP2], "layers.3.mlp.up_proj.weight")


def test_an_extra_tensor(trial: Trial, damaged: Callable[..., Path], folder: Path) -> None:
    hf = damaged(lambda weights: weights.update({"model.layers.9.extra.weight": weights["model.norm.weight"].clone()}))
    refused(folder, trial, [f"model.load={hf}", *PP2], "layers.9.extra.weight")


def test_a_truncated_file(trial: Trial, folder: Path) -> None:
    shutil.copytree(trial.hf, folder / "hf")
    file = folder / "hf" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused(folder, trial, [f"model.load={folder}/hf"], "model.safetensors", "truncated or damaged, fetch it again")


def test_a_missing_shard(trial: Trial, folder: Path) -> None:
    shutil.copytree(trial.hf, folder / "hf")
    names = list(load_file(folder / "hf" / "model.safetensors"))
    index = {"metadata": {"total_size": 1}, "weight_map": {name: f"model-{1 + i % 2:05}-of-00002.safetensors" for i, name in enumerate(names)}}
    (folder / "hf" / "model.safetensors").rename(folder / "hf" / "model-00001-of-00002.safetensors")
    (folder / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, trial, [f"model.load={folder}/hf"], "1 of 2 files are missing: model-00002-of-00002.safetensors; fetch them again")


def test_weights_converted_for_another_split(trial: Trial, folder: Path) -> None:
    """The three places: converter, model.json, launch."""
    from tangram.cli.mm_convert import main

    folder.mkdir()
    options = ["--cfg.mm_dir", f"{folder}/mm", "--cfg.hf_config.hf_dir", str(trial.hf), "--cfg.parallel_config.llm_pp_layers", "[[1,3]]"]
    assert not main(["Qwen2_5_VLConverter", "hf_to_mm", *options, "--cfg.parallel_config.vit_pp_layers", "[[4,0]]"])
    line = refused(folder, trial, [f"model.load={folder}/mm", *PP2], "llm_pp_layers")
    assert "1, 3" in line and "2, 2" in line
    fitting = ["training.train_iters=1", "training.lr_warmup_iters=0", f"model.load={folder}/mm", *split(1, [4, 0], [1, 3])]
    run(folder, ["tangram", "train", str(trial.run_file), *fitting], 2).succeeded()


def with_data(folder: Path, trial: Trial, rows: list[dict[str, Any]]) -> Path:
    """The trial's run file over other samples; pictures stay where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data.json").write_text(json.dumps(rows))
    return trial.folder / "run.yaml"


def test_a_missing_image(trial: Trial, folder: Path) -> None:
    rows = records()
    rows[8]["images"] = ["gone.png"]
    file = with_data(folder, trial, rows)
    key = "data.dataset_param.basic_parameters.dataset"
    refused(folder, trial, [f"{key}={folder}/data.json"], "gone.png: no such image file", "record 8", "1 of", file=file)


def test_placeholders_and_images_differ(trial: Trial, folder: Path) -> None:
    rows = records()
    rows[4]["messages"][0]["content"] = "<image><image>What?"
    with_data(folder, trial, rows)
    key = "data.dataset_param.basic_parameters.dataset"
    refused(folder, trial, [f"{key}={folder}/data.json"], "record 4", "2 <image> placeholders but 1 images; each image needs one placeholder")


@pytest.mark.parametrize("overrides", [[], PP2], ids=["two copies", "pipeline"])
def test_a_picture_that_one_rank_cannot_read_ends_all_in_the_middle_of_training(overrides: list[str], trial: Trial, folder: Path) -> None:
    """Its header is whole, so nothing finds it before it is decoded; in a pipeline only the first stage decodes."""
    folder.mkdir()
    for i in range(PICTURES):
        shutil.copy(trial.folder / f"{i}.png", folder / f"{i}.png")
    whole = (trial.folder / "0.png").read_bytes()
    (folder / "broken.png").write_bytes(whole[: len(whole) // 2])
    rows = records()
    rows[20] = {"images": ["broken.png"], "messages": [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "no"}]}
    (folder / "data.json").write_text(json.dumps(rows))
    basic = "data.dataset_param.basic_parameters"
    command = [f"{basic}.dataset={folder}/data.json", f"{basic}.dataset_dir={folder}", "data.dataloader_param.shuffle=false"]
    line = refused(folder, trial, [*command, *overrides], "broken.png", "record 20")
    assert line.count(": error: ") == 1
    steps = (folder / "metrics").read_text().splitlines()
    assert len(steps) == 2, "samples 0..15 were trained on"


OLDER_COPY = """
import os, sys

if __name__ == "__main__":
    from tangram.cli.main import main
    words = sys.argv[1:]
    sys.exit(main([*words, "data.dataset_param.basic_parameters.dataset=older/data.json"] if os.environ["RANK"] == "1" else words))
"""


def test_a_node_with_an_older_copy_of_the_data(trial: Trial, folder: Path) -> None:
    """As many samples with as many tokens: nothing would miss a tensor, and the halves of the model would see other words."""
    older = trial.folder / "older" / "data.json"
    older.parent.mkdir(exist_ok=True)
    older.write_text((trial.folder / "data.json").read_text().replace("What is 7?", "What is 8?"))
    folder.mkdir()
    (folder / "older.py").write_text(OLDER_COPY)
    outcome = run(folder, [str(folder / "older.py"), "train", str(trial.run_file), *split(2)], 2)
    assert sorted(map(str, outcome.codes)) == ["1", "2"] and "Traceback" not in outcome.output, outcome.output[-2000:]
    assert len(outcome.errors()) == 1, outcome.errors()
    size = older.stat().st_size
    assert f"files of the train data, file 1: {size} bytes, " in outcome.errors()[0]
    assert outcome.errors()[0].endswith(" on rank 1; give every node the same files")
