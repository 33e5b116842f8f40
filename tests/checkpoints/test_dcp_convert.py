"""hf_to_dcp, mm_to_dcp and dcp_to_hf: weights as training checkpoints and back."""

from __future__ import annotations

import json
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tangram.checkpoints.dcp_convert import prepare_hf_to_dcp
from tangram.checkpoints.dcp_manifest import Manifest, RunFacts
from tangram.checkpoints.dcp_planner import write
from tangram.checkpoints.dcp_reader import DCPReader
from tangram.checkpoints.dcp_source import source_entries
from tangram.checkpoints.derived_readers import SubsetReader
from tangram.checkpoints.hf_directory import HFDirectory
from tangram.checkpoints.manager import CheckpointManager
from tangram.checkpoints.options import HFToDCP
from tangram.checkpoints.writing import WriteSettings
from tangram.cli.main import main as tangram_main
from tangram.cli.mm_convert import main
from tangram.errors import CheckpointError
from tangram.placement.blocks import canonical_shapes, place
from tangram.placement.topology import Topology

CONVERTER = "Qwen2_5_VLConverter"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_there_and_back_is_exact(kit, tmp_path, capsys):
    hf = kit.write_hf(tmp_path / "hf", tied=True)
    kit.shard(hf, 3)
    assert main([CONVERTER, "hf_to_dcp", "--hf_dir", str(hf), "--dcp_dir", str(tmp_path / "dcp")]) == 0
    assert kit.files(tmp_path / "dcp") == [
        "iter_0000000",
        *(f"iter_0000000/{n}" for n in (".metadata", "__0_0.distcp", "manifest.json")),
        "latest_checkpointed_iteration.txt",
    ]
    assert capsys.readouterr().out.endswith("output layer tied to the embedding\n")
    back = ["--load_dir", str(tmp_path / "dcp"), "--save_dir", str(tmp_path / "back"), "--model_assets_dir", str(hf), "--to_bf16", "False"]
    assert main([CONVERTER, "dcp_to_hf", *back]) == 0
    for file in hf.glob("*.safetensors"):
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes()


def test_plain_dcp_load_reads_it(kit, tmp_path):
    hf = kit.write_hf(tmp_path / "hf", dtype=torch.float32)
    assert main([CONVERTER, "hf_to_dcp", "--hf_dir", str(hf), "--dcp_dir", str(tmp_path / "dcp"), "--dtype", "bfloat16"]) == 0
    state = {"model.lm_head.weight": torch.zeros(320, 32, dtype=torch.bfloat16)}
    dcp.load(state, checkpoint_id=tmp_path / "dcp" / "iter_0000000", no_dist=True)
    assert torch.equal(state["model.lm_head.weight"], kit.hf_tensors(hf)["lm_head.weight"].bfloat16())


def test_mm_to_dcp_holds_the_same_as_hf_to_dcp(kit, tmp_path):
    hf, mm = kit.write_hf(tmp_path / "hf"), tmp_path / "mm"
    split = {"tp_size": 2, "llm_pp_layers": [[1, 1], [1, 1]], "vit_pp_layers": [[4, 0], [0, 0]]}
    kit.to_mm(hf, mm, **split)
    assert main([CONVERTER, "mm_to_dcp", "--cfg.mm_dir", str(mm), "--dcp-dir", str(tmp_path / "dcp")]) == 0
    assert main([CONVERTER, "dcp_to_hf", "--load_dir", str(tmp_path / "dcp"), "--save_dir", str(tmp_path / "back"), "--dtype", "fp32"]) == 0
    kit.assert_same(kit.hf_tensors(tmp_path / "back"), {name: tensor.float() for name, tensor in kit.hf_tensors(hf).items()})


class Adam:
    """An optimizer that has not stepped."""

    def parameters(self, *, loading=False):
        return []

    def synchronize(self):
        pass

    def scaler_state(self):
        return {}

    def load_scaler_state(self, state):
        pass


