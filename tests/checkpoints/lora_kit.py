"""The LoRA conversions with short arguments, and changes to an adapter's files."""

import json

import torch
from safetensors.torch import load_file, save_file

from tangram.checkpoints.lora import prepare_lora_merge, prepare_lora_to_hf, prepare_lora_to_mm
from tangram.checkpoints.lora_options import LoraMergeOptions, LoraToHFOptions, LoraToMMOptions

TEXT = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
VISION = {"qwen2_5_vl": ("attn.qkv", "attn.proj"), "qwen2_vl": ("attn.qkv", "attn.proj", "fc1", "fc2", "merger.mlp.0", "merger.mlp.2")}
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
SPLIT = {"tp_size": 2, "llm_pp_layers": [1, 3], "vit_pp_layers": [4, 0]}


def to_mm(adapter, mm, family="qwen2_5_vl", **options):
    options.setdefault("parallel_config", SPLIT)
    return prepare_lora_to_mm(LoraToMMOptions(mm_dir=str(mm), hf_config={"hf_dir": str(adapter)}, **options), (family,)).write()


def to_hf(mm, out, family="qwen2_5_vl", **options):
    return prepare_lora_to_hf(LoraToHFOptions(mm_dir=str(mm), save_hf_dir=str(out), **options), (family,)).write()


def merge(adapter, base, out, family="qwen2_5_vl", **options):
    options = LoraMergeOptions(lora_dir=str(adapter), hf_config={"hf_dir": str(base)}, save_hf_dir=str(out), **options)
    return prepare_lora_merge(options, (family,)).write()


def change(adapter, **keys):
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))


def edit(adapter, change_tensors):
    tensors = load_file(adapter / "adapter_model.safetensors")
    change_tensors(tensors)
    save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})


def adding(module, a, b):
    """A change that adds a pair of the given shapes."""
    return lambda t: t.update({f"base_model.model.{module}.lora_{p}.weight": torch.zeros(shape) for p, shape in (("A", a), ("B", b))})


def new_names(module):
    return f"model.{module}" if module.startswith("visual.") else module.replace("model.", "model.language_model.", 1)
