"""LoRA adapters: between PEFT and mp_rank directories, and into their base."""

import inspect
import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tangram.checkpoints.inspect import inspect as inspect_directory
from tangram.checkpoints.look_options import VerifyOptions
from tangram.checkpoints.lora import prepare_lora_merge, prepare_lora_to_hf, prepare_lora_to_mm
from tangram.checkpoints.lora_adapter import open_adapter
from tangram.checkpoints.lora_config import read_adapter_config
from tangram.checkpoints.lora_options import LoraMergeOptions, LoraToHFOptions, LoraToMMOptions
from tangram.checkpoints.verify import run_verify
from tangram.errors import CheckpointError, PlacementError, TangramError
from tests.weights_kit import write_adapter

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


@pytest.fixture
def pair(kit, tmp_path):
    """A base and an adapter of some of its linears."""
    base = kit.write_hf(tmp_path / "base", dtype=torch.float32)
    return base, write_adapter(tmp_path / "lora", base)


def new_names(module):
    return f"model.{module}" if module.startswith("visual.") else module.replace("model.", "model.language_model.", 1)


def test_the_files_are_those_of_the_public_layout(kit, tmp_path):
    """Names as the public converter has them; a row-parallel linear has A cut by columns, a column-parallel one B by rows."""
    base = kit.write_hf(tmp_path / "base")
    adapter = write_adapter(tmp_path / "lora", base, targets=(*TEXT, "attn.proj"))
    to_mm(adapter, tmp_path / "mm")
    assert (tmp_path / "mm" / "latest_checkpointed_iteration.txt").read_text() == "release"
    stage = kit.load_rank(tmp_path / "mm", "mp_rank_01_001")
    assert stage["checkpoint_version"] == 3.0
    local = {
        "self_attn.q_proj": "self_attention.q_proj",
        "self_attn.k_proj": "self_attention.k_proj",
        "self_attn.v_proj": "self_attention.v_proj",
        "self_attn.o_proj": "self_attention.linear_proj",
        "mlp.gate_proj": "mlp.gate_proj",
        "mlp.up_proj": "mlp.up_proj",
        "mlp.down_proj": "mlp.linear_fc2",
    }
    expected = {}
    tensors = load_file(adapter / "adapter_model.safetensors")
    for theirs, ours in local.items():
        for layer in (1, 2, 3):
            a, b = (tensors[f"base_model.model.model.layers.{layer}.{theirs}.lora_{part}.weight"] for part in "AB")
            rows, columns = b.shape[0] // 2, a.shape[1] // 2
            row_parallel = ours.endswith(("linear_proj", "linear_fc2"))
            name = f"text_decoder.decoder.layers.{layer - 1}.{ours}"
            expected[f"{name}.lora_A.default.weight"] = a[:, columns:] if row_parallel else a
            expected[f"{name}.lora_B.default.weight"] = b if row_parallel else b[rows:]
    kit.assert_same(stage["model"], expected)
    first = kit.load_rank(tmp_path / "mm", "mp_rank_00_000")["model"]
    vision = {name for name in first if name.startswith("image_encoder")}
    parts = ("self_attention.linear_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.linear_fc2")
    assert vision == {f"image_encoder.encoder.blocks.layers.{i}.{m}.lora_{p}.default.weight" for i in range(4) for m in parts for p in "AB"}


def test_packed_vision_qkv_at_one_rank_keeps_the_order_of_the_hub(kit, tmp_path):
    base = kit.write_hf(tmp_path / "base")
    adapter = write_adapter(tmp_path / "lora", base, targets=("attn.qkv",))
    to_mm(adapter, tmp_path / "mm", parallel_config={})
    model = kit.load_rank(tmp_path / "mm", "mp_rank_00")["model"]
    key = "base_model.model.visual.blocks.2.attn.qkv.lora_B.weight"
    name = "image_encoder.encoder.blocks.layers.2.self_attention.linear_qkv.lora_B.default.weight"
    assert torch.equal(model[name], load_file(adapter / "adapter_model.safetensors")[key])


def test_others_may_have_split_packed_qkv_another_way(kit, tmp_path):
    base = kit.write_hf(tmp_path / "base")
    adapter = write_adapter(tmp_path / "lora", base, targets=("attn.qkv",))
    to_mm(adapter, tmp_path / "mm")
    (tmp_path / "mm" / "tangram_adapter.json").unlink()
    with pytest.raises(CheckpointError, match=r"nothing in the files tells how the rows of the vision encoder's linear_qkv were split"):
        to_hf(tmp_path / "mm", tmp_path / "back", parallel_config=SPLIT)


