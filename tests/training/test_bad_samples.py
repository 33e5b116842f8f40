"""Samples that cannot be used in real runs: ranks that read the same data skip alike, the log and the files say what was skipped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.trial import PICTURES, Trial, metrics, records, run, split

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
BASIC = "data.dataset_param.basic_parameters"
BROKEN, EMPTY = 5, 20


@pytest.fixture
def data(trial: Trial, folder: Path) -> list[str]:
    """Overrides for a dataset with a picture that is cut off behind its header, and a sample without a picture for its placeholder."""
    folder.mkdir()
    for i in range(PICTURES):
        shutil.copy(trial.folder / f"{i}.png", folder / f"{i}.png")
    whole = (trial.folder / "0.png").read_bytes()
    (folder / "broken.png").write_bytes(whole[: len(whole) // 2])
    rows = records()
    rows[BROKEN] = {"images": ["broken.png"], "messages": [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "no"}]}
    rows[EMPTY]["images"] = []
    rows[EMPTY]["messages"][0]["content"] = "<image>What?"
    (folder / "data.json").write_text(json.dumps(rows))
    return [
        f"{BASIC}.dataset={folder}/data.json",
        f"{BASIC}.dataset_dir={folder}",
        "data.dataloader_param.shuffle=false",
        f"{BASIC}.bad_samples=skip",
    ]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def skipping(folder: Path, trial: Trial, overrides: list[str], ranks: int) -> tuple[list[dict[str, Any]], str]:
    command = ["tangram", "train", str(trial.run_file), f"training.save={folder}/ckpt", f"training.metrics_file={folder}/m", *overrides]
    output = run(folder / "log", command, ranks).succeeded().output
    return metrics(folder / "m"), output


def test_skipped_alike_at_every_split_listed_once_and_counted(trial: Trial, data: list[str], folder: Path) -> None:
    """Global batches 1 (samples 0 to 7) and 3 (16 to 23) have a hole; in the pipeline only the first stage needs pixels. Six steps are 1.2 epochs."""
    found = {}
    for name, overrides, ranks in (("one", [], 1), ("copies and stages", split(1, [4, 0], [2, 2]), 4)):
        rows, output = skipping(folder / name, trial, [*data, "training.train_iters=6", *overrides], ranks)
        assert [row["skipped_samples"] for row in rows] == [1, 0, 1, 0, 0, 1]
        assert [row["samples"] for row in rows] == [7, 8, 7, 8, 8, 7]
        report = sorted(lines(folder / name / "ckpt" / "bad_samples.jsonl"), key=lambda line: line["sample"])
        assert [line["sample"] for line in report] == [BROKEN, EMPTY]
        assert "broken.png: cannot decode this image" in report[0]["reason"] and report[0]["where"].endswith("data.json, record 5")
        assert "1 <image> placeholders but 0 images" in report[1]["reason"]
        assert output.count("sample 5 is skipped: ") == 1 == output.count("sample 20 is skipped: ")
        assert "skipped=3" in output and output.count("| number of skipped samples:   1 |") == 3
        found[name] = [row["loss"] for row in rows]
    assert found["one"] == pytest.approx(found["copies and stages"], rel=1e-5)


def test_a_resumed_run_lists_nothing_twice_and_goes_on_counting(trial: Trial, data: list[str], folder: Path) -> None:
    skipping(folder / "run", trial, [*data, "training.train_iters=2", "training.lr_decay_iters=8"], 1)
    rows, output = skipping(folder / "run", trial, [*data, "training.train_iters=6", "training.lr_decay_iters=8", f"model.load={folder}/run/ckpt"], 2)
    assert [row["skipped_samples"] for row in rows] == [1, 0, 1, 0, 0, 1] and "skipped=3" in output
    assert [line["sample"] for line in lines(folder / "run" / "ckpt" / "bad_samples.jsonl")] == [BROKEN, EMPTY]
    fresh, _ = skipping(folder / "run", trial, [*data, "training.train_iters=1", "training.lr_warmup_iters=0"], 1)
    assert len(fresh) == 1 and [line["sample"] for line in lines(folder / "run" / "ckpt" / "bad_samples.jsonl")] == [BROKEN], "a new run, a new list"


def test_a_global_batch_without_a_label_is_an_error_on_every_rank(trial: Trial, data: list[str], folder: Path) -> None:
    rows = json.loads((folder / "data.json").read_text())
    for row in rows[8:16]:
        row["images"] = ["broken.png"]
        row["messages"][0]["content"] = "<image>?"
    (folder / "data.json").write_text(json.dumps(rows))
    outcome = run(folder / "log", ["tangram", "train", str(trial.run_file), f"training.metrics_file={folder}/m", *data], 2)
    assert all(outcome.codes) and "Traceback" not in outcome.output, outcome.output[-3000:]
    assert "step 2: its global batch of 8 places has 0 supervised tokens (8 samples are skipped); look at" in outcome.errors()[0]
    assert len(lines(folder / "m")) == 1, "the step before was taken"


def test_ranks_that_read_different_files_are_told_before_they_train_apart(trial: Trial, data: list[str], folder: Path) -> None:
    """As where a node's copy of a picture is damaged: sample 0 can be read on rank 0 alone."""
    script = folder / "torn.py"
    script.write_text(
        "import os, sys\n"
        "from tangram.data.images import ImageProcessor\n"
        "from tangram.errors import DataError\n"
        "patches = ImageProcessor.patches\n"
        "def torn(self, path, where=''):\n"
        "    if os.environ['RANK'] == '1' and path.endswith('/0.png'):\n"
        "        raise DataError(f'{path}: cannot decode this image')\n"
        "    return patches(self, path, where)\n"
        "ImageProcessor.patches = torn\n"
        "if __name__ == '__main__':\n"
        "    from tangram.cli.main import main\n"
        "    sys.exit(main(sys.argv[1:]))\n"
    )
    outcome = run(folder / "log", [str(script), "train", str(trial.run_file), f"training.metrics_file={folder}/m", *data, *split(2)], 2)
    assert all(outcome.codes) and "Traceback" not in outcome.output, outcome.output[-3000:]
    assert "step 1: ranks 0 and 1 read the same samples, and some can be read on one of them alone" in outcome.errors()[0]


