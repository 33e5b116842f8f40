"""Hugging Face weights straight into ranks: what is read, what is refused."""

import pytest
import torch

from tangram.checkpoints.hf_directory import HFDirectory
from tangram.checkpoints.load_hf import load_hf
from tangram.checkpoints.reader import read_whole
from tangram.errors import CheckpointError, PlacementError
from tangram.placement.blocks import canonical_shapes, place
from tangram.placement.topology import Topology


def load_everywhere(hf, topology, dtype=torch.bfloat16, **options):
    """Load every rank one after the other; parameters by (tp, pp), and reports."""
    loaded, reports = {}, []
    for pp_rank in range(topology.pipeline):
        for tp_rank in range(topology.tensor):
            placements = [place(hf.table, topology, tp_rank, topology.chunk(pp_rank, vp)) for vp in range(topology.virtual)]
            parameters = [{name: torch.full(t.shape, torch.nan, dtype=dtype) for name, t in p.tensors.items()} for p in placements]
            reports.append(load_hf(hf, placements, parameters, **options))
            loaded[tp_rank, pp_rank] = parameters
    return loaded, reports


def split(**sizes):
    return Topology.build(vision_layers=4, text_layers=4, **sizes)


@pytest.fixture(scope="module")
def wide(kit, tmp_path_factory):
    """Proportions of a real model: replicated tensors are a small part."""
    return kit.write_hf(
        tmp_path_factory.mktemp("wide") / "hf", vocab=4096, hidden=128, vision={"patch_size": 4, "window_size": 32, "spatial_merge_size": 2}
    )


@pytest.mark.parametrize("sizes", [{}, {"tensor": 2}, {"tensor": 4}, {"tensor": 2, "llm_pp_layers": [1, 3]}, {"llm_pp_layers": [[1, 1], [1, 1]]}])
def test_all_ranks_together_read_the_files_once(sizes, wide):
    hf = HFDirectory(wide)
    _, reports = load_everywhere(hf, split(**sizes))
    assert hf.bytes_read == sum(report.bytes for report in reports)
    assert hf.file_bytes <= hf.bytes_read <= 1.05 * hf.file_bytes


def test_a_rectangle_is_read_without_its_neighbours(kit, tmp_path):
    hf = HFDirectory(kit.write_hf(tmp_path / "hf"))
    name = "model.language_model.layers.0.mlp.down_proj.weight"
    whole = kit.hf_tensors(tmp_path / "hf")["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(hf.read(name, (3, 5), (4, 7)), whole[3:7, 5:12])
    assert hf.bytes_read == 4 * 7 * 2
    with pytest.raises(CheckpointError, match=r"down_proj.weight has shape \(32, 48\); the rectangle of shape \(4, 7\) at \(30, 0\) lies outside"):
        hf.read(name, (30, 0), (4, 7))


def test_what_was_read_outlives_the_directory_and_writing_to_it_leaves_the_file_alone(kit, tmp_path):
    hf = HFDirectory(kit.write_hf(tmp_path / "hf"))
    before = (tmp_path / "hf" / "model.safetensors").read_bytes()
    tensor = read_whole(hf, "lm_head.weight")
    hf.close()
    tensor.zero_()
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == before


def test_tied_models_say_so_and_both_ends_hold_the_embedding(kit, tmp_path):
    hf = HFDirectory(kit.write_hf(tmp_path / "hf", tied=True))
    loaded, reports = load_everywhere(hf, split(tensor=2, llm_pp_layers=[1, 1, 1, 1]))
    assert {report.tied for report in reports} == {"lm_head: tied to model.language_model.embed_tokens.weight"}
    for tp_rank in (0, 1):
        first, last = loaded[tp_rank, 0][0], loaded[tp_rank, 3][0]
        assert torch.equal(first["text_decoder.embedding.word_embeddings.weight"], last["text_decoder.output_layer.weight"])


def test_a_head_in_the_file_must_repeat_the_embedding_that_it_is_tied_to(kit, tmp_path):
    path = kit.write_hf(tmp_path / "hf", tied=True)
    kit.edit(path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    hf = HFDirectory(path)
    load_everywhere(hf, split(tensor=2))
    assert hf.bytes_read > hf.file_bytes
    kit.edit(path, lambda tensors: tensors["lm_head.weight"][300].add_(1))
    with pytest.raises(
        CheckpointError, match=r"lm_head.weight differs from model.language_model.embed_tokens.weight in rows 160..319.*tie_word_embeddings"
    ):
        load_everywhere(HFDirectory(path), split(tensor=2))


def test_element_types_change_only_when_asked(kit, tmp_path):
    hf = HFDirectory(kit.write_hf(tmp_path / "hf"))
    with pytest.raises(
        CheckpointError,
        match=r"patch_embed.proj.weight: the checkpoint holds bfloat16 but the parameter .* is float32; build the model in bfloat16, or ask",
    ):
        load_everywhere(hf, split(), dtype=torch.float32)
    loaded, _ = load_everywhere(hf, split(), dtype=torch.float32, cast=True)
    weight = loaded[0, 0][0]["text_decoder.output_layer.weight"]
    assert weight.dtype == torch.float32 and torch.equal(weight, kit.hf_tensors(tmp_path / "hf")["lm_head.weight"].float())


def test_missing_and_unexpected_tensors_are_counted_and_named_on_every_rank(kit, tmp_path):
    path = kit.write_hf(tmp_path / "hf")
    vision = [name for name in kit.hf_tensors(path) if name.startswith("visual.")]

    def break_it(tensors):
        for name in vision:
            del tensors[name]
        tensors["model.layers.9.extra.weight"] = torch.zeros(3)

    kit.edit(path, break_it)
    hf = HFDirectory(path)
    topology = split(llm_pp_layers=[2, 2])
    for pp_rank in (0, 1):
        placement = place(hf.table, topology, 0, topology.chunk(pp_rank))
        with pytest.raises(PlacementError, match=rf"{len(vision)} missing: model.visual.*; 1 unexpected: model.language_model.layers.9.extra.weight"):
            load_hf(hf, [placement], [{}])


def test_tensors_of_another_shape_are_refused(kit, tmp_path):
    path = kit.write_hf(tmp_path / "hf")
    kit.edit(path, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(16, dtype=torch.bfloat16)}))
    with pytest.raises(CheckpointError, match=r"model.language_model.norm.weight has \(16,\) in the file and \(32,\) in the model"):
        load_everywhere(HFDirectory(path), split())


