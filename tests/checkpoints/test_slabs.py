"""Files are the same whatever the size of the slabs that they are written in."""

import shutil
import subprocess
import zipfile
import zlib

import pytest
import torch
from safetensors.torch import load_file

from tangram.checkpoints import engine
from tangram.checkpoints.copier import fill, read_local
from tangram.checkpoints.export import export_hf, plan_hf
from tangram.checkpoints.hf_directory import HFDirectory
from tangram.checkpoints.mp_rank import plan_ranks
from tangram.checkpoints.reader import MemoryReader, TensorInfo
from tangram.checkpoints.torch_file import TorchFile
from tangram.checkpoints.writing import WriteSettings
from tangram.errors import CheckpointError
from tangram.placement.blocks import place_all
from tangram.placement.table import GatedSplit, GroupedQKV, PackedGatedSplit, PackedQKV, Replicated, Rule, Source, Split, Vocabulary
from tangram.placement.topology import Topology

GOLDEN = {
    "mm_25_tp2_pp2": ("qwen2_5_vl", {"tp_size": 2, "llm_pp_layers": [[1, 3]], "vit_pp_layers": [[4, 0]]}),
    "mm_25_tp1_pp2_vpp2": ("qwen2_5_vl", {"tp_size": 1, "llm_pp_layers": [[1, 1], [1, 1]], "vit_pp_layers": [[4, 0], [0, 0]]}),
    "mm_2_tp2_pp1": ("qwen2_vl", {"tp_size": 2, "llm_pp_layers": [4], "vit_pp_layers": [4]}),
}


@pytest.mark.parametrize(("name", "slab"), [*((name, slab) for name in GOLDEN for slab in (200, 2000)), ("mm_25_tp2_pp2", 32)])
def test_the_reference_comes_out_of_slabs_of_any_size(name, slab, golden, kit, tmp_path, monkeypatch):
    """A row of the text decoder has 64 bytes."""
    monkeypatch.setattr(engine, "SLAB", slab)
    monkeypatch.setattr(engine, "_STEP", 24)
    family, parallel = GOLDEN[name]
    kit.to_mm(golden / f"hf_{family}", tmp_path / "mm", family=family, **parallel)
    for folder in (golden / name / "release").iterdir():
        ours, theirs = kit.load_rank(tmp_path / "mm", folder.name), kit.load_rank(golden / name, folder.name)
        for key in theirs:
            if key != "checkpoint_version":
                kit.assert_same(ours[key], theirs[key])
    kit.to_hf(golden / name, golden / f"hf_{family}", tmp_path / "hf", family=family, **parallel)
    file = "model.safetensors"
    assert (tmp_path / "hf" / file).read_bytes() == (golden / f"hf_{family}" / file).read_bytes()


LAYOUTS = {
    "replicated": Rule("replicated", (Source("r", (5, 4)),), Replicated(), "text", "first"),
    "rows": Rule("rows", (Source("s0", (8, 3)),), Split(), "text", "first"),
    "columns": Rule("columns", (Source("s1", (5, 8)),), Split(axis=1), "text", "first"),
    "gated": Rule("gated", (Source("gate", (8, 3)), Source("up", (8, 3))), GatedSplit(), "text", "first"),
    "packed gated": Rule("packed_gated", (Source("gate_up", (16, 3)),), PackedGatedSplit(), "text", "first"),
    "grouped": Rule("grouped", (Source("q", (16, 3)), Source("k", (8, 3)), Source("v", (8, 3))), GroupedQKV(groups=4), "text", "first"),
    "packed": Rule("packed", (Source("qkv", (24, 3)),), PackedQKV(heads=4), "text", "first"),
    "vocabulary": Rule("vocabulary", (Source("words", (13, 3)),), Vocabulary(padded=20), "text", "first"),
    "experts": Rule("experts.{e}.fc1", (Source("experts", (4, 5, 8), stacked=True),), PackedGatedSplit(), "text", "expert"),
    "experts down": Rule("experts.{e}.fc2", (Source("down", (4, 8, 5), stacked=True),), Split(axis=1), "text", "expert"),
    "convolution": Rule("convolution", (Source("conv", (6, 3, 2, 4)),), Replicated(), "text", "first"),
    "bias": Rule("bias", (Source("b", (16,)),), Split(), "text", "first"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_the_same_in_slabs_and_whole(layout, dtype):
    rule = LAYOUTS[layout]
    sources = {source.name: torch.randn(source.shape).to(dtype) for source in rule.sources}
    for placement in place_all([rule], Topology(tensor=2, text=((1,),), vision=((0,),), expert=2)):
        for local in placement.tensors.values():
            whole = torch.full(local.shape, torch.nan, dtype=dtype)
            fill(local, whole, MemoryReader(sources))
            for limit in (1, 10, 50, 1 << 20):
                pieces = [
                    read_local(local, MemoryReader(sources), start, shape, torch.full(shape, torch.nan, dtype=dtype)).reshape(-1)
                    for start, shape in engine.slabs(local.shape, dtype.itemsize, limit)
                ]
                assert torch.equal(torch.cat(pieces), whole.view(-1))


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4), (0, 4), (4, 0), (1, 1, 9)])
@pytest.mark.parametrize("limit", [1, 6, 16, 1000])
def test_slabs_follow_each_other_and_are_small(shape, limit):
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.int16).view(shape)
    pieces = [
        whole[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))] if shape else whole
        for start, size in engine.slabs(shape, 2, limit)
    ]
    assert all(piece.is_contiguous() and piece.nbytes <= max(limit, 2) for piece in pieces)
    assert [x for piece in pieces for x in piece.reshape(-1).tolist()] == list(range(whole.numel()))


