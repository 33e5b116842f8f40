"""Flat ranges as rectangles, blocks under canonical names, and DCP's own load on what we wrote."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tangram.checkpoints import dcp_blocks
from tangram.checkpoints.dcp_blocks import BlockTensor, Piece, block_piece, flat_pieces, flat_range_boxes
from tests import dcp_toy

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_a_flat_range_of_a_matrix_worked_by_hand() -> None:
    boxes = flat_range_boxes((4, 5), 3, 17)  # last two of row 0, rows 1 and 2, first two of row 3
    assert [(box.start, box.shape) for box in boxes] == [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 2))]
    assert [(box.start, box.shape) for box in flat_range_boxes((4, 5), 6, 9)] == [((1, 1), (1, 3))]
    assert flat_range_boxes((4, 5), 7, 7) == []
    assert [(box.start, box.shape) for box in flat_range_boxes((7,), 2, 5)] == [((2,), (3,))]


@pytest.mark.parametrize("shape", [(6,), (4, 5), (3, 1), (1, 7), (3, 4, 2), (2, 3, 2, 2), (2, 2, 1, 2, 3)])
def test_every_flat_range_is_covered_once_in_order_by_few_boxes(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(math.prod(shape)).view(shape)
    for begin, end in itertools.combinations(range(math.prod(shape) + 1), 2):
        boxes = flat_range_boxes(shape, begin, end)
        cut = [numbers[tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))].flatten() for box in boxes]
        assert torch.cat(cut).tolist() == list(range(begin, end)), (begin, end)
        assert len(boxes) <= 2 * len(shape) - 1


@pytest.mark.parametrize("tensor", [1, 2])
def test_blocks_of_every_flat_stretch_give_the_canonical_tensors_back(tensor: int) -> None:
    """All parameters of the real table (fused QKV, gate and up, vocabulary with padding, a 5-D convolution), cut at random places."""
    topology = dcp_toy.split(tensor)
    shapes = dcp_toy.shapes(topology, tied=False)
    whole = {name: torch.arange(math.prod(shape), dtype=torch.float64).view(shape) for name, shape in shapes.items()}
    rebuilt = {name: torch.full(shape, -1.0, dtype=torch.float64) for name, shape in shapes.items()}
    rng = random.Random(7)
    for tp_rank in range(tensor):
        (placement,) = dcp_toy.placements(topology, False, tp_rank, 0)
        for name, layout in placement.tensors.items():
            flat = dcp_toy.cut(placement, name, whole).flatten()
            marks = sorted({0, flat.numel(), *(rng.randrange(flat.numel()) for _ in range(4))})
            for begin, end in itertools.pairwise(marks):
                for block in layout.blocks:
                    if block.canonical is None:
                        continue
                    for piece in flat_pieces(block, layout.shape, begin, flat[begin:end]):
                        assert piece.data.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr(), "a view, not a copy"
                        rebuilt[block.canonical][tuple(slice(a, a + n) for a, n in zip(piece.start, piece.data.shape, strict=True))] = piece.data
    for name in shapes:
        assert torch.equal(rebuilt[name], whole[name]), name


def test_plain_dcp_load_reads_q_k_and_v_of_a_fused_parameter(tmp_path: Path) -> None:
    """4 query heads in 2 groups, one row per head: the local order is q0 q1 k0 v0 q2 q3 k1 v1 (Megatron's interleaved QKV)."""
    prefix = "model.language_model.layers.0.self_attn"
    (placement,) = dcp_toy.placements(dcp_toy.split(), False, 0, 0)
    layout = placement.tensors["text_decoder.decoder.layers.0.self_attention.linear_qkv.weight"]
    rows = torch.arange(32.0).view(32, 1).expand(32, 16).contiguous()  # head width 4: rows 0-3 are head q0, 4-7 q1, 8-11 k0, 12-15 v0, 16-19 q2 ...
    pieces: dict[str, list[Piece]] = {}
    for block in layout.blocks:
        assert block.canonical is not None
        pieces.setdefault(block.canonical, []).append(block_piece(block, rows))
    state = {name: BlockTensor((16 if "q_proj" in name else 8, 16), parts) for name, parts in pieces.items()}
    dcp.save(state, checkpoint_id=tmp_path)

    loaded = {f"{prefix}.{x}_proj.weight": torch.empty(16 if x == "q" else 8, 16) for x in "qkv"}
    dcp.load(loaded, checkpoint_id=tmp_path)
    heads = {x: loaded[f"{prefix}.{x}_proj.weight"][:, 0].tolist() for x in "qkv"}
    assert heads == {
        "q": [0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23],
        "k": [8, 9, 10, 11, 24, 25, 26, 27],
        "v": [12, 13, 14, 15, 28, 29, 30, 31],
    }


def test_column_blocks_and_transposed_targets_are_filled_in_place(tmp_path: Path) -> None:
    full = torch.arange(24.0).view(6, 4)
    dcp.save({"w": BlockTensor((6, 4), [Piece((0, 0), full[:, :1]), Piece((0, 1), full[:, 1:])])}, checkpoint_id=tmp_path)
    other = torch.zeros(4, 6)
    dcp.load({"w": BlockTensor((6, 4), [Piece((2, 1), other.t()[2:5, 1:3])])}, checkpoint_id=tmp_path)
    expected = torch.zeros(4, 6)
    expected.t()[2:5, 1:3] = full[2:5, 1:3]
    assert torch.equal(other, expected)


def test_a_rectangle_held_twice_is_written_once_and_filled_twice(tmp_path: Path) -> None:
    one, two = torch.full((3, 2), 5.0), torch.full((3, 2), 5.0)
    dcp.save({"w": BlockTensor((3, 2), [Piece((0, 0), one), Piece((0, 0), two)])}, checkpoint_id=tmp_path)
    assert len(dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata["w"].chunks) == 1  # type: ignore[union-attr]
    one.zero_()
    two.zero_()
    dcp.load({"w": BlockTensor((3, 2), [Piece((0, 0), one), Piece((0, 0), two)])}, checkpoint_id=tmp_path)
    assert one.eq(5).all() and two.eq(5).all()


def test_large_blocks_are_stored_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_blocks, "MAX_PIECE_BYTES", 100)
    full = torch.arange(60.0).view(20, 3)  # 12 bytes a row: 8 rows a piece
    dcp.save({"w": BlockTensor((20, 3), [Piece((0, 0), full)])}, checkpoint_id=tmp_path)
    chunks = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata["w"].chunks  # type: ignore[union-attr]
    assert [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks] == [((0, 0), (8, 3)), ((8, 0), (8, 3)), ((16, 0), (4, 3))]
    loaded = {"w": torch.empty(20, 3)}
    dcp.load(loaded, checkpoint_id=tmp_path)
    assert torch.equal(loaded["w"], full)
