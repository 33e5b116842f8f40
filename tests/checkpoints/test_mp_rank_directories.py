"""``mp_rank`` directories that are of another run, incomplete or damaged."""

import json
import shutil

import pytest
import torch

from tangram.checkpoints.hf_directory import HFDirectory
from tangram.checkpoints.inspect import inspect
from tangram.checkpoints.mp_rank import MMDirectory, load_mm
from tangram.checkpoints.rank_file import load_rank_file
from tangram.errors import CheckpointError, PlacementError, TangramError
from tangram.placement.blocks import place
from tangram.placement.topology import Topology


@pytest.fixture(scope="module")
def made(kit, tmp_path_factory):
    """A model and its conversion for TP1 x PP2."""
    folder = tmp_path_factory.mktemp("mp_rank")
    hf = kit.write_hf(folder / "hf")
    kit.to_mm(hf, folder / "mm", llm_pp_layers=[1, 3], vit_pp_layers=[4, 0])
    return hf, folder / "mm"


@pytest.fixture
def pair(made, tmp_path):
    hf, mm = made
    shutil.copytree(mm, tmp_path / "mm")
    return HFDirectory(hf), tmp_path / "mm"


def split(**sizes):
    return Topology.build(vision_layers=4, text_layers=4, **sizes)


SAME = {"llm_pp_layers": [1, 3], "vit_pp_layers": [4, 0]}


def load(hf, mm, topology, dtype=torch.bfloat16, **options):
    placements = [place(hf.table, topology, 0, topology.chunk(0, vp)) for vp in range(topology.virtual)]
    parameters = [{name: torch.full(t.shape, torch.nan, dtype=dtype) for name, t in p.tensors.items()} for p in placements]
    report = load_mm(MMDirectory(mm), placements, parameters, topology, hf.model, **options)
    assert not any(tensor.isnan().any() for chunk in parameters for tensor in chunk.values())
    return report


def change(file, edit):
    state = torch.load(file, weights_only=True)
    edit(state)
    torch.save(state, file)


def test_the_same_split_loads(pair):
    hf, mm = pair
    assert load(hf, mm, split(**SAME)).parameters == len(place(hf.table, split(**SAME), 0, split(**SAME).chunk(0)).tensors)


def test_weights_that_are_not_finite_are_refused(pair):
    hf, mm = pair
    name = "text_decoder.embedding.word_embeddings.weight"
    change(mm / "release" / "mp_rank_00_000" / "model_optim_rng.pt", lambda state: state["model"][name].view(-1)[:3].fill_(torch.nan))
    with pytest.raises(CheckpointError, match=r"3 of \d+ elements of model.language_model.embed_tokens.weight on this rank are NaN or infinite"):
        load(hf, mm, split(**SAME))


OTHERS = [
    ({"tensor": 2, **SAME}, r"tp_size is 1 in the converter manifest but 2 by the launch flag --tensor-model-parallel-size"),
    (
        {"llm_pp_layers": [2, 2], "vit_pp_layers": [4, 0]},
        r"llm_pp_layers is \[\[1, 3\]\] in the converter manifest but \[\[2, 2\]\] by pipeline_num_layers of model.json",
    ),
    (
        {"llm_pp_layers": [0, 4], "vit_pp_layers": [2, 2]},
        r"vit_pp_layers is \[\[4, 0\]\] in the converter manifest but \[\[2, 2\]\] by pipeline_num_layers of model.json",
    ),
    ({}, r"pipeline size is 2 in the converter manifest but 1 by the launch flag --pipeline-model-parallel-size"),
    ({"llm_pp_layers": [[1, 1], [1, 1]], "vit_pp_layers": [[4, 0], [0, 0]]}, r"virtual stages is 1 in the converter manifest but 2 by the rows of"),
]


