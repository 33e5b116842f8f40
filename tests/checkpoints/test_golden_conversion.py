"""Conversion against what another converter made of the same weights."""

import pytest
import torch

from tangram.checkpoints.hf_directory import HFDirectory
from tangram.checkpoints.load_hf import load_hf
from tangram.checkpoints.mp_rank import MMDirectory, Rank, load_mm
from tangram.placement.blocks import place
from tangram.placement.topology import Topology

CASES = {
    "mm_25_tp2_pp2": ("qwen2_5_vl", {"tp_size": 2, "llm_pp_layers": [[1, 3]], "vit_pp_layers": [[4, 0]]}),
    "mm_25_tp1_pp2_vpp2": ("qwen2_5_vl", {"tp_size": 1, "llm_pp_layers": [[1, 1], [1, 1]], "vit_pp_layers": [[4, 0], [0, 0]]}),
    "mm_2_tp2_pp1": ("qwen2_vl", {"tp_size": 2, "llm_pp_layers": [4], "vit_pp_layers": [4]}),
    "mm_3_tp2_pp2": ("qwen3_vl", {"tp_size": 2, "llm_pp_layers": [[2, 2]], "vit_pp_layers": [[4, 0]]}),
}


@pytest.mark.parametrize("name", CASES)
def test_hf_to_mm_equals_the_reference_bit_by_bit(name, golden, kit, tmp_path):
    family, parallel = CASES[name]
    kit.to_mm(golden / f"hf_{family}", tmp_path / "mm", family=family, **parallel)

    expected = sorted(path.relative_to(golden / name) for path in (golden / name).rglob("*") if path.is_file())
    found = sorted(path.relative_to(tmp_path / "mm") for path in (tmp_path / "mm").rglob("*") if path.is_file() and path.suffix != ".json")
    assert found == expected
    assert (tmp_path / "mm" / "latest_checkpointed_iteration.txt").read_bytes() == (golden / name / "latest_checkpointed_iteration.txt").read_bytes()
    for folder in (golden / name / "release").iterdir():
        ours, theirs = kit.load_rank(tmp_path / "mm", folder.name), kit.load_rank(golden / name, folder.name)
        assert set(ours) == set(theirs)
        assert ours.pop("checkpoint_version") == theirs.pop("checkpoint_version") == 3.0
        for key in theirs:
            kit.assert_same(ours[key], theirs[key])


@pytest.mark.parametrize("name", CASES)
def test_mm_to_hf_gives_the_file_back_byte_for_byte(name, golden, kit, tmp_path):
    family, parallel = CASES[name]
    kit.to_hf(golden / name, golden / f"hf_{family}", tmp_path / "hf", family=family, **parallel)

    assert kit.files(tmp_path / "hf") == kit.files(golden / f"hf_{family}")
    for file in (golden / f"hf_{family}").iterdir():
        assert (tmp_path / "hf" / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize(("family", "elements"), [("qwen2_5_vl", 143_008), ("qwen2_vl", 144_256), ("qwen3_vl", 207_648), ("qwen3_vl_moe", 226_592)])
@pytest.mark.parametrize("lists", [([[0, 1], [1, 2]], [[3, 1], [0, 0]]), ([[0, 4]], [[3, 1]])])
def test_every_element_is_written_where_the_text_decoder_starts_after_the_first_stage(family, elements, lists, golden, kit, tmp_path):
    llm, vit = lists
    hf = golden / f"hf_{family}"
    kit.to_mm(hf, tmp_path / "mm", family=family, llm_pp_layers=llm, vit_pp_layers=vit)
    written = sum(
        tensor.numel()
        for folder in (tmp_path / "mm" / "release").iterdir()
        for key, chunk in kit.load_rank(tmp_path / "mm", folder.name).items()
        if key.startswith("model")
        for tensor in chunk.values()
    )
    assert written == elements
    kit.to_hf(tmp_path / "mm", hf, tmp_path / "hf", family=family)
    kit.assert_same(kit.hf_tensors(tmp_path / "hf"), kit.hf_tensors(hf))


def rank_parts(hf, topology, tp_rank, pp_rank, dtype=torch.bfloat16):
    """Placements of one rank and parameters for them, all NaN so that an element left out shows."""
    placements = [place(hf.table, topology, tp_rank, topology.chunk(pp_rank, vp)) for vp in range(topology.virtual)]
    return placements, [{name: torch.full(t.shape, torch.nan, dtype=dtype) for name, t in p.tensors.items()} for p in placements]


@pytest.mark.parametrize("name", CASES)
def test_loading_hf_directly_and_loading_the_reference_give_the_same_parameters(name, golden, kit):
    family, parallel = CASES[name]
    hf, mm = HFDirectory(golden / f"hf_{family}"), MMDirectory(golden / name)
    topology = Topology.build(
        vision_layers=4, text_layers=4, tensor=parallel["tp_size"], llm_pp_layers=parallel["llm_pp_layers"], vit_pp_layers=parallel["vit_pp_layers"]
    )
    for pp_rank in range(topology.pipeline):
        for tp_rank in range(topology.tensor):
            placements, direct = rank_parts(hf, topology, tp_rank, pp_rank)
            report = load_hf(hf, placements, direct)
            assert report.parameters == sum(map(len, direct))
            assert report.elements == sum(tensor.numel() for chunk in direct for tensor in chunk.values())
            placements, converted = rank_parts(hf, topology, tp_rank, pp_rank)
            load_mm(mm, placements, converted, topology, hf.model)
            stored = kit.load_rank(golden / name, mm.file(Rank(tp_rank, pp_rank), topology).parent.name)
            for key, ours, theirs in zip(sorted(k for k in stored if k.startswith("model")), direct, converted, strict=True):
                kit.assert_same(ours, stored[key])
                kit.assert_same(theirs, stored[key])
