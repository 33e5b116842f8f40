"""Packed rows and videos in the assembled model, in one process: against unpacked rows, and against Hugging Face."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tangram.config.model import ModelConfig
from tangram.data.collate import Collator
from tangram.data.encode import EncodedSample
from tangram.errors import DataError
from tangram.families import get_family
from tangram.losses.modes import reduce_token_losses
from tangram.models.attention import SegmentPlan
from tangram.models.text_plan import packed_lengths
from tangram.models.vlm import VLMModel
from tests.largest import largest
from tests.models.conftest import SPECIAL, hf_config, hf_positions, make_hf, make_sample, run_hf
from tests.models.test_against_hf import assemble, canonical_gradients, relative

LOSS_TYPES = ("default", "per_sample_loss", "per_token_loss")
MODEL_ONLY = ("input_ids", "attention_mask", "position_ids", "labels", "pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
PACKED = (*MODEL_ONLY, "cu_seqlens", "cu_seqlens_padded")

Grid = tuple[int, int, int]


def mixed() -> list[EncodedSample]:
    """An image; text alone; a video that lasts longer than it is wide; a video before an image; two images and no label."""
    samples = [
        make_sample(0, [1, 2], (1, 4, 6), list(range(40, 52))),
        make_sample(1, list(range(100, 117))),
        make_sample(2, [7], (5, 4, 4), [8, 10, 11, 13]),
        make_sample(3, [22], (2, 6, 8), [23, 25], (1, 8, 4), list(range(60, 71))),
        make_sample(4, (1, 4, 4), (1, 6, 4), [3, 6, 9]),
    ]
    assert all(label == -100 for label in samples[4].labels)
    return samples


def collate(model: ModelConfig, samples: list[EncodedSample], packing: bool, multiple: int = 1) -> dict[str, Any]:
    batch = Collator(get_family(model.model_id).rope_index, model, 0, multiple, packing)([[one] for one in samples])
    return {name: batch[name] for name in (PACKED if packing else MODEL_ONLY) if name in batch}


def gradients_of(built: VLMModel, batch: dict[str, Any], loss_type: str) -> tuple[torch.Tensor, int, dict[str, torch.Tensor]]:
    built.zero_grad()
    losses = built(**batch)["loss_dict"]
    terms = reduce_token_losses(losses["token_losses"], losses["samples"], loss_type)
    (terms.numerator / terms.denominator).backward()
    return terms.numerator.detach() / terms.denominator, int(terms.denominator), {n: p.grad.clone() for n, p in built.named_parameters()}


def hf_loss(logits: torch.Tensor, labels: torch.Tensor, loss_type: str) -> torch.Tensor:
    """The loss types by their definitions, row by row."""
    rows = []
    for scores, row in zip(logits[:, :-1], labels[:, 1:], strict=True):
        rows.append(torch.nn.functional.cross_entropy(scores[row != -100], row[row != -100], reduction="none"))
    if loss_type == "per_sample_loss":
        return torch.stack([row.mean() for row in rows if len(row)]).mean()
    return torch.cat(rows).mean()


def all_relative(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    return relative(torch.cat([found[name].flatten() for name in wanted]), torch.cat([wanted[name].flatten() for name in wanted]))


@pytest.mark.compat
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_vl"])
def test_packed_rows_train_as_samples_of_their_own_and_as_hugging_face(one_process: None, family: str) -> None:
    hf = make_hf(family)
    built, placement = assemble(hf, family)
    apart, together = collate(built.model, mixed(), packing=False), collate(built.model, mixed(), packing=True, multiple=8)
    assert together["cu_seqlens"].tolist() == [0, 22, 39, 66, 116, 133] and together["cu_seqlens_padded"].tolist() == [0, 24, 48, 80, 136, 160]
    counts = {"default": 1, "per_sample_loss": 4, "per_token_loss": int((together["labels"][:, 1:] != -100).sum())}
    inputs = {name: tensor for name, tensor in apart.items() if name not in ("labels", "position_ids")}
    for loss_type in LOSS_TYPES:
        hf.zero_grad()
        reference = hf_loss(run_hf(hf, inputs, apart["position_ids"]).logits, apart["labels"], loss_type)
        reference.backward()
        loss, count, wanted = gradients_of(built, apart, loss_type)
        packed_loss, packed_count, found = gradients_of(built, together, loss_type)
        assert packed_count == count == counts[loss_type]
        assert relative(packed_loss, loss) < 1e-6 and relative(packed_loss, reference) < 1e-6, loss_type
        assert all_relative(found, wanted) < 1e-6, loss_type
        gradients = canonical_gradients(built, placement, hf)
        worst = largest((relative(gradients[name], parameter.grad), name) for name, parameter in hf.named_parameters())
        assert worst[0] < 1e-5, (loss_type, worst)


REPORTED: dict[str, list[EncodedSample]] = {
    "twice": [make_sample(0, [10, 11], (1, 4, 6), [12, 13]), make_sample(1, [10, 11], (1, 4, 6), [12, 13])],
    "short and long": [make_sample(0, [10, 11], (1, 4, 6), [12, 13]), make_sample(1, [20, 22, 23, 25, 26])],
    "3 and 5": [make_sample(0, [10, 11, 13]), make_sample(1, [20, 22, 23, 25, 26])],
    "4 and 8": [make_sample(0, [10, 11, 13, 14]), make_sample(1, [20, 22, 23, 25, 26, 28, 29, 31])],
}
"""The twelve tokens of huggingface/trl#5785, twice as in hiyouga/LlamaFactory#7754; the lengths of NVIDIA-NeMo/Megatron-Bridge#4507."""


