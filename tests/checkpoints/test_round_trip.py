"""hf_to_mm and mm_to_hf undo each other, at every kind of split."""

import json

import pytest
import torch
from safetensors.torch import save_file

SPLITS = {
    "one stage": {},
    "pp2 uneven": {"llm_pp_layers": [1, 3], "vit_pp_layers": [4, 0]},
    "vision over two stages": {"llm_pp_layers": [0, 4], "vit_pp_layers": [2, 2]},
    "text from the second stage": {"llm_pp_layers": [[0, 4]], "vit_pp_layers": [[3, 1]]},
    "pp4": {"llm_pp_layers": [1, 1, 1, 1], "vit_pp_layers": [4, 0, 0, 0]},
    "pp2 vpp2": {"llm_pp_layers": [[1, 1], [1, 1]], "vit_pp_layers": [[4, 0], [0, 0]]},
    "pp2 vpp2, vision on two": {"llm_pp_layers": [[0, 1], [1, 2]], "vit_pp_layers": [[3, 1], [0, 0]]},
}


@pytest.mark.parametrize("lists", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize(("dtype", "tied", "sizes"), [(torch.bfloat16, True, (1, 4)), (torch.float32, False, (2,))], ids=["bf16 tied", "fp32 untied"])
def test_conversion_there_and_back_is_exact(dtype, tied, sizes, lists, kit, tmp_path):
    hf = kit.write_hf(tmp_path / "hf", dtype=dtype, tied=tied)
    for tp_size in sizes:
        mm, back = tmp_path / f"mm{tp_size}", tmp_path / f"back{tp_size}"
        kit.to_mm(hf, mm, tp_size=tp_size, **lists)
        kit.to_hf(mm, hf, back, tp_size=tp_size, **lists)
        kit.assert_same(kit.hf_tensors(back), kit.hf_tensors(hf))


def test_lists_are_taken_from_the_manifest(kit, tmp_path):
    hf = kit.write_hf(tmp_path / "hf")
    kit.to_mm(hf, tmp_path / "mm", tp_size=2, llm_pp_layers=[[1, 1], [1, 1]], vit_pp_layers=[[4, 0], [0, 0]])
    kit.to_hf(tmp_path / "mm", hf, tmp_path / "back")
    kit.assert_same(kit.hf_tensors(tmp_path / "back"), kit.hf_tensors(hf))


def test_values_survive_that_bf16_cannot_hold(kit, tmp_path):
    hf = kit.write_hf(tmp_path / "hf", dtype=torch.float32, fill=lambda name, shape: torch.full(shape, 1 + 2**-12))
    kit.to_mm(hf, tmp_path / "mm", tp_size=2)
    kit.to_hf(tmp_path / "mm", hf, tmp_path / "back")
    assert all((tensor == 1 + 2**-12).all() for tensor in kit.hf_tensors(tmp_path / "back").values())


def test_every_tensor_keeps_its_own_element_type(kit, tmp_path):
    hf = kit.write_hf(tmp_path / "hf")
    kit.edit(hf, lambda tensors: tensors.update({name: t.float() for name, t in tensors.items() if "norm" in name}))
    kit.to_mm(hf, tmp_path / "mm", tp_size=2, llm_pp_layers=[2, 2])
    kit.to_hf(tmp_path / "mm", hf, tmp_path / "back")
    back = kit.hf_tensors(tmp_path / "back")
    kit.assert_same(back, kit.hf_tensors(hf))
    assert {tensor.dtype for tensor in back.values()} == {torch.float32, torch.bfloat16}


def test_both_key_layouts_give_the_same_files(kit, tmp_path):
    hf = kit.write_hf(tmp_path / "hf")
    other = tmp_path / "state_dict"
    other.mkdir()
    (other / "config.json").write_text((hf / "config.json").read_text())
    renamed = {}
    for name, tensor in kit.hf_tensors(hf).items():
        name = f"model.{name}" if name.startswith("visual.") else name.replace("model.", "model.language_model.", 1)
        renamed[name] = tensor
    assert "model.visual.merger.ln_q.weight" in renamed and "model.language_model.norm.weight" in renamed
    save_file(renamed, other / "model.safetensors")
    for source in (hf, other):
        kit.to_mm(source, tmp_path / f"mm_{source.name}", tp_size=2)
    for folder in ("mp_rank_00", "mp_rank_01"):
        kit.assert_same(kit.load_rank(tmp_path / "mm_hf", folder)["model"], kit.load_rank(tmp_path / "mm_state_dict", folder)["model"])
    kit.to_hf(tmp_path / "mm_hf", other, tmp_path / "back")
    kit.assert_same(kit.hf_tensors(tmp_path / "back"), kit.hf_tensors(hf))


def test_shards_and_index_come_back_as_they_were(kit, tmp_path):
    hf = kit.write_hf(tmp_path / "hf")
    kit.shard(hf, 3)
    kit.to_mm(hf, tmp_path / "mm", tp_size=2, llm_pp_layers=[1, 3])
    kit.to_hf(tmp_path / "mm", hf, tmp_path / "back")
    for file in sorted(hf.glob("*.safetensors")):
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes()
    index, original = (json.loads((path / "model.safetensors.index.json").read_text()) for path in (tmp_path / "back", hf))
    assert index["weight_map"] == original["weight_map"]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in kit.hf_tensors(hf).values())


