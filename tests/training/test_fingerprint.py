"""What makes a data position mean something else, and what does not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tangram.config.run import RunConfig
from tangram.config.yaml_config import read_run
from tangram.training.fingerprint import dataset_fingerprint
from tests.trial import Trial

BASIC, LOADING = "data.dataset_param.basic_parameters", "data.dataloader_param"


def fingerprint(trial: Trial, *overrides: str, batch: int = 8) -> str:
    run: RunConfig = read_run(trial.run_file, list(overrides))
    return dataset_fingerprint(run, batch)


@pytest.mark.parametrize(
    ("overrides", "shown"),
    [
        ([f"{LOADING}.shuffle=false"], "shuffle False"),
        ([f"{LOADING}.tail=continue"], "tail continue"),
        ([f"{LOADING}.drop_last=false"], "tail pad"),
        ([f"{BASIC}.max_samples=9"], "max_samples 9"),
        ([f"{BASIC}.mix_strategy=interleave_over"], "mix_strategy interleave_over"),
        ([f"{BASIC}.mix_strategy=interleave_over", f"{BASIC}.interleave_probs='1'"], "interleave_probs 1"),
        ([f"{BASIC}.val_rate=0.1"], "val_rate 0.1"),
        ([f"{LOADING}.sampler_type=LengthGroupedSampler"], "sampler_type LengthGroupedSampler"),
        ([f"{LOADING}.sampler_type=BucketBatchSampler"], "micro_batch_size 2"),
        ([f"{LOADING}.sampler_type=LengthGroupedSampler", "data.dataset_param.preprocess_parameters.image_max_pixels=9000"], "image_max_pixels 9000"),
        ([f"{BASIC}.packing=true"], "packing True"),
        ([f"{BASIC}.packing=true", f"{BASIC}.packing_strategy=sequential"], "packing_strategy sequential"),
        ([f"{BASIC}.packing=true", f"{BASIC}.cutoff_len=99"], "cutoff 99"),
        ([f"{BASIC}.packing=true", f"{BASIC}.preprocessing_batch_size=7"], "preprocessing_batch_size 7"),
    ],
)
def test_what_moves_samples_shows_by_its_name(trial: Trial, overrides: list[str], shown: str) -> None:
    plain, other = fingerprint(trial), fingerprint(trial, *overrides)
    assert shown not in plain and shown in other.partition(" with ")[2].split(", "), other
    assert plain.partition(" ")[0] == other.partition(" ")[0], "the files are the same"


def test_what_only_decides_who_reads_a_sample_does_not_show(trial: Trial, tmp_path: Path) -> None:
    others: dict[str, Any] = {
        f"{LOADING}.prefetch_factor": 9,
        f"{LOADING}.balance_vision": "true",
        f"{LOADING}.token_budget": 512,
        f"{BASIC}.bad_samples": "skip",
        f"{BASIC}.cache_dir": tmp_path,
        "training.num_workers": 2,
        "training.micro_batch_size": 1,
    }
    assert fingerprint(trial, *(f"{key}={value}" for key, value in others.items())) == fingerprint(trial)
    assert fingerprint(trial, batch=4) != fingerprint(trial)


def test_the_content_counts_and_not_the_name_or_the_date(trial: Trial, tmp_path: Path) -> None:
    text = (trial.folder / "data.json").read_bytes()
    copy = tmp_path / "other_name.json"
    copy.write_bytes(text)
    os.utime(copy, (1, 1))
    assert fingerprint(trial, f"{BASIC}.dataset={copy}") == fingerprint(trial)
    copy.write_bytes(text.replace(b"What is 7", b"What is 8"))
    assert len(copy.read_bytes()) == len(text) and fingerprint(trial, f"{BASIC}.dataset={copy}") != fingerprint(trial)
    both = [text[: len(text) // 2], text[len(text) // 2 :]]
    (tmp_path / "a.json").write_bytes(both[0])
    (tmp_path / "b.json").write_bytes(both[1])
    assert fingerprint(trial, f"{BASIC}.dataset={tmp_path}/a.json,{tmp_path}/b.json") != fingerprint(
        trial, f"{BASIC}.dataset={tmp_path}/b.json,{tmp_path}/a.json"
    )


def test_a_streamed_file_counts_by_its_size_and_ends(trial: Trial, tmp_path: Path) -> None:
    stream = f"{BASIC}.streaming=true"
    path = tmp_path / "long.jsonl"
    lines = [b'{"text": "%06d"}\n' % number for number in range(200_000)]
    found = []
    for change in (None, 0, len(lines) - 1):
        changed = list(lines)
        if change is not None:
            changed[change] = b'{"text": "abcdef"}\n'
        path.write_bytes(b"".join(changed))
        found.append(fingerprint(trial, stream, f"{BASIC}.dataset={path}"))
    assert len(set(found)) == 3
