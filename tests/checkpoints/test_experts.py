"""Stacked experts: against what another converter made of them, either way round in the file, and in training checkpoints."""

from __future__ import annotations

import json
import math
import re
import shutil
from itertools import pairwise

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tangram.checkpoints.copier import LocalSource, fill
from tangram.checkpoints.dcp_blocks import BlockTensor, block_piece, flat_pieces
from tangram.checkpoints.expert_stacks import turned_stacks
from tangram.checkpoints.export import export_hf
from tangram.checkpoints.hf_directory import HFDirectory
from tangram.checkpoints.mp_rank import MMDirectory, write_ranks
from tangram.checkpoints.reader import TensorInfo, read_whole
from tangram.errors import CheckpointError
from tangram.families.base import get_family
from tangram.families.qwen3_vl_moe.tensors import expert_rules
from tangram.placement.blocks import canonical_shapes, place, place_all
from tangram.placement.topology import Topology

GOLDEN_RANKS = ("mp_rank_00_000", "mp_rank_00_001")
"""The second number is the expert-parallel rank: there is one pipeline stage."""
EP2 = Topology.build(vision_layers=4, text_layers=4, expert=2)
UP, DOWN = "model.language_model.layers.{}.mlp.experts.gate_up_proj", "model.language_model.layers.{}.mlp.experts.down_proj"


@pytest.fixture
def hf(golden):
    return HFDirectory(golden / "hf_qwen3_vl_moe")


@pytest.mark.parametrize("ep_rank", [0, 1])
def test_every_parameter_of_an_expert_parallel_rank_equals_the_reference(ep_rank, golden, hf, kit):
    placement = place(hf.table, EP2, 0, EP2.chunk(0), ep_rank)
    ours = {name: torch.full(layout.shape, torch.nan, dtype=torch.bfloat16) for name, layout in placement.tensors.items()}
    for name, layout in placement.tensors.items():
        fill(layout, ours[name], hf)
    kit.assert_same(ours, kit.load_rank(golden / "mm_3moe_tp1_pp1_ep2", GOLDEN_RANKS[ep_rank])["model"])


def test_written_directories_equal_the_reference(golden, hf, kit, tmp_path):
    write_ranks(tmp_path / "release", hf.table, EP2, hf)
    assert sorted(folder.name for folder in (tmp_path / "release").iterdir()) == list(GOLDEN_RANKS)
    for name in GOLDEN_RANKS:
        kit.assert_same(kit.load_rank(tmp_path, name)["model"], kit.load_rank(golden / "mm_3moe_tp1_pp1_ep2", name)["model"])


def test_the_reference_directory_reads_as_the_file(golden, hf, kit):
    source = MMDirectory(golden / "mm_3moe_tp1_pp1_ep2").canonical(hf.table, EP2, hf.shapes)
    kit.assert_same({name: read_whole(source, name) for name in source.names()}, kit.hf_tensors(hf.path))


