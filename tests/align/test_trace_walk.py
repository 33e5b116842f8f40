"""Traces written by hand: what a walk makes of rows, ranks, orders, NaN and what one side lacks."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tangram.align.trace.find import Finding, first_difference
from tangram.align.trace.record import Pass, Recorder
from tangram.align.trace.rows import RowTable, token_keys
from tangram.align.trace.seen import ALL, Port, Seen, composite_name, convolved_rows
from tangram.align.trace.store import Facts, TraceWriter
from tangram.errors import CheckpointError

KEYS = torch.tensor([[0, 0, -1], [0, 1, -1], [1, 0, -1], [1, 1, -1]])


Values = dict[tuple[str, str], Tensor]


def trace(
    folder: Path,
    values: Values,
    rank: int = 0,
    ranks: int = 1,
    rows: Tensor = KEYS,
    first: int = 0,
    width: int = 0,
    skipped: dict[str, str] | None = None,
    media: Sequence[tuple[int, int, list[list[int]]]] = (),
) -> Path:
    """One rank's outputs ``[rows, features]``, in the order given, of which the features begin at ``first``."""
    writer = TraceWriter(folder, rank)
    table = RowTable(rows)
    for number, ((name, what), tensor) in enumerate(values.items()):
        stored = writer.keep(tensor[table.real])
        writer.activation(name, what, stored, table, ((first, tensor.shape[1]),), width or tensor.shape[1], (0, number))  # type: ignore[arg-type]
    writer.close(Facts(f"run {folder.name}", "fp32", ranks, skipped=skipped or {}, media=list(media)))
    return folder


def walked(tmp_path: Path, ours: Values, theirs: Values) -> Finding:
    return first_difference(trace(tmp_path / "a", ours), trace(tmp_path / "b", theirs))


def some(seed: int = 0) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def test_rows_compare_by_token_whatever_their_order_padding_and_rank(tmp_path: Path) -> None:
    whole = some()
    ours = trace(tmp_path / "a", {("x", "output"): whole})
    # Two ranks with two features each of the rows backwards and with padding, and one with the last two.
    order = torch.tensor([3, 1, 0, 2])
    rows = torch.cat([KEYS[order], torch.full((1, 3), -1)])
    padded = torch.cat([whole[order], torch.full((1, 6), 9.0)])
    for rank in range(3):
        part = {("x", "output"): padded[:, 2 * rank : 2 * rank + 2]}
        trace(tmp_path / "b", part, rank=rank, ranks=3, rows=rows, first=2 * rank, width=6)
    assert first_difference(ours, tmp_path / "b").passed
    index = tmp_path / "b" / "trace_00001.jsonl"
    for content, reason in (("", "it has 0 records of 1"), ('{"name": "x', "Unterminated string"), ("[]\n", "")):
        index.write_text(content)
        with pytest.raises(CheckpointError, match=f"trace_00001.jsonl: cannot be read: .*{reason}.*; write the trace again"):
            first_difference(ours, tmp_path / "b")
    (tmp_path / "b" / "trace_00002.json").unlink()
    with pytest.raises(CheckpointError, match="no whole trace: trace_00002.json is missing, which rank 2 writes when it has ended"):
        first_difference(ours, tmp_path / "b")
    (tmp_path / "b" / "trace_00001.json").write_text('{"format": 1')
    with pytest.raises(CheckpointError, match="trace_00001.json: cannot be read: .*; write the trace again"):
        first_difference(ours, tmp_path / "b")


def test_rows_of_pictures_get_keys_from_the_rank_that_has_their_samples(tmp_path: Path) -> None:
    """Rank 0 encodes a picture of its own and one of rank 1, whose second only fills a schedule up."""
    owners = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0], [1, 0, 1, 0]])
    media = ([(0, 0, [[5, 3]])], [(1, 0, [[6, 2], [-1, -1]])])
    trace(tmp_path / "b", {("x", "output"): some()}, ranks=2, rows=owners, media=media[0])
    trace(tmp_path / "b", {}, rank=1, ranks=2, media=media[1])
    ours = trace(tmp_path / "a", {("x", "output"): some()[:3]}, rows=torch.tensor([[5, 3, 0], [5, 3, 1], [6, 2, 0]]))
    finding = first_difference(ours, tmp_path / "b")
    assert finding.passed, finding.summary
    assert finding.walks[0].steps[0].rows == 3


def test_elements_that_no_rank_gave_differ(tmp_path: Path) -> None:
    ours = trace(tmp_path / "a", {("x", "output"): some()})
    trace(tmp_path / "b", {("x", "output"): some()[:, :4]}, width=6)
    (verdict, _) = first_difference(ours, tmp_path / "b").verdicts
    assert verdict is not None and verdict.why == "the second lacks 8 of 24 elements"


def test_copies_that_differ_between_ranks_differ(tmp_path: Path) -> None:
    ours = trace(tmp_path / "a", {("x", "output"): some()})
    for rank in range(2):
        trace(tmp_path / "b", {("x", "output"): some() * (1 + 0.1 * rank)}, rank=rank, ranks=2)
    finding = first_difference(ours, tmp_path / "b")
    assert finding.walks[0].steps[0].error == pytest.approx(0.1)
    assert not finding.passed


def test_rows_of_one_side_alone_differ_but_where_some_are_enough(tmp_path: Path) -> None:
    ours = trace(tmp_path / "a", {("x", "output"): some()})
    trace(tmp_path / "b", {("x", "output"): some()[:3]}, rows=KEYS[:3])
    (verdict, _) = first_difference(ours, tmp_path / "b").verdicts
    assert verdict is not None and verdict.why == "1 rows are in the first alone, 0 in the second alone"


