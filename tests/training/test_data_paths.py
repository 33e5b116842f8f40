"""Every way to feed a run, by the real command: images, videos and text, on one process, on two copies, and on tensor and pipeline ranks.

An epoch is one global batch in most of these runs, so that each way takes the same samples in each step and must give the same losses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tangram.checkpoints.dcp_manifest import read_manifest
from tests.data.video_kit import write_video
from tests.trial import PICTURES, Record, Trial, metrics, split, start, write_trial

pytestmark = [pytest.mark.slow, pytest.mark.timeout(800)]
COUNT = 12
IMAGES, VIDEOS = 9, 6
"""Media of the 12 samples."""
BASIC, LOADING, PREPROCESS = "data.dataset_param.basic_parameters", "data.dataloader_param", "data.dataset_param.preprocess_parameters"
WORKER = Path(__file__).parents[1] / "workers" / "feed_worker.py"
TOPOLOGIES: dict[str, tuple[list[str], int]] = {
    "one process": ([], 1),
    "two copies": ([], 2),
    "tensor and pipeline": (split(2, [2, 0], [1, 1]), 4),
}
PACKED: Record = {f"{BASIC}.packing": "true", "training.micro_batch_size": 1, f"{LOADING}.tail": "pad", "training.global_batch_size": 6}
BUDGET: Record = {f"{LOADING}.token_budget": 256, "training.micro_batch_size": 1}
EPOCHS: dict[str, Record] = {
    "plain": {},
    "length": {f"{LOADING}.sampler_type": "LengthGroupedSampler"},
    "bucket": {f"{LOADING}.sampler_type": "BucketBatchSampler"},
    "knapsack": PACKED,
    "sequential, balanced": {**PACKED, f"{BASIC}.packing_strategy": "sequential", f"{LOADING}.balance_vision": "true"},
    "budget": BUDGET,
    "budget, packed": {**BUDGET, f"{BASIC}.packing": "true"},
    "cached, workers": {f"{BASIC}.preprocessing_num_workers": 2, "training.num_workers": 2},
}
"""Ways to take all samples in each step."""
IN_FILE_ORDER: Record = {"training.global_batch_size": 4, f"{LOADING}.shuffle": "false"}
ROWS: Record = {**PACKED, f"{LOADING}.tail": "continue", "training.global_batch_size": 2, "training.train_iters": 4, "training.lr_decay_iters": 4}
OTHERS: dict[str, Record] = {
    "streamed": {**IN_FILE_ORDER, f"{BASIC}.streaming": "true"},
    "mixed": {
        f"{BASIC}.dataset": "{folder}/data.json,{folder}/text.json",
        f"{BASIC}.mix_strategy": "interleave_over",
        f"{BASIC}.interleave_probs": '"0.75,0.25"',
        "training.global_batch_size": 4,
    },
    "evaluated": {
        **PACKED,
        f"{BASIC}.val_rate": 0.25,
        "training.eval_interval": 1,
        "training.eval_iters": 2,
        "training.global_batch_size": 4,
    },
    "skipping": {
        **PACKED,
        f"{BASIC}.dataset": "{folder}/bad.json",
        f"{BASIC}.bad_samples": "skip",
        f"{BASIC}.bad_samples_report": "{own}/report.jsonl",
    },
    "rows": ROWS,
}
SAVED = {"rows": {**ROWS, "training.save": "{own}/rows", "training.save_interval": 2}}
ON_STAGES = ("plain", "knapsack", "sequential, balanced", "budget, packed", "streamed", "evaluated", "skipping", "rows")
"""Tensor and pipeline ranks take what one process takes, whatever the order; what differs is who decodes, skips, evaluates and counts."""
FIRST = {
    "training.train_iters": 2,
    "training.lr_warmup_iters": 0,
    "training.global_batch_size": COUNT,
    f"{PREPROCESS}.video_max_pixels": 7056,
    f"{PREPROCESS}.video_min_pixels": 3136,
}


def sample(images: list[str], videos: list[str], number: int) -> Record:
    question = "<image>" * len(images) + "<video>" * len(videos) + f"What is {number}?"
    answer = f"{number} " * (1 + number % 5)
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"images": images, "videos": videos, "messages": turns}


def media_records() -> list[Record]:
    """A picture; a video; neither; two pictures, of which every other one has a video too."""
    rows = []
    for i in range(COUNT):
        images = [[f"{i % PICTURES}.png"], [], [], [f"{i % PICTURES}.png", f"{(i + 1) % PICTURES}.png"]][i % 4]
        videos = [[], ["short.mp4"], [], ["long.mp4"]][i % 4]
        rows.append(sample(images, videos, i))
    return rows


@pytest.fixture(scope="module")
def media_trial(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """Three datasets: good samples, the same with two more that cannot be used, and text alone."""
    trial = write_trial(tmp_path_factory.mktemp("media") / "trial", layers=2)
    folder = trial.folder
    write_video(folder / "short.mp4", frames=8, rate=4, size=(56, 56))
    write_video(folder / "long.mp4", frames=12, rate=4, size=(84, 56))
    for name in ("0.png", "long.mp4"):
        whole = (folder / name).read_bytes()
        (folder / f"broken_{name}").write_bytes(whole[: len(whole) // 2])
    rows = media_records()
    (folder / "data.json").write_text(json.dumps(rows))
    bad = [sample(["broken_0.png"], [], COUNT), sample([], ["broken_long.mp4"], COUNT + 1)]
    (folder / "bad.json").write_text(json.dumps([*rows[:3], bad[0], *rows[3:], bad[1]]))
    (folder / "text.json").write_text(json.dumps([sample([], [], i) for i in range(30, 35)]))
    return trial


@dataclass(frozen=True)
class Fed:
    """What the runs of one launch left."""

    folder: Path
    ranks: int

    def steps(self, name: str) -> list[Record]:
        return metrics(self.folder / f"{name}.jsonl")

    def losses(self, name: str) -> list[float]:
        return [row["loss"] for row in self.steps(name)]

    def decoded(self, name: str) -> list[tuple[int, int]]:
        """Images and videos, rank by rank."""
        counts = [json.loads((self.folder / f"{name}.{rank}.json").read_text()) for rank in range(self.ranks)]
        return [(count["images"], count["videos"]) for count in counts]


def launch(trial: Trial, folder: Path, overrides: list[str], ranks: int, feeds: dict[str, Record]) -> Fed:
    """All ``feeds`` in the processes of one launch."""
    folder.mkdir(parents=True)
    jobs = {}
    for name, changes in feeds.items():
        values = {key: str(value).format(folder=trial.folder, own=folder) for key, value in {**FIRST, **changes}.items()}
        jobs[name] = [*(f"{key}={value}" for key, value in values.items()), *overrides]
    (folder / "feeds.json").write_text(json.dumps({"run_file": str(trial.run_file), "folder": str(folder), "feeds": jobs}))
    # So many runs take longer than the patience with one.
    start(folder / "log", [str(WORKER), str(folder / "feeds.json")], ranks).finish(380).succeeded()
    return Fed(folder, ranks)


Feeds = Callable[[str], Fed]


def all_feeds(cache: Path) -> dict[str, Record]:
    return {**EPOCHS, "cached, workers": {**EPOCHS["cached, workers"], f"{BASIC}.cache_dir": str(cache)}, **OTHERS}


def fed_to(topology: str, feeds: Iterable[str]) -> list[str]:
    return [name for name in feeds if topology != "tensor and pipeline" or name in ON_STAGES]


@pytest.fixture(scope="module")
def one_process(media_trial: Trial, tmp_path_factory: pytest.TempPathFactory) -> Fed:
    folder = tmp_path_factory.mktemp("feeds")
    return launch(media_trial, folder / "one", *TOPOLOGIES["one process"], {**all_feeds(folder / "cache"), **SAVED, "in file order": IN_FILE_ORDER})


def resuming(trial: Trial, one: Fed, topology: str) -> Fed:
    feeds = all_feeds(one.folder.parent / "cache")
    feeds = {name: feeds[name] for name in fed_to(topology, feeds)} | {"resumed": {**ROWS, "model.load": str(one.folder / "rows" / "iter_0000002")}}
    return launch(trial, one.folder.parent / topology.replace(" ", "_"), *TOPOLOGIES[topology], feeds)


@pytest.fixture(scope="module")
def two_copies(media_trial: Trial, one_process: Fed) -> Fed:
    return resuming(media_trial, one_process, "two copies")


@pytest.fixture(scope="module")
def tensor_and_pipeline(media_trial: Trial, one_process: Fed) -> Fed:
    return resuming(media_trial, one_process, "tensor and pipeline")


@pytest.fixture
def feeds(request: pytest.FixtureRequest) -> Feeds:
    """``feeds(topology)``; one launch each."""

    def fed(topology: str) -> Fed:
        found: Fed = request.getfixturevalue(topology.replace(" ", "_"))
        return found

    return fed


def close(losses: list[float]) -> Any:
    return pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_all_ways_to_take_the_same_samples_give_the_same_losses(feeds: Feeds, topology: str) -> None:
    expected = feeds("one process").losses("plain")
    assert len(expected) == 2 and expected[1] < expected[0]
    for name in fed_to(topology, EPOCHS):
        assert feeds(topology).losses(name) == close(expected), name


@pytest.mark.parametrize("topology", list(TOPOLOGIES)[1:])
def test_an_order_of_its_own_is_the_same_at_every_split(feeds: Feeds, topology: str) -> None:
    expected, found = feeds("one process"), feeds(topology)
    for name in fed_to(topology, OTHERS):
        assert found.losses(name) == close(expected.losses(name)), name
        for key in ("consumed_samples", "supervised_tokens", "tokens", "samples", "skipped_samples", "lr"):
            assert [row[key] for row in found.steps(name)] == [row[key] for row in expected.steps(name)], (name, key)


def test_orders_of_their_own_are_not_all_the_same(feeds: Feeds) -> None:
    """Else the comparison above would say less than it seems to."""
    fed = feeds("one process")
    assert fed.losses("streamed") == fed.losses("in file order")
    assert len({round(fed.losses(name)[0], 4) for name in OTHERS}) == len(OTHERS)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_skipped_samples_are_counted_and_change_nothing_else(feeds: Feeds, topology: str) -> None:
    """The picture is cut off behind its header, the video in it: that has no place in a row, and is listed at the start."""
    fed = feeds(topology)
    assert fed.losses("skipping") == close(feeds("one process").losses("plain"))
    assert [row["skipped_samples"] for row in fed.steps("skipping")] == [1, 1]
    assert [row["skipped_samples"] for row in fed.steps("knapsack")] == [0, 0]
    listed = [json.loads(line) for line in (fed.folder / "report.jsonl").read_text().splitlines()]
    assert sorted(line["sample"] for line in listed) == [3, COUNT + 1]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_evaluation_beside_packed_training(feeds: Feeds, topology: str) -> None:
    expected, found = ([row["valid_loss"] for row in feeds(name).steps("evaluated")] for name in ("one process", topology))
    assert found == close(expected) and len(found) == 2 and expected[1] < expected[0]


@pytest.mark.parametrize("topology", list(TOPOLOGIES)[1:])
def test_a_packed_run_goes_on_at_another_split_in_the_middle_of_an_epoch(feeds: Feeds, topology: str) -> None:
    fed, one = feeds(topology), feeds("one process")
    assert fed.losses("resumed") == close(one.losses("rows")[2:])
    assert [row["consumed_samples"] for row in fed.steps("resumed")] == [6, 8]
    assert read_manifest(one.folder / "rows" / "iter_0000002").consumed_samples == 4


@pytest.mark.parametrize("name", ["plain", "knapsack", "budget, packed", "sequential, balanced"])
def test_media_are_decoded_once_per_copy_and_on_no_stage_without_vision(feeds: Feeds, name: str) -> None:
    """Two steps. Tensor ranks of the first stage decode the same."""
    whole = (2 * IMAGES, 2 * VIDEOS)
    assert feeds("one process").decoded(name) == [whole]
    first, second = feeds("two copies").decoded(name)
    assert (first[0] + second[0], first[1] + second[1]) == whole
    assert feeds("tensor and pipeline").decoded(name) == [whole, whole, (0, 0), (0, 0)]


def test_all_stages_decode_where_all_must_skip_alike(feeds: Feeds) -> None:
    decoded = feeds("tensor and pipeline").decoded("skipping")
    assert len(set(decoded)) == 1 and decoded[0][0] >= 2 * IMAGES
