"""Tiny models that are of no family, and plug-ins that bring them and their data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from tangram.config.parsing import merge

GEMMA_PLUGIN = '''
import torch
from transformers import Gemma3ForConditionalGeneration

from tangram.backends.fsdp2.registry import data_register, model_register


@model_register.register("my_gemma")
class MyGemma(Gemma3ForConditionalGeneration):
    def media_passes(self, batch):
        return int("pixel_values" in batch)

    def dummy_media(self, device):
        side = self.config.vision_config.image_size
        features = self.model.get_image_features(torch.zeros(1, 3, side, side, device=device))
        return getattr(features, "pooler_output", features).float().sum()


class Pictures(torch.utils.data.Dataset):
    """A picture, its four tokens, and words; every fourth sample has words alone."""

    def __len__(self):
        return 12

    def __getitem__(self, number):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(5, 90, (8 + number % 3,), generator=generator)
        sample = {"pixel_values": None}
        if number % 4 != 3:
            ids[1:5] = 4
            sample = {"pixel_values": torch.randn(1, 3, 16, 16, generator=generator)}
        labels = ids.clone()
        labels[:5] = -100
        return {**sample, "input_ids": ids, "labels": labels, "token_type_ids": (ids == 4).long()}


@data_register.register("pictures")
def build(basic_parameters, preprocess_parameters, dataset_param):
    return Pictures(), torch.utils.data.Subset(Pictures(), range(3))
'''

WORDS_PLUGIN = '''
import torch

from tangram.backends.fsdp2.registry import data_register


class Words:
    def __init__(self, path, start):
        self.lines, self.start = open(path).read().splitlines(), start

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, number):
        ids = [self.start, *(ord(letter) % 64 for letter in self.lines[number])]
        return {"input_ids": ids, "labels": ids}


@data_register.register("words")
def build(basic_parameters, preprocess_parameters, dataset_param):
    return Words(basic_parameters.dataset, dataset_param.own["start"])
'''


def gemma() -> Any:
    """A Gemma 3 with a SigLIP tower whose pictures make four tokens, of id 4."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {
        **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8, "max_position_embeddings": 64},
    }
    vision = {
        **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 4},
        "vision_use_head": False,
    }
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=4, boi_token_index=2, eoi_token_index=3)
    return _drawn(Gemma3ForConditionalGeneration, config)


def llama() -> Any:
    """A Llama with a head of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return _drawn(LlamaForCausalLM, LlamaConfig(**sizes, num_key_value_heads=1, max_position_embeddings=64))


def _drawn(model_class: Any, config: Any) -> Any:
    torch.manual_seed(3)
    model = model_class(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def write(folder: Path, model: Any, plugin: str, changes: Mapping[str, Any]) -> Path:
    """The model's directory, the plug-in and a run file in ``folder``; the path of the last."""
    model.save_pretrained(folder / "hf")
    (folder / "plugin.py").write_text(plugin, encoding="utf-8")
    files = {"preprocess_parameters": {"model_name_or_path": "hf"}, "basic_parameters": {"dataset": "words.txt"}}
    content: dict[str, Any] = {
        "backend": "fsdp2",
        "parallel": {"fsdp_plan": {"apply_modules": []}},
        "model": {"model_name_or_path": "hf", "attn_implementation": "eager"},
        "data": {"dataset_param": files, "dataloader_param": {"num_workers": 0, "shuffle": True}},
        "features": {"loss_cfg": {"loss_type": "per_token_loss"}},
        "training": {"train_iters": 3, "lr": 1e-3, "micro_batch_size": 2, "seq_length": 64, "plugin": "plugin.py", "save": "out"},
    }
    content["training"]["save_interval"] = 2
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(merge(content, changes)), encoding="utf-8")
    return path