def test_nan_differs_and_is_told_in_json(tmp_path: Path) -> None:
    from tangram.align.trace.render import as_dict

    broken = some()
    broken[1, 1] = math.nan
    finding = walked(tmp_path, {("x", "output"): some(), ("y", "output"): some(1)}, {("x", "output"): broken, ("y", "output"): some(1)})
    assert finding.summary.startswith("FAILED: the first that differs is x (output)")
    assert json.loads(json.dumps(as_dict(finding)))["forward"]["verdict"]["step"]["error"] == "nan"


def test_a_module_that_one_side_lacks_is_named_and_one_with_a_reason_is_noted(tmp_path: Path) -> None:
    both, more = {("x", "output"): some()}, {("x", "output"): some(), ("y", "output"): some(1)}
    for ours, theirs in ((both, more), (more, both)):
        (verdict, _) = walked(tmp_path, ours, theirs).verdicts
        assert verdict is not None and verdict.module == "y"
        assert "has no output of it" in verdict.why
    finding = first_difference(trace(tmp_path / "a", more), trace(tmp_path / "b", both, skipped={"y": "it takes no part"}))
    assert finding.passed
    assert [(note.name, note.why) for note in finding.walks[0].notes] == [("y", "it takes no part")]


def test_traces_of_different_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="they have no record in common"):
        walked(tmp_path, {("x", "output"): some()}, {("y", "output"): some()})


def test_the_first_difference_says_what_lies_before_it(tmp_path: Path) -> None:
    names = [("m.attn", "input"), ("m.attn.q", "input"), ("m.attn.q", "output"), ("m.attn.k", "output"), ("m.attn.o", "input")]
    names.append(("m.attn.o", "output"))
    ours = {name: some(number) for number, name in enumerate(names)}
    theirs = {name: value * (2 if name[0] == "m.attn.o" else 1) for name, value in ours.items()}
    (verdict, _) = walked(tmp_path, ours, theirs).verdicts
    assert verdict is not None and verdict.module == "m.attn"
    assert verdict.before == ("m.attn.q", "m.attn.k")
    assert "between q, k and o" in verdict.why
    theirs = {name: value * (2 if name == ("m.attn.q", "output") else 1) for name, value in ours.items()}
    (verdict, _) = walked(tmp_path, ours, theirs).verdicts
    assert verdict is not None and verdict.module == "m.attn.q"
    assert "it computes otherwise" in verdict.why


def test_tokens_are_counted_without_padding_and_by_sample() -> None:
    row = {"input_ids": torch.zeros(2, 4), "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]]), "sample_ids": [7, 3]}
    keys = token_keys(row)
    assert keys[..., :2].tolist() == [[[-1, -1], [7, 0], [7, 1], [7, 2]], [[3, 0], [3, 1], [-1, 1], [-1, 1]]]
    packed = {
        "input_ids": torch.zeros(1, 8),
        "cu_seqlens": torch.tensor([0, 3, 5]),
        "cu_seqlens_padded": torch.tensor([0, 4, 8]),
        "sample_ids": [7, 3],
    }
    assert token_keys(packed)[0, :, 0].tolist() == [7, 7, 7, -1, 3, 3, -1, -1]
    assert token_keys(packed)[0, :, 1].tolist() == [0, 1, 2, -1, 0, 1, -1, -1]


def test_a_module_is_named_by_the_tensors_that_it_has_all_of() -> None:
    every = ["m.layers.0.attn.q.weight", "m.layers.0.attn.o.weight", "m.layers.0.mlp.weight", "m.layers.1.mlp.weight"]
    assert composite_name(dict.fromkeys(every[:2], ""), every) == "m.layers.0.attn"
    assert composite_name(dict.fromkeys(every[:3], ""), every) == "m.layers.0"
    assert composite_name(dict.fromkeys(every[:1] + every[2:3], ""), every) is None


def test_rows_of_a_convolution_are_its_places() -> None:
    convolution = nn.Conv2d(3, 5, kernel_size=2, stride=2, bias=False)
    pixels = torch.randn(2, 3, 4, 6)
    rows = convolved_rows(convolution)
    made = rows(pixels, False) @ convolution.weight.flatten(1).T
    assert torch.allclose(made, rows(convolution(pixels), True), atol=1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_computed_again_is_recorded_once_and_its_gradient_too(reentrant: bool, tmp_path: Path) -> None:
    """Two micro-batches forward, then both backward, as a pipeline runs them; one with dropout, which a second forward must not change."""
    torch.manual_seed(0)
    layer, folders = nn.Linear(6, 6), []
    inputs = [torch.randn(4, 6) for _ in range(2)]
    for name in ("plain", "again"):
        writer = TraceWriter(tmp_path / name, 0)
        recorder = Recorder(writer, [Seen(layer, (Port("m.x", ALL, ALL),), "text")])
        outputs = []
        for number, given in enumerate(inputs):
            recorder.current = Pass(0)
            recorder.current.tables["text"] = [RowTable(KEYS + torch.tensor([2 * number, 0, 0]))]
            leaf = given.clone().requires_grad_()
            made = layer(leaf) if name == "plain" else torch.utils.checkpoint.checkpoint(layer, leaf, use_reentrant=reentrant)
            outputs.append(made.square().sum())
        for output in outputs:
            output.backward()
        recorder.close()
        writer.close(Facts(name, "fp32"))
        folders.append(tmp_path / name)
    finding = first_difference(*folders)
    assert finding.passed, finding.summary
    assert [step.rows for walk in finding.walks for step in walk.steps] == [8, 8, 8, 8]
