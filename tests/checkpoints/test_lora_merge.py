"""LoRA adapters added to their base: the numbers, and what the merged model computes."""

import inspect
import re

import pytest
import torch
from safetensors.torch import load_file

from tangram.errors import CheckpointError
from tests.checkpoints.lora_kit import TEXT, VISION, adding, change, edit, merge, new_names, to_mm
from tests.weights_kit import write_adapter


@pytest.mark.parametrize("rslora", [False, True])
def test_merging_adds_scaled_b_a(rslora, kit, pair, tmp_path):
    base, _ = pair
    adapter = write_adapter(tmp_path / "r", base, use_rslora=rslora)
    merge(adapter, base, tmp_path / "merged")
    before, after, lora = kit.hf_tensors(base), kit.hf_tensors(tmp_path / "merged"), load_file(adapter / "adapter_model.safetensors")
    scale = 16 / 2 if rslora else 16 / 4  # alpha 16, rank 4: alpha / sqrt(4), alpha / 4
    changed = 0
    for name, weight in before.items():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{key}.lora_A.weight" in lora:
            a, b = (lora[f"{key}.lora_{part}.weight"].double() for part in "AB")
            torch.testing.assert_close(after[name].double(), weight.double() + scale * b @ a, rtol=1e-6, atol=1e-6)
            changed += 1
        else:
            assert torch.equal(after[name], weight), name
    assert changed == 4 * 6 + 4 * 3  # gate, up and down of the vision encoder match too
    assert (tmp_path / "merged" / "config.json").read_bytes() == (base / "config.json").read_bytes()


def test_merging_rounds_once(kit, tmp_path):
    """bf16 holds 256, 258 and 260, and nothing between: 256 + 4 * (0.3 + 0.3) = 258.4 becomes 258; in two rounded steps of 1.2 it would be 260."""
    base = kit.write_hf(tmp_path / "base", fill=lambda name, shape: torch.full(shape, 256.0))
    adapter = write_adapter(tmp_path / "lora", base, targets=("q_proj",), rank=2, lora_alpha=8)

    def fill(tensors):
        for name, tensor in tensors.items():
            tensor.fill_(0.3 if "lora_A" in name else 1.0)

    edit(adapter, fill)
    merge(adapter, base, tmp_path / "merged")
    merged = kit.hf_tensors(tmp_path / "merged")
    assert (merged["model.layers.0.self_attn.q_proj.weight"] == 258).all() and (merged["model.layers.0.self_attn.k_proj.weight"] == 256).all()


def test_patterns_of_rank_and_alpha_are_honoured(kit, tmp_path):
    base = kit.write_hf(tmp_path / "base", dtype=torch.float32)
    adapter = write_adapter(
        tmp_path / "lora",
        base,
        targets=("q_proj", "v_proj"),
        ranks=lambda module: 2 if re.search(r"layers\.1\..*q_proj", module) else 4,
        rank_pattern={r"layers\.1\.self_attn\.q_proj": 2},
        alpha_pattern={"v_proj": 4},
    )
    merge(adapter, base, tmp_path / "merged")
    before, after, lora = kit.hf_tensors(base), kit.hf_tensors(tmp_path / "merged"), load_file(adapter / "adapter_model.safetensors")
    for module, scale in (("layers.0.self_attn.q_proj", 16 / 4), ("layers.1.self_attn.q_proj", 16 / 2), ("layers.1.self_attn.v_proj", 4 / 4)):
        a, b = (lora[f"base_model.model.model.{module}.lora_{part}.weight"] for part in "AB")
        torch.testing.assert_close(after[f"model.{module}.weight"], before[f"model.{module}.weight"] + scale * (b @ a))


def test_an_mp_rank_adapter_merges_as_its_source_does(kit, pair, tmp_path):
    base, adapter = pair
    to_mm(adapter, tmp_path / "mm")
    merge(adapter, base, tmp_path / "one")
    merge(tmp_path / "mm", base, tmp_path / "two")
    kit.assert_same(kit.hf_tensors(tmp_path / "two"), kit.hf_tensors(tmp_path / "one"))


@pytest.mark.compat
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_the_merged_model_is_the_base_with_the_adapter_in_its_forward(family, tiny_hf, tmp_path):
    """transformers' forward of the merged model, against the base with ``scale * B A x`` added by hooks, in fp32 over text and a picture."""
    from transformers import AutoModelForImageTextToText

    base = tiny_hf(family, hidden=48, vision_hidden=32)
    adapter = write_adapter(tmp_path / "lora", base, targets=(*TEXT, *VISION[family]), use_rslora=True)
    merge(adapter, base, tmp_path / "merged", family)
    plain, merged = (AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval() for path in (base, tmp_path / "merged"))

    generator = torch.Generator().manual_seed(0)
    image = plain.config.image_token_id
    ids = torch.tensor([[3, plain.config.vision_start_token_id, image, image, image, image, 9, 11, 12, 13]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    inputs["pixel_values"] = torch.randn(16, 1176, generator=generator)
    if "mm_token_type_ids" in inspect.signature(plain.forward).parameters:
        inputs["mm_token_type_ids"] = (ids == image).int()

    lora = load_file(adapter / "adapter_model.safetensors")
    modules = dict(plain.named_modules())
    hooked = set()
    for key, a in lora.items():
        if ".lora_A." not in key:
            continue
        name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        module = modules[name if name in modules else new_names(name)]
        b = lora[key.replace("lora_A", "lora_B")]
        module.register_forward_hook(lambda _, x, y, a=a, b=b: y + (16 / 4**0.5) * (x[0] @ a.T @ b.T))
        hooked.add(module)
    assert len(hooked) == len(lora) // 2
    with torch.no_grad():
        before = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32).eval()(**inputs).logits
        expected, found = plain(**inputs).logits, merged(**inputs).logits
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    assert (before - expected).norm() > 1e-2 * expected.norm()


def test_an_adapter_that_changed_its_base_does_not_merge_but_moves(pair, tmp_path):
    base, adapter = pair
    change(adapter, init_lora_weights="pissa_niter_16")
    with pytest.raises(CheckpointError, match=r"init_lora_weights 'pissa_niter_16' changed the base too"):
        merge(adapter, base, tmp_path / "merged")
    to_mm(adapter, tmp_path / "mm")
    change(adapter, init_lora_weights="gaussian")
    merge(adapter, base, tmp_path / "merged")


def test_a_tied_head_is_no_target(kit, tmp_path):
    base = kit.write_hf(tmp_path / "base", tied=True)
    adapter = write_adapter(tmp_path / "lora", base, targets=("q_proj",))
    change(adapter, target_modules=["q_proj", "lm_head"])
    edit(adapter, adding("lm_head", (4, 32), (320, 4)))
    with pytest.raises(CheckpointError, match=r"1 modules that are no linears of this model: lm_head"):
        merge(adapter, base, tmp_path / "merged")
