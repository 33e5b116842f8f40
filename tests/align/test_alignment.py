"""The split model against transformers: one launch of processes per model, all splits inside it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from tangram.align.batch import write_batch
from tangram.align.compare import compare
from tangram.align.curves import REFERENCE, compare_curves
from tangram.align.launch import WorkerError, finish, running
from tangram.align.observation import Observation, read_observation
from tangram.align.reference import forward_arguments, load_reference, observe, token_loss
from tangram.align.run import align, collect, make_task, open_subject, prepare_batch, without_frozen
from tangram.align.sharded import Sharded
from tangram.align.task import Split
from tangram.checkpoints.convert import convert_hf_to_mm
from tangram.checkpoints.options import HFOptions, ParallelOptions, ToMMOptions
from tangram.errors import CheckpointError, ConfigError, PlacementError
from tangram.families.base import get_family
from tangram.families.tiny import TinySpec

SPLITS = {
    "one process": Split(),
    "tensor": Split(tensor=2),
    "pipeline": Split(pipeline=2),
    "tensor and pipeline": Split(tensor=2, pipeline=2, llm_pp_layers=[1, 3]),
    "virtual stages": Split(pipeline=2, virtual=2),
    "vision over two stages": Split(pipeline=2, vit_pp_layers=[2, 2], llm_pp_layers=[0, 4]),
    "text from the third stage": Split(pipeline=4, vit_pp_layers=[2, 2, 0, 0], llm_pp_layers=[0, 0, 2, 2]),
    "copies": Split(tensor=2, data=2, distributed_optimizer=True),
}
RANKS = {str(sharded): sharded for sharded in (Sharded(processes=2), Sharded(processes=4))}
"""The other backend."""
DRAWN = ["one process", "tensor and pipeline", "virtual stages", "text from the third stage", "copies"]
"""Splits that draw random weights in each of the ways there are: of parts of a tensor, of stages, of chunks, of stages without text, of copies."""
TRAINED = [Split(tensor=2, pipeline=2), SPLITS["copies"]]
"""Splits that train for long: what differs from one step to the next is how copies of the model and stages meet."""
SMALL = TinySpec(hidden=32, vocab=515, weight_std=0.1)
"""A vocabulary that does not divide, so that it is padded."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    folders = {tied: tmp_path_factory.mktemp("tiny") / ("tied" if tied else "untied") for tied in (False, True)}
    for tied, folder in folders.items():
        get_family("qwen2_5_vl").tiny(folder, 0, tied, SMALL)
    return folders


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.compat)], ids=["untied", "tied"])
def test_every_split_gives_the_loss_logits_and_gradients_of_transformers(tiny: dict[bool, Path], tied: bool, tmp_path: Path):
    """What ``test_matrix`` has at every split, looked at more closely at a few: with a tie first and last stage share a gradient."""
    chosen = {name: SPLITS[name] for name in (DRAWN if tied else ["vision over two stages"])}
    outcomes = align(tiny[tied], list(chosen.values()), micro_batch_size=1, dump=tmp_path)
    names = set(load_reference(tiny[tied]).state_dict()) - ({"lm_head.weight"} if tied else set())
    for name, outcome in zip(chosen, outcomes, strict=True):
        assert outcome.report.passed, f"{name}: {outcome.report.failures}"
        assert outcome.report.tolerance == 1e-5
        compared = {row.name: row for row in outcome.report.rows if row.kind == "gradient"}
        assert compared.keys() == names, name
        assert all(row.norm > 0 for row in compared.values()), name
    dumped, batch = read_observation(tmp_path), load_file(tmp_path / "batch.safetensors")
    media = {"pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts"}
    assert set(batch) == {"input_ids", "labels", "attention_mask", "position_ids", *media}
    assert dumped.logits.shape == (*batch["input_ids"].shape, 515) and dumped.gradients.keys() == names
    _a_wrong_gradient_is_found(dumped, batch["attention_mask"])