@pytest.mark.parametrize(("sizes", "message"), OTHERS)
def test_another_split_is_refused_naming_the_place_and_both_values(sizes, message, pair):
    hf, mm = pair
    with pytest.raises(CheckpointError, match=message) as raised:
        load(hf, mm, split(**sizes))
    assert "convert again for this split, or correct the run" in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"tensor": 2, **SAME},
            r"tensor-parallel 1 x pipeline 2, but the run is tensor-parallel 2 x pipeline 2; 2 of its folders are missing: mp_rank_01_000",
        ),
        ({"llm_pp_layers": [2, 2], "vit_pp_layers": [4, 0]}, r"\d+ missing: text_decoder.decoder.layers.1"),
        ({}, r"holds 2 ranks, tensor-parallel 1 x pipeline 2, but the run is tensor-parallel 1 x pipeline 1"),
        (
            {"llm_pp_layers": [[1, 1], [1, 1]], "vit_pp_layers": [[4, 0], [0, 0]]},
            r"holds model, but a run with 2 virtual stage\(s\) needs model0, model1",
        ),
    ],
)
def test_another_split_is_refused_also_without_a_manifest(sizes, message, pair):
    hf, mm = pair
    (mm / "tangram_manifest.json").unlink()
    with pytest.raises(TangramError, match=message):
        load(hf, mm, split(**sizes))


def test_the_reference_directory_without_manifest_loads(golden):
    hf = HFDirectory(golden / "hf_qwen2_5_vl")
    load(hf, golden / "mm_25_tp1_pp2_vpp2", split(llm_pp_layers=[[1, 1], [1, 1]], vit_pp_layers=[[4, 0], [0, 0]]))


def test_the_manifest_says_what_was_converted(made):
    hf, mm = made
    manifest = json.loads((mm / "tangram_manifest.json").read_text())
    assert (manifest["family"], manifest["tensor_parallel"], manifest["pipeline_parallel"], manifest["virtual_pipeline"]) == ("qwen2_5_vl", 1, 2, 1)
    assert (manifest["vit_pp_layers"], manifest["llm_pp_layers"]) == ([[4, 0]], [[1, 3]])
    assert (manifest["tied"], manifest["vocab_size"], manifest["padded_vocab"], manifest["dtypes"]) == (False, 320, 320, {"bfloat16": 105})
    assert manifest["hf_config"] == json.loads((hf / "config.json").read_text())
    assert manifest["source"].startswith("sha256:") and len(manifest["source"]) == 71


STATES = {
    "a list as model": ({"model": [1]}, r"'model' is a list instead of a mapping from names to tensors"),
    "nothing as model": ({"model": None}, r"'model' is a NoneType instead of a mapping from names to tensors"),
    "numbers as keys": ({1: 2}, r"1 is a int instead of a mapping from names to tensors"),
    "numbers as names": ({"model": {1: torch.ones(1)}}, r"'model' is a dict instead of a mapping from names to tensors"),
}


@pytest.mark.parametrize("state", STATES)
def test_files_that_hold_something_else_are_refused(state, pair):
    hf, mm = pair
    held, message = STATES[state]
    file = mm / "release" / "mp_rank_00_000" / "model_optim_rng.pt"
    torch.save(held, file)
    with pytest.raises(CheckpointError, match=rf"{file}: {message}; convert again"):
        load(hf, mm, split(**SAME))
    assert any("convert again" in problem for problem in inspect(mm).problems)


@pytest.mark.parametrize("value", [5, torch.eye(32).to_sparse()])
def test_a_value_that_is_no_plain_tensor_is_refused(value, pair):
    hf, mm = pair
    name = "text_decoder.decoder.layers.0.self_attention.linear_proj.weight"
    change(mm / "release" / "mp_rank_00_000" / "model_optim_rng.pt", lambda state: state["model"].update({name: value}))
    with pytest.raises(CheckpointError, match=rf"{name} is .* instead of a plain tensor; convert again"):
        load(hf, mm, split(**SAME))


