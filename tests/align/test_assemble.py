from __future__ import annotations

import pytest
import torch

from tangram.align.assemble import assemble, write_pieces
from tangram.backends.engine import CanonicalTensor
from tangram.errors import PlacementError

WHOLE = torch.arange(24.0).reshape(4, 6)


def piece(rows: slice, columns: slice = slice(0, 6), name: str = "w", source: torch.Tensor = WHOLE) -> CanonicalTensor:
    return CanonicalTensor(name, (rows.start, columns.start), (4, 6), source[rows, columns])


def test_rectangles_of_several_ranks_become_the_whole(tmp_path):
    write_pieces([piece(slice(0, 2)), piece(slice(2, 4), slice(0, 3))], tmp_path / "0")
    write_pieces([piece(slice(2, 4), slice(3, 6)), piece(slice(0, 4), name="v")], tmp_path / "1")
    found = list(assemble([tmp_path / "0", tmp_path / "1"]))
    assert [one.name for one in found] == ["v", "w"]
    assert all(torch.equal(one.tensor, WHOLE) and one.disagreement == 0.0 for one in found)


def test_elements_that_no_rank_gives_are_counted_and_named(tmp_path):
    write_pieces([piece(slice(0, 2)), piece(slice(2, 4), slice(0, 5))], tmp_path / "0")
    with pytest.raises(PlacementError, match="^w: no rank gave 2 of its 24 elements$"):
        list(assemble([tmp_path / "0"]))


def test_ranks_that_differ_on_shared_elements_are_measured(tmp_path):
    write_pieces([piece(slice(0, 4), source=torch.full((4, 6), 2.0))], tmp_path / "0")
    other = torch.full((4, 6), 2.0)
    other[3] = 2.5
    write_pieces([piece(slice(2, 4), source=other)], tmp_path / "1")
    (one,) = assemble([tmp_path / "0", tmp_path / "1"])
    assert one.disagreement == pytest.approx(0.5 * 6**0.5 / (2.0 * 12**0.5))
    assert torch.equal(one.tensor, torch.full((4, 6), 2.0))


def test_a_replica_that_is_not_a_number_is_a_disagreement(tmp_path):
    write_pieces([piece(slice(0, 4))], tmp_path / "0")
    write_pieces([piece(slice(0, 4), source=torch.full((4, 6), float("nan")))], tmp_path / "1")
    (one,) = assemble([tmp_path / "0", tmp_path / "1"])
    assert one.disagreement == float("inf")


def test_a_rectangle_outside_its_tensor_is_refused(tmp_path):
    write_pieces([CanonicalTensor("w", (3, 0), (4, 6), torch.zeros(2, 6))], tmp_path / "0")
    with pytest.raises(PlacementError, match="^w: a block reaches to 5 along dim 0"):
        list(assemble([tmp_path / "0"]))


def test_ranks_must_agree_on_the_full_shape(tmp_path):
    write_pieces([piece(slice(0, 4)), CanonicalTensor("w", (0, 0), (5, 6), torch.zeros(5, 6))], tmp_path / "0")
    with pytest.raises(PlacementError, match=r"w: ranks give it the full shapes \[\(4, 6\), \(5, 6\)\]"):
        list(assemble([tmp_path / "0"]))


def test_values_are_written_as_fp32_and_not_shared(tmp_path):
    half = torch.ones(4, 6, dtype=torch.bfloat16)
    write_pieces([CanonicalTensor("w", (0, 0), (4, 6), half)], tmp_path / "0")
    (one,) = assemble([tmp_path / "0"])
    assert one.tensor.dtype == torch.float32