CONVERTED = {"qwen2_vl": ["tensor and pipeline"], "qwen2_5_vl": ["tensor", "virtual stages", "text from the third stage"]}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", CONVERTED)
def test_a_model_loaded_from_a_converted_split_is_that_of_transformers(family: str, tmp_path: Path):
    hf = tmp_path / "hf"
    get_family(family).tiny(hf, 1, False, TinySpec(hidden=32, vocab=512, weight_std=0.1))
    folders = []
    for number, split in enumerate(SPLITS[name] for name in CONVERTED[family]):
        folders.append(tmp_path / f"mm{number}")
        topology = split.topology(open_subject(hf, tmp_path).model)
        parallel = ParallelOptions(
            tp_size=split.tensor, vit_pp_layers=[list(row) for row in topology.vision], llm_pp_layers=[list(row) for row in topology.text]
        )
        convert_hf_to_mm(ToMMOptions(mm_dir=str(folders[-1]), hf_config=HFOptions(hf_dir=str(hf)), parallel_config=parallel), family)
    outcomes = align(hf, [SPLITS[name] for name in CONVERTED[family]], checkpoint=folders)
    for name, outcome in zip(CONVERTED[family], outcomes, strict=True):
        assert outcome.report.passed, f"{name}: {outcome.report.failures}"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_micro_batches_of_any_length_pass_every_split(tiny: dict[bool, Path], tmp_path: Path):
    """Lengths 17, 31, 8 and 24, as in a report of a pipeline that hung or crossed its shapes (NVIDIA/Megatron-LM#620)."""
    lengths, generator = (17, 31, 8, 24), torch.Generator().manual_seed(0)
    ids = torch.randint(0, 500, (4, 31), generator=generator)
    mask = torch.tensor([[1] * length + [0] * (31 - length) for length in lengths])
    file = write_batch({"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}, tmp_path)
    splits = [SPLITS[name] for name in ("pipeline", "tensor and pipeline", "virtual stages")]
    for outcome in align(tiny[False], splits, batch_file=file, micro_batch_size=1):
        assert outcome.report.passed, f"{outcome.split}: {outcome.report.failures}"
        row = outcome.report.worst("logits")
        assert row is not None and row.shape == (4, 31, 515)


@pytest.mark.compat
def test_a_batch_of_ones_own_may_hold_a_long_video_and_padding_on_the_left(tiny: dict[bool, Path], tmp_path: Path):
    """A video of 5 x 4 x 4 patches, a second a step, stands at times 1 to 9 (two positions a second), so the text after it begins at 10.
    transformers 5 would begin it at 3."""
    model, generator = open_subject(tiny[False], tmp_path).model, torch.Generator().manual_seed(0)
    words = torch.randint(0, 500, (2, 7), generator=generator)
    ids = torch.zeros(2, 28, dtype=torch.long)
    ids[0] = torch.tensor([model.vision_start_token_id, *[model.video_token_id] * 20, *words[0].tolist()])
    ids[1, 21:] = words[1]
    labels, mask = torch.full_like(ids, -100), torch.ones_like(ids)
    labels[:, 22:], mask[1, :21] = ids[:, 22:], 0
    video = {"pixel_values_videos": torch.randn(80, 1176, generator=generator), "video_grid_thw": torch.tensor([[5, 4, 4]])}
    batch = {"input_ids": ids, "labels": labels, "attention_mask": mask, "second_per_grid_ts": torch.ones(1), **video}
    (outcome,) = align(tiny[False], [Split()], batch_file=write_batch(batch, tmp_path), micro_batch_size=1)
    assert outcome.report.passed, outcome.report.failures
    positions = outcome.batch["position_ids"]
    assert positions[:, 0, 21:].tolist() == [list(range(10, 17))] * 3 and positions[:, 1, 21:].tolist() == [list(range(7))] * 3


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("dtype", "at_least"), [("bf16", 4e-3), ("fp16", 5e-4)])
def test_low_precision_stays_near_the_reference_but_is_low_precision(tiny: dict[bool, Path], dtype: Literal["bf16", "fp16"], at_least: float):
    """Half a unit in the last place is 2^-9 = 2e-3 of a number in bf16 and 2^-12 = 2.4e-4 in fp16."""
    (outcome,) = align(tiny[True], [Split(tensor=2)], dtype=dtype)
    assert outcome.report.passed, outcome.report.failures
    assert outcome.report.rows[0].error > at_least


def _a_wrong_gradient_is_found(right: Observation, mask: torch.Tensor) -> None:
    name = "model.language_model.layers.0.self_attn.q_proj.weight"
    wrong = {**right.gradients, name: right.gradients[name].roll(1, dims=0)}
    report = compare(Observation(right.loss, right.logits, wrong), right, mask, 1e-5)
    assert [row.name for row in report.rows if not row.within(1e-5)] == [name]
    del wrong[name]
    assert name in compare(Observation(right.loss, right.logits, wrong), right, mask, 1e-5).failures[0]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_thirty_steps_from_given_weights_follow_a_plain_adamw_loop_over_transformers_on_either_backend(tmp_path: Path):
    hf = tmp_path / "hf"
    get_family("qwen2_5_vl").tiny(hf, 42, True, replace(SMALL, text_layers=2, vision_layers=2))
    curves = compare_curves(hf, [*TRAINED, *RANKS.values()], steps=30, micro_batch_size=2)
    assert curves.against == REFERENCE and len(curves.deviations) == len(TRAINED) + len(RANKS)
    assert curves.losses[REFERENCE][-1] < 0.97 * curves.losses[REFERENCE][0]
    assert curves.worst <= 1e-6, curves.deviations


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_steps_from_random_weights_do_not_depend_on_the_split_or_the_backend(tiny: dict[bool, Path]):
    curves = compare_curves(tiny[False], [*(SPLITS[name] for name in DRAWN), Sharded(processes=2)], steps=4, seed=7, micro_batch_size=2)
    assert len(curves.deviations) == len(DRAWN)
    assert curves.worst <= 1e-6, curves.deviations


@pytest.mark.compat
def test_the_reference_uses_the_three_dimensional_positions_it_is_given(tiny: dict[bool, Path], tmp_path: Path):
    subject = open_subject(tiny[False], tmp_path)
    batch, _ = prepare_batch(subject, None)
    model = load_reference(subject.directory)
    flat = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["position_ids"])
    right, plain = observe(model, batch), observe(model, {**batch, "position_ids": flat})
    assert abs(right.loss - plain.loss) > 1e-5
    with torch.no_grad():
        assert right.loss == pytest.approx(model(**forward_arguments(model, batch), labels=batch["labels"]).loss.item(), rel=1e-6)
    own = model.model.get_rope_index
    arguments = forward_arguments(model, batch)
    known = {"mm_token_type_ids": arguments["mm_token_type_ids"]} if "mm_token_type_ids" in arguments else {}
    seconds = {"second_per_grid_ts": batch["second_per_grid_ts"]}
    theirs, _ = own(batch["input_ids"], **{n: arguments[n] for n in ("image_grid_thw", "video_grid_thw", "attention_mask")}, **seconds, **known)
    real = batch["attention_mask"].bool().expand_as(theirs)
    assert torch.equal(batch["position_ids"][real], theirs[real])