def test_a_damaged_pickle_fails_in_one_way_alone(pair):
    """Bits of the pickled names and shapes, which lie at the front, turned one at a time."""
    _, mm = pair
    file = mm / "release" / "mp_rank_00_000" / "model_optim_rng.pt"
    whole, refused = file.read_bytes(), 0
    for position in range(64, 1600, 12):
        content = bytearray(whole)
        content[position] ^= 1 << position % 7
        file.write_bytes(content)
        try:
            load_rank_file(file)
        except CheckpointError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 20


@pytest.mark.parametrize("word", [b"\xff\xfe", "²".encode(), b"9" * 5000, b""])
def test_a_damaged_tracker_is_refused(word, pair):
    _, mm = pair
    (mm / "latest_checkpointed_iteration.txt").write_bytes(word)
    with pytest.raises(CheckpointError, match=r"latest_checkpointed_iteration.txt: '.*' is neither 'release' nor an iteration number"):
        MMDirectory(mm)


@pytest.mark.parametrize("key", ["hf_config", "llm_pp_layers"])
def test_a_damaged_manifest_is_refused(pair, key):
    hf, mm = pair
    file = mm / "tangram_manifest.json"
    content = json.loads(file.read_text())
    del content[key]
    file.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=rf"tangram_manifest.json: {key} is missing.*convert again"):
        load(hf, mm, split(**SAME))


