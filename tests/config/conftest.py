"""A small run as files: model.json of a tiny Qwen2.5-VL, data.json, samples, tokenizer folder."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tangram.config.flags import parse_flags
from tangram.config.run import RunConfig

EXAMPLES = Path(__file__).parents[2] / "examples" / "qwen2.5vl"

MODEL: dict[str, Any] = {
    "model_id": "qwen2_5_vl",
    "img_context_token_id": 310,
    "video_token_id": 311,
    "vision_start_token_id": 308,
    "image_encoder": {
        "vision_encoder": {
            "model_id": "qwen2_5_vit",
            "num_layers": 4,
            "hidden_size": 32,
            "ffn_hidden_size": 40,
            "num_attention_heads": 4,
            "window_attn_size": 112,
            "fullatt_block_indexes": [1, 3],
            "tokens_per_second": 4,
            "gated_linear_unit": True,
            "activation_func": "silu",
            "normalization": "RMSNorm",
        },
        "vision_projector": {"model_id": "lnmlp", "input_size": 32, "ffn_hidden_size": 128, "hidden_size": 32, "normalization": "RMSNorm"},
    },
    "text_decoder": {
        "model_id": "qwen2_5_lm",
        "num_layers": 4,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "vocab_size": 320,
        "max_position_embeddings": 32768,
        "mrope_section": [1, 1, 2],
        "rope_theta": 1000000.0,
        "untie_embeddings_and_output_weights": True,
        "add_qkv_bias": True,
        "layernorm_epsilon": 1e-05,
    },
}

HF_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 320,
    "image_token_id": 310,
    "video_token_id": 311,
    "vision_start_token_id": 308,
    "vision_config": {
        "depth": 4,
        "fullatt_block_indexes": [1, 3],
        "hidden_act": "silu",
        "hidden_size": 32,
        "in_channels": 3,
        "intermediate_size": 40,
        "num_heads": 4,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "tokens_per_second": 4,
        "window_size": 112,
    },
}

PROCESSOR = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}

FLAGS = ["--micro-batch-size", "1", "--seq-length", "64", "--train-iters", "10", "--lr", "1e-3"]

Edit = Callable[[dict[str, Any]], None]


class Files:
    """The files of one run in a folder; ``edit_*`` change what will be written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "tokenizer.json").write_text("{}")
        (folder / "tokenizer" / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
        self.model = copy.deepcopy(MODEL)
        self.data: dict[str, Any] = {
            "dataset_param": {
                "preprocess_parameters": {"model_name_or_path": str(folder / "tokenizer")},
                "basic_parameters": {"dataset": str(folder / "samples.json"), "dataset_dir": str(folder)},
            },
        }
        self.samples: list[dict[str, Any]] = [
            {"images": [], "messages": [{"role": "user", "content": f"Say {i}."}, {"role": "assistant", "content": str(i)}]} for i in range(8)
        ]
        self.hf = copy.deepcopy(HF_CONFIG)

    @property
    def vision(self) -> dict[str, Any]:
        return self.model["image_encoder"]["vision_encoder"]

    @property
    def text(self) -> dict[str, Any]:
        return self.model["text_decoder"]

    def write(self) -> Path:
        for name, content in (("model.json", self.model), ("data.json", self.data), ("samples.json", self.samples)):
            (self.folder / name).write_text(json.dumps(content))
        return self.folder

    def hf_dir(self) -> Path:
        folder = self.folder / "hf"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.hf))
        return folder

    def flags(self, *more: str) -> list[str]:
        folder = self.write()
        return ["--mm-model", str(folder / "model.json"), "--mm-data", str(folder / "data.json"), *FLAGS, *more]

    def run(self, *more: str) -> RunConfig:
        return parse_flags(self.flags(*more)).run

    def run_file(self, text: str) -> Path:
        path = self.write() / "run.yaml"
        path.write_text(text)
        return path


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)