SPLITS = [
    {},
    SPLIT,
    {"tp_size": 4, "llm_pp_layers": [[1, 1], [1, 1]], "vit_pp_layers": [[4, 0], [0, 0]]},
    {"tp_size": 2, "llm_pp_layers": [[0, 1], [1, 2]], "vit_pp_layers": [[3, 1], [0, 0]]},
]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("new_keys", [False, True])
def test_there_and_back_is_exact_to_the_byte(family, new_keys, kit, tmp_path):
    base = kit.write_hf(tmp_path / "base", family=family)
    rename = new_names if new_keys else str
    adapter = write_adapter(
        tmp_path / "lora", base, targets=(*TEXT, *VISION[family], "lm_head"), rename=rename, dtype=torch.bfloat16, some_later_key="kept"
    )
    for number, split in enumerate(SPLITS):
        mm, back = tmp_path / f"mm{number}", tmp_path / f"back{number}"
        report = to_mm(adapter, mm, family, parallel_config=split)
        assert report.tensors == len(load_file(adapter / "adapter_model.safetensors"))
        to_hf(mm, back, family)
        assert kit.files(back) == ["adapter_config.json", "adapter_model.safetensors"]
        for file in back.iterdir():
            assert file.read_bytes() == (adapter / file.name).read_bytes()
        assert run_verify(VerifyOptions(source_dir=str(adapter), target_dir=str(mm))).equal


def test_a_directory_that_training_wrote_takes_split_config_and_base(kit, pair, tmp_path):
    _, adapter = pair
    to_mm(adapter, tmp_path / "mm")
    for name in ("tangram_adapter.json", "adapter_config.json"):
        (tmp_path / "mm" / name).unlink()
    found = inspect_directory(tmp_path / "mm")
    assert (found.format, found.facts["rank"]) == ("LoRA adapter, mp_rank directory without adapter_config.json", "4")
    assert found.facts["targets"] == "gate_proj, linear_fc2, linear_proj, q_proj, up_proj, v_proj"
    with pytest.raises(TangramError, match=r"mm: no adapter_config.json; give the directory that has it"):
        to_hf(tmp_path / "mm", tmp_path / "back")
    to_hf(tmp_path / "mm", tmp_path / "back", parallel_config=SPLIT, hf_config={"hf_dir": str(adapter)}, key_layout="hub")
    kit.assert_same(load_file(tmp_path / "back" / "adapter_model.safetensors"), load_file(adapter / "adapter_model.safetensors"))
    to_hf(tmp_path / "mm", tmp_path / "new", parallel_config=SPLIT, hf_config={"hf_dir": str(adapter)})
    assert f"{Q0.replace('layers', 'language_model.layers')}.lora_A.weight" in load_file(tmp_path / "new" / "adapter_model.safetensors")


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


def test_only_the_layers_that_the_config_names_are_expected(kit, tmp_path):
    base = kit.write_hf(tmp_path / "base")
    adapter = write_adapter(tmp_path / "lora", base, targets=("layers.1.self_attn.q_proj", "layers.3.self_attn.q_proj"))
    change(adapter, target_modules=["q_proj"], layers_to_transform=[1, 3])
    assert len(open_adapter(adapter).ranks) == 2
    change(adapter, target_modules=r"model\.layers\.(1|3)\.self_attn\.q_proj", layers_to_transform=None)
    assert len(open_adapter(adapter).ranks) == 2
    to_mm(adapter, tmp_path / "mm")
    to_hf(tmp_path / "mm", tmp_path / "back")
    change(adapter, target_modules=["q_proj"], exclude_modules=["layers.0.self_attn.q_proj", "layers.2.self_attn.q_proj"])
    assert len(open_adapter(adapter).ranks) == 2


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




def adding(module, a, b):
    """A change that adds a pair of the given shapes."""
    return lambda t: t.update({f"base_model.model.{module}.lora_{p}.weight": torch.zeros(shape) for p, shape in (("A", a), ("B", b))})