def test_the_files_must_be_of_the_model_that_runs(kit, tmp_path):
    hf = HFDirectory(kit.write_hf(tmp_path / "hf"))
    shorter = Topology.build(vision_layers=4, text_layers=3)
    with pytest.raises(PlacementError, match=r"12 unexpected: model.language_model.layers.3"):
        load_everywhere(hf, shorter, shapes=canonical_shapes(hf.table, shorter))


def test_parameters_must_be_those_of_the_placement(kit, tmp_path):
    hf = HFDirectory(kit.write_hf(tmp_path / "hf"))
    placement = place(hf.table, split(), 0, split().chunk(0))
    parameters = {name: torch.zeros(t.shape, dtype=torch.bfloat16) for name, t in placement.tensors.items()}
    parameters["extra"] = parameters.pop("text_decoder.output_layer.weight")
    with pytest.raises(PlacementError, match=r"parameters of stage 0: .*1 missing: text_decoder.output_layer.weight; 1 unexpected: extra"):
        load_hf(hf, [placement], [parameters])
    parameters["text_decoder.output_layer.weight"] = parameters.pop("extra")[:-1]
    with pytest.raises(CheckpointError, match=r"output_layer.weight: the parameter has shape \(319, 32\), its placement \(320, 32\)"):
        load_hf(hf, [placement], [parameters])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_the_rank_that_holds_them(value, kit, tmp_path):
    path = kit.write_hf(tmp_path / "hf")
    kit.edit(path, lambda tensors: tensors["model.layers.3.mlp.down_proj.weight"][2, 5].fill_(value))
    with pytest.raises(CheckpointError, match=r"1 of 1536 elements of \S*layers.3.mlp.down_proj.weight on this rank are NaN or infinite in bfloat16"):
        load_everywhere(HFDirectory(path), split())


def test_values_that_a_cast_makes_infinite_are_refused(kit, tmp_path):
    path = kit.write_hf(tmp_path / "hf")
    kit.edit(path, lambda tensors: tensors["model.layers.3.mlp.down_proj.weight"][2, 5].fill_(70000.0))
    load_everywhere(HFDirectory(path), split())
    with pytest.raises(CheckpointError, match=r"1 of 1536 elements .* infinite in float16"):
        load_everywhere(HFDirectory(path), split(), torch.float16, cast=True)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_quantised_numbers_are_no_weights_whatever_the_cast(dtype, kit, tmp_path):
    path = kit.write_hf(tmp_path / "hf")
    name = "model.layers.3.mlp.down_proj.weight"
    kit.edit(path, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(CheckpointError, match=r"layers.3.mlp.down_proj.weight: the checkpoint holds u?(int8|float8\S*), which are no weights"):
        load_everywhere(HFDirectory(path), split(), cast=True)