def test_a_run_starts_from_it_at_any_split_with_its_own_data_and_seed(kit, tmp_path):
    hf_dir = kit.write_hf(tmp_path / "hf")
    assert main([CONVERTER, "hf_to_dcp", "--hf_dir", str(hf_dir), "--dcp_dir", str(tmp_path / "dcp")]) == 0
    hf, topology = HFDirectory(hf_dir), Topology.build(vision_layers=4, text_layers=4, tensor=2, llm_pp_layers=[1, 3], vit_pp_layers=[4, 0])
    facts = RunFacts("qwen2_5_vl", topology, 1, hf.config, "tokenizer", "data", 7, {"lr": 0.1})
    kit.to_mm(hf_dir, tmp_path / "mm", tp_size=2, llm_pp_layers=[1, 3], vit_pp_layers=[4, 0])
    placement = place(hf.table, topology, 1, topology.chunk(1))
    parameters = {n: torch.nn.Parameter(torch.zeros(t.shape, dtype=torch.bfloat16)) for n, t in placement.tensors.items()}
    chunks, shapes = [(placement.chunk, placement, parameters)], canonical_shapes(hf.table, topology)
    with pytest.raises(CheckpointError, match="was saved without optimizer state; set no_load_optim to start with fresh moments"):
        CheckpointManager(facts, chunks, shapes, Adam()).load(tmp_path / "dcp")
    resumed = CheckpointManager(facts, chunks, shapes, Adam(), no_load_optim=True).load(tmp_path / "dcp")
    assert (resumed.step, resumed.consumed_samples) == (0, 0)
    expected = kit.load_rank(tmp_path / "mm", "mp_rank_01_001")["model"]
    kit.assert_same({name: parameter.detach() for name, parameter in parameters.items()}, expected)


def test_a_checkpoint_that_lacks_tensors_of_its_model_is_not_exported(kit, tmp_path, capsys):
    """As a run of the text decoder alone saves it."""
    hf = kit.write_hf(tmp_path / "hf")
    source = SubsetReader(HFDirectory(hf), [name for name in HFDirectory(hf).names() if not name.startswith("model.visual.")])
    folder = tmp_path / "dcp" / "iter_0000000"
    folder.mkdir(parents=True)
    write(folder, source_entries(source), source.names(), {})
    (folder / "manifest.json").write_text(Manifest.imported("qwen2_5_vl", Topology.build(vision_layers=4, text_layers=4), kit.golden_config()).text())
    (tmp_path / "dcp" / "latest_checkpointed_iteration.txt").write_text("0\n")
    assert main([CONVERTER, "dcp_to_hf", "--load_dir", str(tmp_path / "dcp"), "--save_dir", str(tmp_path / "out")]) == 1
    assert "54 missing: model.visual.blocks.0.attn.proj.bias" in capsys.readouterr().err
    assert tangram_main(["export", str(tmp_path / "dcp"), str(tmp_path / "out")]) == 2
    assert "54 missing: model.visual.blocks.0.attn.proj.bias" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_another_conversion_left_unfinished_is_not_published(kit, tmp_path):
    hf = kit.write_hf(tmp_path / "hf")
    tree = tmp_path / "out.partial" / "tree"
    (tree / "release").mkdir(parents=True)
    (tree / "release" / "old.pt").write_text("old")
    journal = [{"plan": "another"}, {"file": "release/old.pt", "size": 3, "digest": "0"}]
    (tmp_path / "out.partial" / "journal").write_text("".join(json.dumps(line) + "\n" for line in journal))
    assert main([CONVERTER, "hf_to_dcp", "--hf_dir", str(hf), "--dcp_dir", str(tmp_path / "out")]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["iter_0000000", "latest_checkpointed_iteration.txt"]
    assert not (tmp_path / "out.partial").exists()


def test_the_identity_of_a_checkpoint_follows_its_files(kit, tmp_path):
    """So that a killed export goes on only where nothing has changed."""
    assert main([CONVERTER, "hf_to_dcp", "--hf_dir", str(kit.write_hf(tmp_path / "hf")), "--dcp_dir", str(tmp_path / "dcp")]) == 0
    first = DCPReader(tmp_path / "dcp").identity
    assert DCPReader(tmp_path / "dcp").identity == first
    os.utime(tmp_path / "dcp" / "iter_0000000" / "__0_0.distcp", (1, 1))
    assert DCPReader(tmp_path / "dcp").identity != first


def test_ctrl_c_in_the_middle_of_a_tensor_is_an_interruption(kit, tmp_path):
    def interrupt(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    options = HFToDCP(hf_dir=str(kit.write_hf(tmp_path / "hf")), dcp_dir=str(tmp_path / "dcp"))
    with pytest.raises(KeyboardInterrupt):
        prepare_hf_to_dcp(options).write(WriteSettings(progress=interrupt))
    assert [entry.name for entry in tmp_path.iterdir()] == ["hf"]


def test_no_checkpoint_and_another_family_are_refused(kit, tmp_path, capsys):
    words = ["--load_dir", str(tmp_path / "dcp"), "--save_dir", str(tmp_path / "out")]
    assert main([CONVERTER, "dcp_to_hf", *words]) == 1
    assert "dcp: no such folder" in capsys.readouterr().err
    assert main([CONVERTER, "hf_to_dcp", "--hf_dir", str(kit.write_hf(tmp_path / "hf")), "--dcp_dir", str(tmp_path / "dcp")]) == 0
    assert main(["Qwen2VLConverter", "dcp_to_hf", *words]) == 1
    assert "is a qwen2_5_vl model but the converter is for qwen2_vl" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
