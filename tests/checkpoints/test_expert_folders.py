"""Folders of expert-parallel ranks, with a small table whose parts are worked out by hand."""

import pytest
import torch

from tangram.checkpoints.mp_rank import TRACKER, MMDirectory, load_mm, write_ranks
from tangram.checkpoints.reader import MemoryReader, read_whole
from tangram.errors import CheckpointError, PlacementError
from tangram.placement.blocks import place
from tangram.placement.proof import prove_table
from tangram.placement.table import PackedGatedSplit, Replicated, Rule, Source, Split
from tangram.placement.topology import Topology

EXPERTS, HIDDEN, FFN = 4, 6, 4
TABLE = [
    Rule("layers.{i}.router", (Source("layers.{i}.gate", (EXPERTS, HIDDEN)),), Replicated(), "text"),
    Rule("layers.{i}.{e}.fc1", (Source("layers.{i}.gate_up", (EXPERTS, HIDDEN, 2 * FFN), stacked=True),), PackedGatedSplit(), "text", "expert"),
    Rule("layers.{i}.{e}.fc2", (Source("layers.{i}.down", (EXPERTS, FFN, HIDDEN), stacked=True),), Split(axis=1), "text", "expert"),
]
NONE = {"vision_layers": 0, "text_layers": 2}


@pytest.fixture(scope="module")
def tensors():
    shapes = prove_table(TABLE, Topology.build(**NONE))
    return {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}


def write(path, tensors, **split):
    topology = Topology.build(**NONE, **split)
    write_ranks(path / "release", TABLE, topology, MemoryReader(tensors))
    (path / TRACKER).write_text("release")
    return topology


def load(path, folder):
    return torch.load(path / "release" / folder / "model_optim_rng.pt", weights_only=True)["model"]


def read(path, topology, tensors):
    return MMDirectory(path).canonical(TABLE, topology, {name: tuple(tensor.shape) for name, tensor in tensors.items()})


SPLITS = {
    "ep2": ({"expert": 2}, ["mp_rank_00_000", "mp_rank_00_001"]),
    "pp2": ({"llm_pp_layers": [1, 1]}, ["mp_rank_00_000", "mp_rank_00_001"]),
    "tp2 ep2": ({"tensor": 2, "expert": 2}, ["mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"]),
    "pp2 ep2": (
        {"expert": 2, "llm_pp_layers": [1, 1]},
        ["mp_rank_00_000_000", "mp_rank_00_000_001", "mp_rank_00_001_000", "mp_rank_00_001_001"],
    ),
    "vision tp2": ({"vision_tensor": 2}, ["mp_rank_00", "mp_rank_01"]),
}


@pytest.mark.parametrize("name", SPLITS)
def test_folders_are_named_after_the_axes_that_are_split_and_all_comes_back(name, tensors, tmp_path):
    split, folders = SPLITS[name]
    topology = write(tmp_path, tensors, **split)
    assert sorted(path.name for path in (tmp_path / "release").iterdir()) == folders
    source = read(tmp_path, topology, tensors)
    for tensor in tensors:
        assert torch.equal(read_whole(source, tensor), tensors[tensor]), tensor


def test_a_rank_holds_its_experts_renumbered_and_its_part_of_each(tensors, tmp_path):
    write(tmp_path, tensors, tensor=2, expert=2)
    found = load(tmp_path, "mp_rank_01_001")
    # expert-parallel rank 1 holds experts 2 and 3; tensor rank 1 the last two of four rows of gate and of up
    gate_up, down = tensors["layers.1.gate_up"][3].T, tensors["layers.1.down"][3].T
    assert torch.equal(found["layers.1.1.fc1"], torch.cat([gate_up[2:4], gate_up[6:8]]))
    assert torch.equal(found["layers.1.1.fc2"], down[:, 2:4])
    assert torch.equal(found["layers.1.router"], tensors["layers.1.gate"])
    assert "layers.1.2.fc1" not in found


def test_the_split_tells_whether_a_folder_is_a_stage_or_an_expert_rank(tensors, tmp_path):
    write(tmp_path, tensors, expert=2)
    with pytest.raises(PlacementError, match=r"mp_rank_00_000/model_optim_rng.pt: the tensors are not those of this model and split"):
        read(tmp_path, Topology.build(**NONE, llm_pp_layers=[1, 1]), tensors)


def test_another_number_of_expert_ranks_is_refused_with_both(tensors, tmp_path):
    write(tmp_path, tensors, expert=2)
    with pytest.raises(
        CheckpointError,
        match=r"holds 2 ranks, tensor-parallel 1 x pipeline 1 x expert-parallel 2, "
        r"but the run is tensor-parallel 1 x pipeline 1 x expert-parallel 4; 2 of its folders are missing: mp_rank_00_002, mp_rank_00_003",
    ):
        read(tmp_path, Topology.build(**NONE, expert=4), tensors)


def test_folders_of_two_kinds_are_refused(tensors, tmp_path):
    write(tmp_path, tensors, expert=2)
    (tmp_path / "release" / "mp_rank_00").mkdir()
    with pytest.raises(CheckpointError, match=r"no folders mp_rank_TT, mp_rank_TT_PPP or mp_rank_TT_PPP_EEE of one kind"):
        MMDirectory(tmp_path)


def test_copies_on_expert_ranks_are_compared(tensors, tmp_path):
    topology = write(tmp_path, tensors, expert=2)
    file = tmp_path / "release" / "mp_rank_00_001" / "model_optim_rng.pt"
    state = torch.load(file, weights_only=True)
    state["model"]["layers.0.router"][0, 0] += 1
    torch.save(state, file)
    source = read(tmp_path, topology, tensors)
    with pytest.raises(CheckpointError, match=r"layers.0.gate: its copies in release/mp_rank_00_000/.* and release/mp_rank_00_001/.* differ"):
        read_whole(source, "layers.0.gate")


def test_training_loads_its_own_expert_rank(tensors, tmp_path, kit):
    from tangram.families.base import get_family

    topology = write(tmp_path, tensors, tensor=2, expert=2)
    placements = [place(TABLE, topology, 1, topology.chunk(0), ep_rank=1)]
    parameters = [{name: torch.zeros(layout.shape, dtype=torch.bfloat16) for name, layout in placements[0].tensors.items()}]
    model = get_family("qwen2_5_vl").from_hf_config(kit.golden_config())
    load_mm(MMDirectory(tmp_path), placements, parameters, topology, model)
    kit.assert_same(parameters[0], load(tmp_path, "mp_rank_01_001"))
