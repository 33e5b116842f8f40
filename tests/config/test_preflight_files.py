"""The checks of a run against the files that it names, by the text of their messages."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.config.conftest import PROCESSOR, Files
from tests.config.test_preflight import PP2, fault, fault_of, report, split


def safetensors(path: Path, size: int) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    path.write_bytes((len(header).to_bytes(8, "little") + header + bytes(16))[:size])


def test_weights_of_none_of_the_kinds(files: Files) -> None:
    assert "no such folder; give a folder of weights, or leave load out" in fault(files, "--load", str(files.folder / "nowhere"))
    (files.folder / "odd").mkdir()
    (files.folder / "odd" / "notes.txt").write_text("")
    message = fault(files, "--load", str(files.folder / "odd"))
    assert "neither a Hugging Face directory (*.safetensors), nor an mp_rank directory" in message
    assert message.endswith("it holds notes.txt")


def test_hugging_face_weights(files: Files) -> None:
    folder = files.hf_dir()
    safetensors(folder / "model.safetensors", 10**6)
    found = report(files, "--load", str(folder))
    assert not found.errors
    assert f"keys equal those of {folder}" in next(f.detail for f in found.findings if f.rule == "Hugging Face config")
    size = (folder / "model.safetensors").stat().st_size
    safetensors(folder / "model.safetensors", size - 3)
    assert f"{size - 3} bytes, but its header describes {size}; it is truncated or damaged" in fault(files, "--load", str(folder))
    safetensors(folder / "model.safetensors", 30)
    assert "not a safetensors file, or its header" in fault(files, "--load", str(folder))
    safetensors(folder / "model.safetensors", 10**6)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}))
    assert "1 of 2 files are missing: model-2.safetensors; fetch them again" in fault(files, "--load", str(folder))
    (folder / "model.safetensors.index.json").unlink()
    files.hf["rms_norm_eps"] = 1e-6
    files.hf_dir()
    assert "text_decoder.layernorm_epsilon is 1e-05 but 1e-06 in" in fault(files, "--load", str(folder))


def test_weights_of_another_type_than_the_run(files: Files) -> None:
    folder = files.hf_dir()
    safetensors(folder / "model.safetensors", 10**6)
    assert fault(files, "--bf16", "--load", str(folder)) == (
        f"load {folder}: holds 1 of 1 tensors in fp32, and the run is in bf16; set model.cast_weights (--cast-weights) to change them, or "
        "training.dtype fp32"
    )
    assert not report(files, "--bf16", "--cast-weights", "--load", str(folder)).errors
    split(files, [4, 0], [1, 3])
    load = ["--load", str(mp_rank_directory(files, dtypes={"bfloat16": 3, "float32": 1}))]
    assert "holds 3 of 4 tensors in bf16, and the run is in fp32; set model.cast_weights" in fault(files, *PP2, *load)
    assert not report(files, *PP2, *load, "--cast-weights").errors


def mp_rank_directory(files: Files, **changes: Any) -> Path:
    """An ``mp_rank`` directory converted for TP 1, text layers [1, 3], vision layers [4, 0]."""
    from tangram.checkpoints.manifest import MANIFEST

    manifest = {
        "family": "qwen2_5_vl",
        "tensor_parallel": 1,
        "pipeline_parallel": 2,
        "virtual_pipeline": 1,
        "vit_pp_layers": [[4, 0]],
        "llm_pp_layers": [[1, 3]],
        "tied": False,
        "vocab_size": 320,
        "padded_vocab": 320,
        "dtypes": {"float32": 1},
        "hf_config": {},
        "source": "sha256:0",
        **changes,
    }
    folder = files.folder / "mm"
    (folder / "release" / "mp_rank_00_000").mkdir(parents=True, exist_ok=True)
    (folder / "release" / "mp_rank_00_000" / "model_optim_rng.pt").write_bytes(b"")
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


def test_a_directory_converted_for_another_split_names_both(files: Files) -> None:
    load = ["--load", str(mp_rank_directory(files))]
    split(files, [4, 0], [1, 3])
    assert not report(files, *PP2, *load).errors
    split(files, [4, 0], [2, 2])
    message = fault(files, *PP2, *load)
    assert "[[1, 3]]" in message
    assert "[[2, 2]]" in message
    mp_rank_directory(files, tied=True)
    split(files, [4, 0], [1, 3])
    assert "tied embeddings is True in the converter manifest but False" in fault(files, *PP2, *load)


def test_training_checkpoints(files: Files) -> None:
    folder = files.folder / "save" / "iter_0000005"
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(b"")
    load = ["--load", str(files.folder / "save")]
    assert "finished" in fault(files, *load) or "holds no training checkpoint" in fault(files, *load)
    write_manifest(folder, "qwen2_5_vl")
    (files.folder / "save" / "latest_checkpointed_iteration.txt").write_text("5")
    assert not report(files, *load).errors
    write_manifest(folder, "qwen2_vl")
    assert "a checkpoint of family 'qwen2_vl', this run trains 'qwen2_5_vl'; load one of its own" in fault(files, *load)


def write_manifest(folder: Path, family: str) -> None:
    from tangram.checkpoints.dcp_manifest import MANIFEST_FILE, Manifest, RunFacts
    from tangram.placement.topology import Topology

    facts = RunFacts(family, Topology(), 1, {}, "t", "d", 1, {})
    manifest = Manifest.of(facts, step=5, consumed_samples=5, optimizer=True, rng=True, grad_scaler={}, extra={})
    (folder / MANIFEST_FILE).write_text(manifest.text())


def test_tokenizer(files: Files) -> None:
    (files.folder / "tokenizer" / "tokenizer.json").unlink()
    assert "holds no tokenizer (tokenizer.json, or vocab.json with merges.txt)" in fault_of(files, "tokenizer")
    files.data["dataset_param"]["preprocess_parameters"]["model_name_or_path"] = "nowhere"
    assert "nowhere: no such folder; give the Hugging Face directory with the tokenizer" in fault_of(files, "tokenizer")


def test_image_processor(files: Files) -> None:
    (files.folder / "tokenizer" / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, "patch_size": 16}))
    assert "preprocessor_config.json: patch_size is 16 but model.json's vision encoder has 14" in fault_of(files, "samples")


def test_samples(files: Files) -> None:
    files.samples[3] |= {"images": ["cat.png"]}
    files.samples[3]["messages"][0]["content"] = "<image>What is it?"
    assert "cat.png: no such image file" in fault_of(files, "samples")
    files.samples[3]["messages"][0]["content"] = "What is it?"
    assert "record 3" in fault_of(files, "samples")
    files.samples[3]["images"] = []
    files.samples = files.samples[:5]
    message = fault_of(files, "samples", "--global-batch-size", "8")
    assert "5" in message
    assert "8" in message
    files.data["dataset_param"]["basic_parameters"]["dataset_dir"] = "nowhere"
    assert "nowhere: no such folder; correct the path" in fault_of(files, "samples")
    files.data["dataset_param"]["basic_parameters"] |= {"dataset_dir": ".", "dataset": "nowhere.json"}
    assert "nowhere.json: no such dataset file" in fault_of(files, "samples")


def test_save_folder(files: Files) -> None:
    (files.folder / "file").write_text("")
    assert f"{files.folder / 'file'} is a file; give a folder" in fault(files, "--save", str(files.folder / "file" / "out"))
    assert not report(files, "--save", str(files.folder / "new" / "folder")).errors


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_save_folder_without_permission(files: Files) -> None:
    locked = files.folder / "locked"
    locked.mkdir(mode=0o500)
    assert f"no permission to write in {locked}; give another folder" in fault(files, "--save", str(locked / "out"))
