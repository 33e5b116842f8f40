"""A family of today by ``docs/bring-a-model.md``: InternVL as a plug-in, against transformers, there and back."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tangram.align.reference import load_reference
from tangram.align.run import align, open_subject
from tangram.align.task import Split
from tangram.checkpoints.convert import convert_hf_to_mm, convert_mm_to_hf
from tangram.checkpoints.options import HFOptions, ParallelOptions, ToHFOptions, ToMMOptions
from tangram.families.base import get_family
from tangram.families.plugins import load_plugins
from tangram.families.tiny import TinySpec
from tests.align.conftest import forked  # noqa: F401

PLUGIN = Path(__file__).parent.parent / "data" / "plugins" / "internvl"
SPLITS = [
    Split(),
    Split(tensor=2),
    Split(pipeline=2),
    Split(pipeline=2, virtual=2, vit_pp_layers=[[1, 2], [1, 0]], llm_pp_layers=[[0, 0], [2, 2]]),
    Split(tensor=2, sequence_parallel=True),
    Split(tensor=2, pipeline=2, vit_pp_layers=[2, 2], llm_pp_layers=[0, 4]),
]


def test_the_plugin_is_small() -> None:
    assert sum(len(path.read_text().splitlines()) for path in PLUGIN.glob("*.py")) <= 300


@pytest.mark.compat
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("forked")
def test_every_split_gives_what_transformers_gives_and_weights_go_there_and_back(tmp_path: Path) -> None:
    load_plugins([PLUGIN])
    hf = tmp_path / "hf"
    family = get_family("internvl")
    family.tiny(hf, 0, False, TinySpec(hidden=32, vocab=163, weight_std=0.1))
    model = open_subject(hf, tmp_path).model
    split, topology = SPLITS[3], SPLITS[3].topology(model)
    lists = {"vit_pp_layers": [list(row) for row in topology.vision], "llm_pp_layers": [list(row) for row in topology.text]}
    parallel, directory = ParallelOptions(tp_size=1, **lists), HFOptions(hf_dir=str(hf))
    convert_hf_to_mm(ToMMOptions(mm_dir=str(tmp_path / "mm"), hf_config=directory, parallel_config=parallel), "internvl")
    back = ToHFOptions(mm_dir=str(tmp_path / "mm"), save_hf_dir=str(tmp_path / "back"), hf_config=directory, parallel_config=parallel)
    convert_mm_to_hf(back, "internvl")
    there, here = load_file(hf / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert there.keys() == here.keys() and all(there[key].equal(here[key]) for key in there)
    outcomes = align(hf, SPLITS, micro_batch_size=1, plugins=[str(PLUGIN)])
    outcomes += align(hf, [split], plugins=[str(PLUGIN)], checkpoint=tmp_path / "mm")
    names = {family.canonical_name(name) for name in load_reference(hf).state_dict()}
    for outcome in outcomes:
        assert outcome.report.passed, f"{outcome.split}: {outcome.report.failures}"
        gradients = {row.name: row.norm for row in outcome.report.rows if row.kind == "gradient"}
        assert gradients.keys() == names and all(norm > 0 for norm in gradients.values())
