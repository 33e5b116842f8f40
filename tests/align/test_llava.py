"""LLaVA-1.5 on the megatron backend against transformers: every split in one launch, a tower whose last layers are idle, converted weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tangram.align.curves import compare_curves
from tangram.align.reference import load_reference
from tangram.align.run import align, open_subject
from tangram.align.sharded import Sharded
from tangram.align.task import Split
from tangram.checkpoints.convert import convert_hf_to_mm
from tangram.checkpoints.options import HFOptions, ParallelOptions, ToMMOptions
from tangram.families.base import get_family
from tangram.families.llava import LLAVA
from tangram.families.tiny import TinySpec

pytestmark = [pytest.mark.usefixtures("forked"), pytest.mark.timeout(300)]

SPLITS = {
    "one process": Split(),
    "virtual stages": Split(pipeline=2, virtual=2, vit_pp_layers=[[1, 2], [1, 0]], llm_pp_layers=[[0, 0], [2, 2]]),
    "the idle layer alone on a stage": Split(pipeline=2, vit_pp_layers=[3, 1], llm_pp_layers=[0, 4]),
    "tensor and pipeline": Split(tensor=2, pipeline=2, vit_pp_layers=[2, 2], llm_pp_layers=[0, 4]),
    "copies": Split(tensor=2, data=2, distributed_optimizer=True),
}
ALIGNED = ["one process", "the idle layer alone on a stage", "tensor and pipeline"]
"""Beside those of ``tests.align.matrix``; the others start from random or converted weights."""


def write_llava(folder: Path, *, tied: bool = False, **config: object) -> Path:
    get_family("llava").tiny(folder, 0, tied, TinySpec(hidden=32, vocab=163, weight_std=0.1))
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return folder


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llava(tmp_path_factory.mktemp("llava") / "hf")


@pytest.mark.compat
def test_every_split_gives_the_loss_logits_and_gradients_of_transformers(hf: Path) -> None:
    """Rows with one picture, with none, which alone make a micro-batch, and with two. The tower's names in transformers 4 are not the canonical ones,
    on either backend."""
    outcomes = align(hf, [*(SPLITS[name] for name in ALIGNED), Sharded(processes=2)], micro_batch_size=1)
    idle = ("model.vision_tower.encoder.layers.3.", "model.vision_tower.post_layernorm.")
    names = {LLAVA.canonical_name(name) for name in load_reference(hf).state_dict()}
    for name, outcome in zip([*ALIGNED, "FSDP2"], outcomes, strict=True):
        assert outcome.report.passed and outcome.report.tolerance == 1e-5, f"{name}: {outcome.report.failures}"
        compared = {row.name: row for row in outcome.report.rows if row.kind == "gradient"}
        assert compared.keys() == names, name
        assert {name for name, row in compared.items() if row.norm == 0} == {name for name in names if name.startswith(idle)}


def test_what_travels_past_idle_layers_is_the_feature_layers_output(tmp_path: Path) -> None:
    """Of four layers the last two are idle; the third stage holds one of them and hands on what it got. Tied, so the embedding is on two stages."""
    hf = write_llava(tmp_path / "hf", tied=True, vision_feature_layer=-3)
    (outcome,) = align(hf, [Split(pipeline=4, vit_pp_layers=[1, 1, 1, 1], llm_pp_layers=[0, 0, 0, 4])])
    assert outcome.report.passed, outcome.report.failures


def test_converted_weights_are_those_of_transformers(hf: Path, tmp_path: Path) -> None:
    splits, folders = [SPLITS[name] for name in ("virtual stages", "tensor and pipeline")], []
    for number, split in enumerate(splits):
        folders.append(tmp_path / f"mm{number}")
        topology = split.topology(open_subject(hf, tmp_path).model)
        parallel = ParallelOptions(
            tp_size=split.tensor, vit_pp_layers=[list(row) for row in topology.vision], llm_pp_layers=[list(row) for row in topology.text]
        )
        convert_hf_to_mm(ToMMOptions(mm_dir=str(folders[-1]), hf_config=HFOptions(hf_dir=str(hf)), parallel_config=parallel), "llava")
    for outcome in align(hf, splits, checkpoint=folders):
        assert outcome.report.passed, f"{outcome.split}: {outcome.report.failures}"


def test_random_weights_and_training_do_not_depend_on_the_split_or_the_backend(hf: Path) -> None:
    drawn = ["one process", "virtual stages", "tensor and pipeline", "copies"]
    curves = compare_curves(hf, [*(SPLITS[name] for name in drawn), Sharded(processes=2)], steps=4, seed=7)
    assert len(curves.deviations) == len(drawn)
    assert curves.worst <= 1e-6, curves.deviations
