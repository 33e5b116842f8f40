"""What was trained is what transformers gets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file

from tests.training.test_resume import stored
from tests.trial import Trial, metrics, records, run, split

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
EVALUATED = 16


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def trained(request: pytest.FixtureRequest, trials: object, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trial, Path, float]:
    """Trained at TP2 x PP2 with the distributed optimizer and evaluated at the end; the trial, the folder, the loss of the evaluation."""
    trial: Trial = trials(request.param)  # type: ignore[operator]
    folder = tmp_path_factory.mktemp("trained")
    (folder / "valid.json").write_text(json.dumps(records(60)[60 - EVALUATED :]))
    evaluate = [f"data.dataset_param.basic_parameters.val_dataset={folder}/valid.json", "training.eval_interval=4", "training.eval_iters=2"]
    command = ["tangram", "train", str(trial.run_file), f"training.save={folder}/ckpt", "training.train_iters=4", *evaluate]
    output = run(folder, [*command, *split(2, [4, 0], [1, 3], use_distributed_optimizer=True)], 4).succeeded().output
    assert output.count("validation loss at iteration 4") == 1
    return trial, folder, metrics(folder / "ckpt" / "metrics.jsonl")[-1]["valid_loss"]


@pytest.mark.compat
def test_the_exported_model_has_the_loss_of_the_evaluation_in_transformers(trained: tuple[Trial, Path, float]) -> None:
    trial, folder, expected = trained
    out = folder / "out"
    run(folder / "export", ["tangram", "export", str(folder / "ckpt"), str(out), "--hf", str(trial.hf)]).succeeded()
    assert {path.name for path in out.iterdir()} >= {path.name for path in trial.hf.iterdir()}

    from tangram.align.reference import forward_arguments, load_reference
    from tangram.config.yaml_config import read_run
    from tangram.data.build import build_loader
    from tangram.families.base import get_family

    settings = read_run(trial.run_file, [f"data.dataset_param.basic_parameters.val_dataset={folder}/valid.json"])
    model = load_reference(out)  # AutoModelForImageTextToText
    total, count = 0.0, 0
    with torch.no_grad():
        for step in build_loader(settings, get_family("qwen2_5_vl"), 0, 1, split="valid"):
            for batch in step:
                logits = model(**forward_arguments(model, dict(batch))).logits[:, :-1].flatten(0, 1)
                labels = batch["labels"][:, 1:].flatten()
                total += float(F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
                count += int((labels != -100).sum())
    assert count > EVALUATED and total / count == pytest.approx(expected, rel=1e-5)

    started = load_reference(trial.hf)
    assert any(not torch.equal(a, b) for a, b in zip(started.state_dict().values(), model.state_dict().values(), strict=True))


def test_a_plain_reader_finds_the_checkpoints_tensors_under_the_hubs_names(trained: tuple[Trial, Path, float]) -> None:
    trial, folder, _ = trained
    out = folder / "plain"
    run(folder / "export", ["tangram", "export", str(folder / "ckpt" / "iter_0000004"), str(out)]).succeeded()
    assert (out / "config.json").is_file(), "the checkpoint holds the config"
    original = load_file(trial.hf / "model.safetensors")
    held = {key.removeprefix("model."): value for key, value in stored(folder / "ckpt" / "iter_0000004").items() if key.startswith("model.")}

    from tangram.families.base import get_family

    family = get_family("qwen2_5_vl")
    with safe_open(out / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(original)
        for key in file.keys():  # noqa: SIM118
            value = file.get_tensor(key)
            assert value.shape == original[key].shape and value.dtype == original[key].dtype
            assert torch.equal(value, held[family.canonical_name(key)]), key


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope", "out"], "no such folder"),
        (["ckpt", "ckpt"], "ckpt"),
        (["ckpt", "half", "--dtype", "float17"], "float17"),
    ],
)
def test_a_wrong_export_is_one_line(arguments: list[str], message: str, trained: tuple[Trial, Path, float], tmp_path: Path) -> None:
    _, folder, _ = trained
    words = [str(folder / word) if not word.startswith("--") and "float" not in word else word for word in arguments]
    outcome = run(tmp_path, ["tangram", "export", *words])
    assert outcome.codes == [2] and message in outcome.errors()[0] and "Traceback" not in outcome.output