def padded_on_the_left(batch: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    """The rows pushed to the right. What would be predicted from padding is not learnt."""
    lengths = batch["attention_mask"].sum(1).tolist()
    moved = dict(batch)
    for name in ("input_ids", "attention_mask", "labels"):
        moved[name] = torch.stack([row.roll(len(row) - length) for row, length in zip(batch[name], lengths, strict=True)])
    moved["labels"][torch.arange(len(lengths)), moved["attention_mask"].argmax(1)] = -100
    moved["position_ids"] = get_family(model.model_id).rope_index(moved["input_ids"], moved["attention_mask"], batch.get("image_grid_thw"), model)
    return moved


@pytest.mark.compat
@pytest.mark.parametrize("case", REPORTED)
def test_samples_that_share_a_batch_or_a_row_have_the_token_weighted_loss_of_each_alone(one_process: None, case: str) -> None:
    """Each alone is run by Hugging Face, without padding and with its own positions."""
    hf, samples = make_hf("qwen2_5_vl"), REPORTED[case]
    built, _ = assemble(hf, "qwen2_5_vl")
    total, count = torch.zeros(()), 0
    for sample in samples:
        alone = {name: tensor for name, tensor in collate(built.model, [sample], packing=False).items() if name != "position_ids"}
        labels = alone.pop("labels")
        logits = run_hf(hf, alone, hf_positions(hf, alone)).logits
        learnt = labels[0, 1:] != -100
        total = total + torch.nn.functional.cross_entropy(logits[0, :-1][learnt], labels[0, 1:][learnt], reduction="sum")
        count += int(learnt.sum())
    on_the_right, packed = collate(built.model, samples, packing=False), collate(built.model, samples, packing=True, multiple=4)
    for name, batch in {"right": on_the_right, "left": padded_on_the_left(on_the_right, built.model), "packed": packed}.items():
        loss, tokens, _ = gradients_of(built, batch, "per_token_loss")
        assert tokens == count and relative(loss, total.detach() / count) < 1e-6, name


@pytest.mark.compat
@pytest.mark.parametrize(
    "samples",
    [
        [make_sample(0, [1, 2], (3, 4, 8), [4, 5]), make_sample(1, (2, 8, 6), (4, 4, 4), [7, 8])],
        [make_sample(0, [1, 2], (2, 4, 6), [4, 5], (1, 6, 4), (2, 4, 4), [7]), make_sample(1, (1, 4, 4), [7, 8, 10])],
        [make_sample(0, list(range(20)))],
    ],
    ids=["videos alone", "videos and images in turn", "no media"],
)
@pytest.mark.parametrize("packing", [False, True])
def test_any_mixture_of_media_gives_hugging_faces_logits(one_process: None, samples: list[EncodedSample], packing: bool) -> None:
    hf = make_hf("qwen2_5_vl")
    built, _ = assemble(hf, "qwen2_5_vl")
    apart = collate(built.model, samples, packing=False)
    inputs = {name: tensor for name, tensor in apart.items() if name not in ("labels", "position_ids")}
    real = apart["attention_mask"].bool()
    wanted = run_hf(hf, inputs, apart["position_ids"]).logits[real]
    batch = collate(built.model, samples, packing, multiple=4)
    logits = built(**{**batch, "labels": None})["logits"][batch["attention_mask"].bool()]
    assert relative(logits, wanted) < 1e-5


def test_no_token_sees_another_sample_or_padding(one_process: None) -> None:
    """Bit-equal, as the shapes are: what is computed for one sample takes nothing from its neighbours."""
    built, _ = assemble(make_hf("qwen2_5_vl"), "qwen2_5_vl")
    first, second = mixed()[0], mixed()[3]
    batch = collate(built.model, [first, second], packing=True, multiple=16)
    logits = built(**{**batch, "labels": None})["logits"]
    padding = batch["attention_mask"] == 0
    assert padding[0, len(first.input_ids)] and padding[0, -1]
    noisy = {**batch, "input_ids": torch.where(padding, 77, batch["input_ids"]), "labels": None}
    assert torch.equal(built(**noisy)["logits"][~padding], logits[~padding])
    other = make_sample(0, [5, 4], (1, 4, 6), list(range(80, 92)), seed=1)
    changed = built(**{**collate(built.model, [other, second], packing=True, multiple=16), "labels": None})["logits"]
    start = batch["cu_seqlens_padded"][1]
    assert torch.equal(changed[:, start:], logits[:, start:]) and not torch.equal(changed[:, :start], logits[:, :start])


def test_a_padding_token_sees_itself_alone() -> None:
    plan = SegmentPlan.from_lengths(packed_lengths([0, 3, 5], [0, 4, 8], 8), torch.device("cpu"))
    assert plan.segments is not None
    segments = sorted(segment for group in plan.segments.groups for segment in group.index.tolist())
    assert segments == [[0, 1, 2], [3], [4, 5], [6], [7]]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_vl"])
@pytest.mark.parametrize("grids", [[(3, 4, 6)], [(1, 8, 10), (2, 12, 4), (4, 4, 4)]])
def test_frames_of_a_video_see_what_hugging_faces_see(one_process: None, family: str, grids: list[Grid]) -> None:
    hf = make_hf(family)
    built, _ = assemble(hf, family)
    pixels = torch.randn(sum(t * h * w for t, h, w in grids), 1176)
    visual = hf.model.visual(pixels, grid_thw=torch.tensor(grids))
    visual = visual if isinstance(visual, torch.Tensor) else visual.pooler_output
    assert built.image_encoder is not None
    assert relative(built.image_encoder(pixels, grids)[0][:, 0], visual) < 1e-5


def test_videos_that_do_not_fit_their_placeholders_are_refused_with_both_numbers(one_process: None) -> None:
    built, _ = assemble(make_hf("qwen2_5_vl"), "qwen2_5_vl")
    batch = collate(built.model, [make_sample(0, [1], (2, 4, 4), [2, 4])], packing=False)
    del batch["pixel_values_videos"], batch["video_grid_thw"]
    with pytest.raises(DataError, match="8 video placeholder tokens but its videos give 0; the text and the videos"):
        built(**batch)


def test_the_model_config_says_which_tokens_are_videos() -> None:
    model = get_family("qwen2_5_vl").from_hf_config(hf_config(make_hf("qwen2_5_vl")))
    assert (model.img_context_token_id, model.video_token_id) == (SPECIAL["image_token_id"], SPECIAL["video_token_id"])