def test_a_killed_worker_ends_all_ranks_with_its_sample(trial: Trial, data: list[str], folder: Path) -> None:
    script = folder / "deadly.py"
    script.write_text(
        "import os, signal, sys\n"
        "from tangram.data.encode import SampleEncoder\n"
        "tokens = SampleEncoder.tokens\n"
        "def deadly(self, sample):\n"
        "    if sample.id == 17:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return tokens(self, sample)\n"
        "SampleEncoder.tokens = deadly\n"
        "if __name__ == '__main__':\n"
        "    from tangram.cli.main import main\n"
        "    sys.exit(main(sys.argv[1:]))\n"
    )
    outcome = run(
        folder / "log", [str(script), "train", str(trial.run_file), f"training.metrics_file={folder}/m", "training.num_workers=2", *data], 2
    )
    assert all(outcome.codes) and "Traceback" not in outcome.output, outcome.output[-3000:]
    (line,) = outcome.errors()
    assert "was killed by SIGKILL while it read sample 17 (" in line and "data.json, record 17), of the micro-batch" in line


def test_a_run_from_a_cache_that_ranks_build_together(trial: Trial, folder: Path) -> None:
    """The same losses as without; the second run finds it."""
    found = []
    cache = [f"{BASIC}.cache_dir={folder}/cache", f"{BASIC}.preprocessing_num_workers=2", "training.train_iters=3"]
    for name, overrides, ranks in (("plain", ["training.train_iters=3"], 2), ("built", cache, 2), ("found", [*cache, *split(2)], 2)):
        command = ["tangram", "train", str(trial.run_file), f"training.metrics_file={folder}/{name}", *overrides]
        output = run(folder / f"{name}.log", command, ranks).succeeded().output
        assert output.count("40 samples, 0 of them unusable, in") <= (name == "built")
        found.append([row["loss"] for row in metrics(folder / name)])
    assert len([path for path in (folder / "cache").iterdir() if path.is_dir()]) == 1
    assert found[0] == found[1] and found[1] == pytest.approx(found[2], rel=1e-5)
    command = ["tangram", "train", str(trial.run_file), f"training.metrics_file={folder}/again", *cache, f"{BASIC}.overwrite_cache=true"]
    (key,) = (folder / "cache").glob("*/key.json")
    before = key.stat().st_mtime_ns
    run(folder / "again.log", command, 2).succeeded()
    (key,) = (folder / "cache").glob("*/key.json")
    assert key.stat().st_mtime_ns > before and metrics(folder / "again")[0]["loss"] == found[0][0]