def test_the_reference_of_all_ranks_gives_the_file_back_byte_for_byte(golden, hf, kit, tmp_path):
    ranks = [kit.load_rank(golden / "mm_3moe_tp1_pp1_ep2", name)["model"] for name in GOLDEN_RANKS]
    parts = [(place(hf.table, EP2, 0, EP2.chunk(0), rank), tensors, GOLDEN_RANKS[rank]) for rank, tensors in enumerate(ranks)]
    export_hf(LocalSource(parts, hf.shapes), tmp_path / "hf", hf.family, files_from=hf.path, hf_config=hf.config, shards=hf.shards)
    for file in hf.path.iterdir():
        assert (tmp_path / "hf" / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_a_tensor_parallel_rank_holds_its_half_of_the_gate_and_of_the_up_projection(tp_rank, hf, kit):
    """Expert 3 of layer 2 is the second of expert-parallel rank 1; the public layout is [gate of the rank; up of the rank]."""
    split = Topology.build(vision_layers=4, text_layers=4, tensor=2, expert=2)
    layouts = place(hf.table, split, tp_rank, split.chunk(0), 1).tensors
    found = []
    for linear in ("linear_fc1", "linear_fc2"):
        layout = layouts[f"text_decoder.decoder.layers.2.mlp.experts.local_experts.1.{linear}.weight"]
        found.append(torch.full(layout.shape, torch.nan, dtype=torch.bfloat16))
        fill(layout, found[-1], hf)
    stored = kit.hf_tensors(hf.path)
    gate, up = stored[UP.format(2)][3].T.chunk(2)
    assert torch.equal(found[0], torch.cat([gate.chunk(2)[tp_rank], up.chunk(2)[tp_rank]]))
    assert torch.equal(found[1], stored[DOWN.format(2)][3].T.chunk(2, dim=1)[tp_rank])


def changed(golden, kit, folder, change):
    """A copy of the reference whose tensors ``change`` has changed."""
    shutil.copytree(golden / "hf_qwen3_vl_moe", folder)
    kit.edit(folder, change)
    return folder


def turn(*patterns):
    def change(tensors):
        for name in tensors:
            if any(re.search(pattern, name) for pattern in patterns):
                tensors[name] = tensors[name].transpose(1, 2).contiguous()

    return change


def test_experts_stored_as_out_by_in_are_read_as_the_hubs(golden, hf, kit, tmp_path):
    other = HFDirectory(changed(golden, kit, tmp_path / "turned", turn("experts")))
    assert kit.hf_tensors(other.path)[UP.format(0)].shape == (4, 48, 32)
    other.check_model()
    assert other.names() == hf.names()
    kit.assert_same({name: read_whole(other, name) for name in other.names()}, kit.hf_tensors(hf.path))
    part = (slice(2, 3), slice(5, 9), slice(30, 41))
    assert torch.equal(other.read(UP.format(3), (2, 5, 30), (1, 4, 11)), kit.hf_tensors(hf.path)[UP.format(3)][part])


@pytest.mark.compat
def test_experts_that_transformers_saves_are_read_as_the_hubs(golden, hf, kit, tmp_path):
    """transformers 4.57 writes the stacks as it found them, 5.23 the other way round, and ``num_local_experts`` for ``num_experts``."""
    from transformers import AutoModelForImageTextToText, __version__

    AutoModelForImageTextToText.from_pretrained(hf.path, dtype=torch.bfloat16).save_pretrained(tmp_path)
    written = kit.hf_tensors(tmp_path)[UP.format(0)].shape
    assert written == ((4, 48, 32) if int(__version__.split(".")[0]) >= 5 else (4, 32, 48))
    saved = HFDirectory(tmp_path)
    assert saved.model == hf.model
    saved.check_model()
    kit.assert_same({name: read_whole(saved, name) for name in saved.names()}, kit.hf_tensors(hf.path))


def test_down_tells_where_gate_and_up_are_square(golden, kit, tmp_path):
    """Width 16 of experts of a model of width 32: [4, 32, 32] and [4, 16, 32]."""

    def narrow(tensors):
        for name, tensor in tensors.items():
            if name.endswith("gate_up_proj"):
                tensors[name] = torch.randn(4, 32, 32).to(tensor.dtype)
            if name.endswith("experts.down_proj"):
                tensors[name] = torch.randn(4, 16, 32).to(tensor.dtype)

    hub, other = (changed(golden, kit, tmp_path / name, narrow) for name in ("hub", "other"))
    kit.edit(other, lambda tensors: (tensors.update(kit.hf_tensors(hub)), turn("experts")(tensors)))
    for folder in (hub, other):
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["moe_intermediate_size"] = 16
        (folder / "config.json").write_text(json.dumps(config))
    for folder in (hub, other):
        directory = HFDirectory(folder)
        kit.assert_same({name: read_whole(directory, name) for name in directory.names()}, kit.hf_tensors(hub))


def test_experts_of_two_orientations_are_refused(golden, kit, tmp_path):
    folder = changed(golden, kit, tmp_path / "mixed", turn(r"layers\.3\..*experts\.down"))
    with pytest.raises(CheckpointError, match=r"7 tensors of experts are \[experts, in, out\]: .* and 1 are \[experts, out, in\]: .*layers.3"):
        HFDirectory(folder).names()


def test_experts_of_which_nothing_tells_the_orientation_are_refused():
    with pytest.raises(CheckpointError, match=r"here: the experts' tensors have in = out, w, so nothing tells whether"):
        turned_stacks({"w": (2, 3, 3)}, {"w": TensorInfo((2, 3, 3), torch.float32)}, "here")


def test_an_expert_of_another_width_is_a_wrong_shape(golden, kit, tmp_path):
    folder = changed(golden, kit, tmp_path / "wrong", lambda tensors: tensors.update({UP.format(1): torch.zeros(4, 32, 40, dtype=torch.bfloat16)}))
    with pytest.raises(CheckpointError, match=r"another shape.*gate_up_proj has \(4, 32, 40\) in the file and \(4, 32, 48\) in the model"):
        HFDirectory(folder).check_model()


class TestTrainingCheckpoints:
    """Experts under canonical names: saved at one split, whole and in flat stretches, and loaded at another."""

    pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

    @pytest.fixture
    def whole(self, hf):
        rules = [rule for rule in expert_rules(hf.model.text_decoder) if rule.place == "expert"]
        shapes = canonical_shapes(rules, EP2)
        return rules, {name: torch.arange(math.prod(shape), dtype=torch.float32).view(shape) for name, shape in shapes.items()}

    @staticmethod
    def cut(layout, whole):
        """The local tensor, by index arithmetic of its own: rows are [gate; up] or out, columns in, of one expert."""
        local = torch.full(layout.shape, -1.0)
        for block in layout.blocks:
            expert, first_in, first_out = block.canonical_start
            rows, columns = block.shape
            stack = whole[block.canonical][expert, first_in : first_in + columns, first_out : first_out + rows]
            local[block.local_slices] = stack.T
        return local

    @pytest.mark.parametrize("stretches", [1, 5])
    def test_saved_at_tp2_ep2_and_loaded_at_tp1_ep1_and_by_plain_dcp(self, whole, stretches, tmp_path):
        rules, tensors = whole
        saved, loaded = Topology.build(vision_layers=4, text_layers=4, tensor=2, expert=2), Topology.build(vision_layers=4, text_layers=4)
        pieces = {name: [] for name in tensors}
        for placement in place_all(rules, saved):
            for layout in placement.tensors.values():
                local = self.cut(layout, tensors)
                flat = local.flatten()
                marks = [round(flat.numel() * i / stretches) for i in range(stretches + 1)]
                for block in layout.blocks:
                    if stretches == 1:
                        pieces[block.canonical].append(block_piece(block, local))
                    else:
                        pieces[block.canonical] += [p for a, b in pairwise(marks) for p in flat_pieces(block, layout.shape, a, flat[a:b])]
        dcp.save({name: BlockTensor(tuple(tensor.shape), pieces[name]) for name, tensor in tensors.items()}, checkpoint_id=tmp_path)

        plain = {name: torch.full_like(tensor, -1) for name, tensor in tensors.items()}
        dcp.load(plain, checkpoint_id=tmp_path)
        assert all(torch.equal(plain[name], tensor) for name, tensor in tensors.items())

        (placement,) = place_all(rules, loaded)
        locals_ = {name: torch.full(layout.shape, -1.0) for name, layout in placement.tensors.items()}
        targets = {name: [] for name in tensors}
        for name, layout in placement.tensors.items():
            for block in layout.blocks:
                targets[block.canonical].append(block_piece(block, locals_[name]))
        dcp.load({name: BlockTensor(tuple(tensor.shape), targets[name]) for name, tensor in tensors.items()}, checkpoint_id=tmp_path)
        assert len(locals_) == 4 * 4 * 2
        for name, layout in placement.tensors.items():
            assert torch.equal(locals_[name], self.cut(layout, tensors)), name


def test_a_tied_model_with_experts_goes_there_and_back(kit, tiny_hf, tmp_path):
    folder = tiny_hf("qwen3_vl_moe", tied=True)
    kit.to_mm(folder, tmp_path / "mm", family="qwen3_vl_moe", tp_size=2, llm_pp_layers=[[0, 1], [1, 2]], vit_pp_layers=[[2, 2], [0, 0]])
    last = kit.load_rank(tmp_path / "mm", "mp_rank_01_001")["model1"]
    assert torch.equal(last["text_decoder.output_layer.weight"], kit.hf_tensors(folder)["model.language_model.embed_tokens.weight"][80:])
    kit.to_hf(tmp_path / "mm", folder, tmp_path / "hf", family="qwen3_vl_moe")
    kit.assert_same(kit.hf_tensors(tmp_path / "hf"), kit.hf_tensors(folder))


def test_the_hubs_keys_are_the_canonical_ones(golden, kit):
    for family in ("qwen3_vl", "qwen3_vl_moe"):
        for key in kit.hf_tensors(golden / f"hf_{family}"):
            assert get_family(family).canonical_name(key) == get_family(family).hub_name(key) == key