def test_the_loss_of_a_sure_model_with_a_large_vocabulary_is_exact_to_its_last_digits():
    """One logit 12 above all others: each other entry weighs e^-12, and 151,935 of them nearly as much as the one."""
    logits = torch.zeros(1, 2, 151936)
    logits[0, 0, 7] = 12.0
    expected = math.log1p(151935 * math.exp(-12.0))
    loss = float(token_loss(logits, torch.tensor([[-100, 7]])))
    assert loss == pytest.approx(expected, rel=1e-12)


def test_a_parameter_that_the_batch_does_not_reach_has_a_gradient_of_zeros(tiny: dict[bool, Path], tmp_path: Path):
    subject = open_subject(tiny[False], tmp_path)
    batch, _ = prepare_batch(subject, None)
    text = {name: batch[name][..., 1:2, :20] for name in ("input_ids", "labels", "attention_mask", "position_ids")}
    seen = observe(load_reference(subject.directory), text)
    assert not seen.gradients["model.visual.patch_embed.proj.weight"].any()
    assert seen.gradients["model.language_model.norm.weight"].any()


def test_what_cannot_be_split_is_refused_before_a_process_starts(tiny: dict[bool, Path], tmp_path: Path):
    with pytest.raises(PlacementError, match=r"number of key/value heads 2 is not divisible by tensor-parallel size 4"):
        align(tiny[False], [Split(tensor=4)])
    with pytest.raises(ConfigError, match="sums to 3, but the model has 4 layers"):
        align(tiny[False], [Split(pipeline=2, llm_pp_layers=[1, 2])])
    with pytest.raises(CheckpointError, match="no such directory"):
        align(tmp_path / "nothing", [Split()])


def test_a_fault_in_a_process_comes_back_as_one_line(tiny: dict[bool, Path], tmp_path: Path):
    for file in tiny[False].iterdir():
        if file.name != "model.safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tiny[False] / "model.safetensors")
    del weights["visual.merger.ln_q.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises((WorkerError, CheckpointError), match=r"^.*(model\.)?visual\.merger\.ln_q\.weight.*$") as fault:
        align(tmp_path, [Split()])
    assert "\n" not in str(fault.value)


def test_the_report_is_json(tiny: dict[bool, Path]):
    (outcome,) = align(tiny[False], [Split()], tolerance=0.0)
    content = json.loads(json.dumps(outcome.as_dict(), allow_nan=False))
    assert not content["passed"] and content["split"]["tensor"] == 1 and content["batch"]["input_ids"][0] == 5
    assert "past tolerance 0" in content["failures"][0]


def test_what_the_split_model_does_not_train_is_told_and_not_compared(tiny: dict[bool, Path], tmp_path: Path) -> None:
    subject = open_subject(tiny[False], tmp_path)
    encoder = subject.model.image_encoder
    assert encoder is not None
    frozen = encoder.model_copy(update={"vision_encoder": encoder.vision_encoder.model_copy(update={"freeze": True})})
    subject = replace(subject, model=subject.model.model_copy(update={"image_encoder": frozen}))
    batch, _ = prepare_batch(subject, None)
    task = make_task(subject, Split(pipeline=2, llm_pp_layers=[0, 4]), write_batch(batch, tmp_path), tmp_path / "out", micro_batch_size=1)
    with running([task], tmp_path) as process:
        finish(process, [task], tmp_path)
    actual, _ = collect(task)
    names = load_reference(subject.directory).state_dict()
    expected, (note,) = without_frozen(Observation(0.0, actual.logits, dict(names)), task)
    tower = {name for name in names if ".visual." in name and ".visual.merger." not in name}
    assert expected.gradients.keys() == actual.gradients.keys() == names.keys() - tower
    assert note.startswith(f"{len(tower)} frozen parameters have no gradient to compare: model.visual.")