TENSOR_FAULTS = {
    "half a pair": (lambda t: t.pop(f"{Q0}.lora_B.weight"), r"1 pairs lack a half: model.language_model.layers.0.self_attn.q_proj.lora_B.* missing"),
    "a pair lost": (lambda t: [t.pop(f"{Q0}.lora_{p}.weight") for p in "AB"], r"1 targets have no tensors .*layers.0.self_attn.q_proj"),
    "no such module": (
        adding("model.layers.9.self_attn.q_proj", (4, 4), (4, 4)),
        r"adapts 1 modules that are no linears of this model: model.language_model.layers.9.self_attn.q_proj \(did you mean ",
    ),
    "no target": (
        adding("model.layers.0.self_attn.k_proj", (4, 32), (16, 4)),
        r"1 adapted modules are no targets by target_modules .*layers.0.self_attn.k_proj",
    ),
    "another width": (lambda t: t.update({f"{Q0}.lora_A.weight": torch.zeros(4, 31)}), r"lora_A.weight has \(4, 31\), needed is \(4, 32\)"),
    "another rank": (
        adding("model.layers.0.self_attn.q_proj", (3, 32), (32, 3)),
        r"q_proj has rank 3, but adapter_config.json says 4",
    ),
    "a rank that differs in the pair": (
        lambda t: t.update({f"{Q0}.lora_B.weight": torch.zeros(32, 3)}),
        r"lora_B.weight has \(32, 3\), needed is \(32, 4\)",
    ),
    "a trained embedding": (
        lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 320)}),
        r"1 tensors are no lora_A or lora_B of a linear: .*lora_embedding_A",
    ),
    "an embedding as a linear": (
        adding("model.embed_tokens", (4, 32), (320, 4)),
        r"no linears of this model: model.language_model.embed_tokens",
    ),
    "a convolution": (
        lambda t: t.update({"base_model.model.visual.patch_embed.proj.lora_A.weight": torch.zeros(4, 3, 2, 14, 14)}),
        r"patch_embed.proj.lora_A.weight: shape \(4, 3, 2, 14, 14\); adapters of other modules than linears are not supported",
    ),
    "mixed layouts": (
        adding("model.language_model.layers.0.self_attn.k_proj", (4, 32), (16, 4)),
        r"mixes two key layouts: model.layers.* and model.language_model.layers",
    ),
    "a tensor twice": (adding("model.language_model.layers.0.self_attn.q_proj", (4, 32), (32, 4)), r"holds a tensor under two names"),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_tensors_that_do_not_fit_are_named(fault, kit, pair, tmp_path):
    base, adapter = pair
    change_tensors, message = TENSOR_FAULTS[fault]
    edit(adapter, change_tensors)
    before = kit.files(tmp_path)
    for run in (lambda: to_mm(adapter, tmp_path / "out"), lambda: merge(adapter, base, tmp_path / "out")):
        with pytest.raises(CheckpointError, match=message) as raised:
            run()
        assert "\n" not in str(raised.value)
    assert kit.files(tmp_path) == before