def test_a_manifest_of_a_later_format_is_refused(pair):
    hf, mm = pair
    file = mm / "tangram_manifest.json"
    file.write_text(file.read_text().replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(CheckpointError, match=r"format_version: Input should be 1, got 2"):
        load(hf, mm, split(**SAME))


def test_another_padding_of_the_vocabulary_is_refused(pair):
    hf, mm = pair
    with pytest.raises(
        CheckpointError, match=r"padded vocabulary is 320 in the converter manifest but 384 by the launch flag --make-vocab-size-divisible-by"
    ):
        load(hf, mm, split(**SAME), padded_vocab=384)


def test_element_types_change_only_when_asked(pair):
    hf, mm = pair
    with pytest.raises(CheckpointError, match=r"is bfloat16 but the parameter is float32; build the model in bfloat16, or ask for the cast"):
        load(hf, mm, split(**SAME), dtype=torch.float32)
    load(hf, mm, split(**SAME), dtype=torch.float32, cast=True)


def test_a_missing_parameter_stops_the_way_back_and_publishes_nothing(kit, pair, tmp_path):
    hf, mm = pair
    change(kit.rank_file(mm, "mp_rank_00_001"), lambda state: state["model"].pop("text_decoder.decoder.layers.1.mlp.linear_fc1.weight"))
    before = kit.files(tmp_path)
    with pytest.raises(PlacementError, match=r"mp_rank_00_001/model_optim_rng.pt: .* 1 missing: text_decoder.decoder.layers.1.mlp.linear_fc1.weight"):
        kit.to_hf(mm, hf.path, tmp_path / "back")
    assert kit.files(tmp_path) == before


def test_an_unexpected_parameter_is_refused_but_an_empty_extra_state_is_not(kit, pair):
    hf, mm = pair
    file = kit.rank_file(mm, "mp_rank_00_000")
    change(file, lambda state: state["model"].update({"text_decoder.output_layer._extra_state": None}))
    load(hf, mm, split(**SAME))
    change(file, lambda state: state["model"].update({"text_decoder.lora.weight": torch.zeros(2)}))
    with pytest.raises(PlacementError, match=r"1 unexpected: text_decoder.lora.weight"):
        load(hf, mm, split(**SAME))


def test_a_parameter_of_another_shape_is_refused(kit, pair, tmp_path):
    hf, mm = pair
    name = "text_decoder.decoder.layers.0.input_layernorm.weight"
    change(kit.rank_file(mm, "mp_rank_00_000"), lambda state: state["model"].update({name: torch.zeros(16, dtype=torch.bfloat16)}))
    with pytest.raises(CheckpointError, match=rf"{name} has shape \(16,\) in the file, \(32,\) in the model"):
        load(hf, mm, split(**SAME))
    with pytest.raises(CheckpointError, match=rf"{name} has shape \(16,\), this model and split need \(32,\)"):
        kit.to_hf(mm, hf.path, tmp_path / "back")


def test_replicas_that_differ_are_found(kit, made, tmp_path):
    hf, _ = made
    kit.to_mm(hf, tmp_path / "mm", tp_size=2)
    name = "text_decoder.decoder.final_layernorm.weight"
    change(kit.rank_file(tmp_path / "mm", "mp_rank_01"), lambda state: state["model"][name][3].add_(1))
    with pytest.raises(
        CheckpointError, match=r"model.language_model.norm.weight: its copies in release/mp_rank_00/.* and release/mp_rank_01/.* differ"
    ):
        kit.to_hf(tmp_path / "mm", hf, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_tied_copies_that_differ_are_found(kit, tmp_path):
    hf = kit.write_hf(tmp_path / "hf", tied=True)
    kit.to_mm(hf, tmp_path / "mm", llm_pp_layers=[2, 2])
    change(kit.rank_file(tmp_path / "mm", "mp_rank_00_001"), lambda state: state["model"]["text_decoder.output_layer.weight"][3].add_(1))
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight: its copies in .*mp_rank_00_000.* and .*mp_rank_00_001.* differ"):
        kit.to_hf(tmp_path / "mm", hf, tmp_path / "back")


def test_a_missing_rank_folder_is_named(pair):
    hf, mm = pair
    shutil.rmtree(mm / "release" / "mp_rank_00_001")
    with pytest.raises(CheckpointError, match=r"1 of its folders are missing: mp_rank_00_001"):
        load(hf, mm, split(**SAME))


def test_a_truncated_file_is_refused(kit, pair):
    hf, mm = pair
    file = kit.rank_file(mm, "mp_rank_00_000")
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match=r"model_optim_rng.pt: cannot be read, 5000 bytes"):
        load(hf, mm, split(**SAME))


class Payload:
    def __reduce__(self):
        return (print, ("this must not run",))


def test_pickled_objects_are_not_loaded(kit, pair, capsys):
    hf, mm = pair
    torch.save({"model": {"w": Payload()}}, kit.rank_file(mm, "mp_rank_00_000"))
    with pytest.raises(CheckpointError, match=r"holds more than tensors and plain values, which is not loaded"):
        load(hf, mm, split(**SAME))
    assert "must not run" not in capsys.readouterr().out


@pytest.mark.parametrize(("word", "message"), [("relese", "neither 'release' nor an iteration number"), ("7", "no folders mp_rank_TT")])
def test_a_tracker_that_points_nowhere_is_refused(pair, word, message):
    _, mm = pair
    (mm / "latest_checkpointed_iteration.txt").write_text(word)
    with pytest.raises(CheckpointError, match=message):
        MMDirectory(mm)


def test_a_trained_iteration_is_found_by_its_tracker(pair):
    hf, mm = pair
    (mm / "release").rename(mm / "iter_0000200")
    (mm / "latest_checkpointed_iteration.txt").write_text("200\n")
    load(hf, mm, split(**SAME))


def test_an_existing_output_is_left_alone(kit, made, tmp_path):
    hf, _ = made
    (tmp_path / "mm").mkdir()
    (tmp_path / "mm" / "precious").write_text("keep")
    with pytest.raises(CheckpointError, match=r"mm: exists already; remove it or write elsewhere"):
        kit.to_mm(hf, tmp_path / "mm")
    assert kit.files(tmp_path) == ["mm", "mm/precious"]


def test_a_converter_for_another_family_is_refused(kit, made, tmp_path):
    hf, _ = made
    with pytest.raises(TangramError, match=r"is a qwen2_5_vl model but the converter is for qwen2_vl"):
        kit.to_mm(hf, tmp_path / "mm", family="qwen2_vl")