def test_a_cast_is_that_of_the_whole_tensor(kit, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "SLAB", 300)
    source = HFDirectory(kit.write_hf(tmp_path / "hf", dtype=torch.float32))
    export_hf(source, tmp_path / "out", source.family, hf_config=source.config, dtype=torch.bfloat16)
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in load_file(tmp_path / "hf" / "model.safetensors").items():
        assert torch.equal(written[name], tensor.to(torch.bfloat16)), name


def test_other_programs_find_the_checksums_right(kit, tmp_path):
    kit.to_mm(kit.write_hf(tmp_path / "hf"), tmp_path / "mm", tp_size=2, llm_pp_layers=[[1, 1], [1, 1]])
    found = sorted((tmp_path / "mm").rglob("*.pt"))
    assert len(found) == 4
    for file in found:
        with zipfile.ZipFile(file) as archive:
            assert archive.testzip() is None
            data = [entry for entry in archive.infolist() if "/data/" in entry.filename]
            assert all(entry.CRC for entry in data if entry.file_size)
        if shutil.which("unzip"):
            assert "No errors detected" in subprocess.run(["unzip", "-t", file], capture_output=True, text=True, check=True).stdout


def test_a_torch_file_of_more_than_four_gigabytes_opens(tmp_path):
    # a sparse file: 4 GiB + 6 bytes in one storage, another behind it
    shape = (2**31 + 3,)
    layout = TorchFile("large", {"model": {"a": TensorInfo(shape, torch.bfloat16), "b": TensorInfo((2, 3), torch.float8_e4m3fn)}})
    path = tmp_path / "large.pt"
    end, second = b"\x80\x3f" * 3, b"\x38" * 6  # ones
    with path.open("wb") as file:
        file.truncate(layout.size)
        for offset, content in [*layout.fixed([0, zlib.crc32(second)]), (layout.offsets[0] + 2**32, end), (layout.offsets[1], second)]:
            file.seek(offset)
            file.write(content)
    state = torch.load(path, weights_only=True, mmap=True)["model"]
    assert state["a"].shape == shape and state["a"][-4:].tolist() == [0, 1, 1, 1]
    assert state["b"].tolist() == [[1, 1, 1], [1, 1, 1]] and state["b"].dtype == torch.float8_e4m3fn
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("large/data/0").file_size == 2**32 + 6
        assert archive.read("large/data/1") == second


def test_the_plan_is_what_gets_written(kit, tmp_path):
    source = HFDirectory(kit.write_hf(tmp_path / "hf"))
    topology = Topology.build(vision_layers=4, text_layers=4, tensor=2, llm_pp_layers=[1, 3])
    kit.to_mm(source.path, tmp_path / "mm", tp_size=2, llm_pp_layers=[1, 3])
    plan = plan_ranks(source.table, topology, source)
    assert dict(plan.files) == {str(p.relative_to(tmp_path / "mm")): p.stat().st_size for p in (tmp_path / "mm").rglob("*.pt")}
    assert plan.bytes == sum(p.stat().st_size for p in (tmp_path / "mm").rglob("*.pt")) and plan.peak_memory <= 64 << 20
    export_hf(source, tmp_path / "out", source.family, hf_config=source.config, max_shard_bytes=60_000)
    written = {p.name: p.stat().st_size for p in (tmp_path / "out").iterdir() if p.name != "config.json"}
    assert dict(plan_hf(source, source.family, max_shard_bytes=60_000).files) == written and len(written) > 4


def test_progress_ends_at_the_total(kit, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "SLAB", 4096)
    source = HFDirectory(kit.write_hf(tmp_path / "hf"))
    calls = []
    settings = WriteSettings(workers=3, progress=lambda *numbers: calls.append(numbers))
    total = export_hf(source, tmp_path / "out", source.family, hf_config=source.config, settings=settings)
    assert calls == sorted(calls) and calls[-1] == (total, total) and len(calls) > 100


def test_a_full_disk_is_refused_with_both_numbers_before_anything_is_written(kit, small_disk, tmp_path):
    hf = kit.write_hf(tmp_path / "hf", vocab=10_000)
    with pytest.raises(CheckpointError, match=r"[\d,]{9,} bytes are to be written but [\d,]{6,} are free; make room or write elsewhere"):
        kit.to_mm(hf, small_disk / "mm")
    assert kit.files(small_disk) == []


def test_a_disk_that_fills_up_meanwhile_ends_in_one_line_and_leaves_nothing(kit, small_disk, tmp_path, monkeypatch):
    hf = kit.write_hf(tmp_path / "hf", vocab=10_000)
    monkeypatch.setattr(engine, "require_space", lambda *_: None)
    with pytest.raises(CheckpointError, match=r"model_optim_rng.pt: cannot write its [\d,]+ bytes: No space left on device; [\d,]+ bytes are free"):
        kit.to_mm(hf, small_disk / "mm")
    assert kit.files(small_disk) == []


@pytest.fixture
def small_disk(tmp_path):
    """An empty disk of one megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, check=False).returncode:
        pytest.skip("may not mount")
    yield disk
    subprocess.run(["umount", disk], check=True)