CONFIG_FAULTS = {
    "dora": ({"use_dora": True}, r"use_dora True is not supported"),
    "a later variant": ({"use_qalora": True}, r"use_qalora True is not supported"),
    "whole modules": ({"modules_to_save": ["embed_tokens"]}, r"modules_to_save \['embed_tokens'\] is not supported: whole modules"),
    "parameters": ({"target_parameters": ["mlp.experts.gate_up_proj"]}, r"target_parameters .* stacked experts"),
    "biases": ({"bias": "all"}, r"bias 'all'.*trained biases are not supported"),
    "a bias of B": ({"lora_bias": True}, r"lora_bias True: trained biases"),
    "transposed": ({"fan_in_fan_out": True}, r"fan_in_fan_out is true"),
    "another method": ({"peft_type": "IA3"}, r"peft_type is 'IA3'; only LORA"),
    "no rank": ({"r": 0}, r"r is 0; it must be a positive number"),
    "no targets": ({"target_modules": None}, r"target_modules is None"),
    "a broken pattern": ({"rank_pattern": {"q_proj(": 3}}, r"rank_pattern: 'q_proj\(' is no regular expression"),
    "ranks by another pattern": ({"rank_pattern": {"q_proj": 3}}, r"has rank 4, but adapter_config.json says 3"),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_configs_that_cannot_be_honoured_are_refused(fault, pair, tmp_path):
    _, adapter = pair
    keys, message = CONFIG_FAULTS[fault]
    change(adapter, **keys)
    with pytest.raises(CheckpointError, match=message):
        to_mm(adapter, tmp_path / "mm")
    assert not (tmp_path / "mm").exists()


def test_an_adapter_that_changed_its_base_does_not_merge_but_moves(pair, tmp_path):
    base, adapter = pair
    change(adapter, init_lora_weights="pissa_niter_16")
    with pytest.raises(CheckpointError, match=r"init_lora_weights 'pissa_niter_16' changed the base too"):
        merge(adapter, base, tmp_path / "merged")
    to_mm(adapter, tmp_path / "mm")
    change(adapter, init_lora_weights="gaussian")
    merge(adapter, base, tmp_path / "merged")


def test_the_base_must_be_known_and_of_the_family(kit, pair, tmp_path):
    base, adapter = pair
    with pytest.raises(TangramError, match=r"its base is a qwen2_5_vl model but the converter is for qwen2_vl; use the converter for qwen2_5_vl"):
        to_mm(adapter, tmp_path / "mm", "qwen2_vl")
    change(adapter, base_model_name_or_path="Qwen/Qwen2.5-VL-3B-Instruct")
    with pytest.raises(CheckpointError, match=r"the base is 'Qwen/Qwen2.5-VL-3B-Instruct', a directory that is not here.*base_hf_dir"):
        to_mm(adapter, tmp_path / "mm")
    to_mm(adapter, tmp_path / "mm", base_hf_dir=str(base))
    other = kit.write_hf(tmp_path / "other", family="qwen2_vl")
    with pytest.raises(CheckpointError, match=r"visual.blocks.0.mlp.(down|gate|up)_proj"):
        to_mm(adapter, tmp_path / "mm2", "qwen2_vl", base_hf_dir=str(other))


def test_a_tied_head_is_no_target(kit, tmp_path):
    base = kit.write_hf(tmp_path / "base", tied=True)
    adapter = write_adapter(tmp_path / "lora", base, targets=("q_proj",))
    change(adapter, target_modules=["q_proj", "lm_head"])
    edit(adapter, adding("lm_head", (4, 32), (320, 4)))
    with pytest.raises(CheckpointError, match=r"1 modules that are no linears of this model: lm_head"):
        merge(adapter, base, tmp_path / "merged")


def test_splits_that_do_not_divide_are_refused(pair, tmp_path):
    _, adapter = pair
    with pytest.raises(PlacementError, match=r"layers.0.self_attn.q_proj.lora_B.weight: number of key/value heads 4 is not divisible by .* 8"):
        to_mm(adapter, tmp_path / "mm", parallel_config={"tp_size": 8})
    assert not (tmp_path / "mm").exists()


@pytest.mark.parametrize("fault", ["tensor", "copy", "rank"])
def test_faults_of_an_mp_rank_adapter_are_named(fault, kit, pair, tmp_path):
    _, adapter = pair
    to_mm(adapter, tmp_path / "mm")
    file = kit.rank_file(tmp_path / "mm", "mp_rank_01_001")
    state = torch.load(file, weights_only=True)
    name = "text_decoder.decoder.layers.0.self_attention.q_proj.lora_A.default.weight"
    if fault == "tensor":
        del state["model"][name]
    else:
        state["model"][name] += 1
    torch.save(state, file)
    if fault == "rank":
        shutil.rmtree(file.parent)
    message = {
        "tensor": rf"mp_rank_01_001/model_optim_rng.pt: .*1 missing: {name}",
        "copy": r"layers.1.self_attn.q_proj.lora_A.weight: its copies in .*mp_rank_00_001.* and .*mp_rank_01_001.* differ",
        "rank": r"1 of its folders are missing: mp_rank_01_001",
    }
    with pytest.raises(TangramError, match=message[fault]):
        to_hf(tmp_path / "mm", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_an_existing_output_is_left_alone(pair, tmp_path):
    base, adapter = pair
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("keep")
    for run in (lambda: to_mm(adapter, tmp_path / "out"), lambda: merge(adapter, base, tmp_path / "out")):
        with pytest.raises(CheckpointError, match=r"out: exists already; remove it or write elsewhere"):
            run()


def test_patterns_name_whole_parts_of_a_name(pair):
    _, adapter = pair
    change(adapter, rank_pattern={"proj": 9, "q_proj": 5, "model.layers.1.mlp.up_proj": 6})
    config = read_adapter_config(adapter)
    modules = ("0.self_attn.q_proj", "0.mlp.up_proj", "1.mlp.up_proj", "11.mlp.up_proj")
    assert [config.rank_of(f"model.layers.{module}") for module in modules] == [5, 4, 6, 4]