def test_vocabulary_is_padded_with_zeros_and_cut_again(kit, tmp_path):
    hf = kit.write_hf(tmp_path / "hf", vocab=321)
    options = {"tp_size": 2, "make_vocab_size_divisible_by": 64}
    kit.to_mm(hf, tmp_path / "mm", **options)
    first, last = (kit.load_rank(tmp_path / "mm", f"mp_rank_0{rank}")["model"]["text_decoder.embedding.word_embeddings.weight"] for rank in (0, 1))
    whole = kit.hf_tensors(hf)["model.embed_tokens.weight"]
    assert first.shape == last.shape == (192, 32)
    assert torch.equal(first, whole[:192]) and torch.equal(last[:129], whole[192:]) and not last[129:].any()
    kit.to_hf(tmp_path / "mm", hf, tmp_path / "back", **options)
    kit.assert_same(kit.hf_tensors(tmp_path / "back"), kit.hf_tensors(hf))


def test_a_rank_of_nothing_but_padding_is_written(kit, tmp_path):
    hf = kit.write_hf(tmp_path / "hf", vocab=100)
    options = {"tp_size": 4, "make_vocab_size_divisible_by": 64}
    kit.to_mm(hf, tmp_path / "mm", **options)
    assert not kit.load_rank(tmp_path / "mm", "mp_rank_03")["model"]["text_decoder.output_layer.weight"].any()
    kit.to_hf(tmp_path / "mm", hf, tmp_path / "back", **options)
    kit.assert_same(kit.hf_tensors(tmp_path / "back"), kit.hf_tensors(hf))


def test_a_head_that_repeats_a_tied_embedding_is_consumed_and_given_back(kit, tmp_path):
    hf = kit.write_hf(tmp_path / "hf", tied=True)
    kit.edit(hf, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    kit.to_mm(hf, tmp_path / "mm", tp_size=2)
    assert "text_decoder.output_layer.weight" not in kit.load_rank(tmp_path / "mm", "mp_rank_00")["model"]
    kit.to_hf(tmp_path / "mm", hf, tmp_path / "back")
    kit.assert_same(kit.hf_tensors(tmp_path / "back"), kit.hf_tensors(hf))


def test_tied_models_have_a_copy_of_the_embedding_on_the_last_stage_only_where_it_is_another(kit, tmp_path):
    hf = kit.write_hf(tmp_path / "hf", tied=True)
    kit.to_mm(hf, tmp_path / "pp4", llm_pp_layers=[1, 1, 1, 1])
    holders = [rank for rank in range(4) if "text_decoder.output_layer.weight" in kit.load_rank(tmp_path / "pp4", f"mp_rank_00_{rank:03}")["model"]]
    assert holders == [3]
    first, last = (kit.load_rank(tmp_path / "pp4", f"mp_rank_00_{rank:03}")["model"] for rank in (0, 3))
    assert torch.equal(first["text_decoder.embedding.word_embeddings.weight"], last["text_decoder.output_layer.weight"])
    kit.to_mm(hf, tmp_path / "pp1")
    assert "text_decoder.output_layer.weight" not in kit.load_rank(tmp_path / "pp1", "mp_rank_00")["model"]
