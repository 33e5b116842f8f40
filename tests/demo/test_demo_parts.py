from __future__ import annotations

import hashlib
import inspect
import json
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from tangram.align.reference import token_types
from tangram.config.parsing import read_mapping
from tangram.config.yaml_config import read_run
from tangram.demo.data import DemoData, Question, kind_of, write_data
from tangram.demo.drawing import contents, draw_split
from tangram.demo.evaluate import Answered, Answerer, Score, scores
from tangram.demo.page import Check, Page, render_page
from tangram.demo.photos import QUESTIONS
from tangram.demo.plot import plot_losses, read_losses, running_mean
from tangram.demo.recipe import Recipe, write_run_file
from tangram.demo.run import DemoError, _whole, shown
from tangram.families.base import get_family
from tangram.placement.topology import Topology


def question(number: int, answer: str, kind: str = "color") -> Question:
    return Question(Path(f"{number}.png"), f"question {number}", answer, kind)


def test_question_types_are_told_by_the_answer():
    assert [kind_of(answer) for answer in ("teal", "circle", "yes", "no")] == ["color", "shape", "yes or no", "yes or no"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DemoData:
    return write_data(tmp_path_factory.mktemp("data"), photo_repeats=3, heldout_per_kind=100)


def test_training_samples_are_the_color_and_shape_questions_and_the_photographs(data: DemoData):
    samples = json.loads(data.train.read_text())
    pairs = sum(map(len, QUESTIONS.values()))
    # Counted in the published questions.json of the training set: 5,166 colors, 5,002 shapes.
    assert len(samples) == data.samples == 5166 + 5002 + 3 * pairs
    assert len(QUESTIONS) == 12 and pairs == 40 == len(data.photos)
    assert samples[0] == {
        "messages": [{"role": "user", "content": "<image>what is the blue shape?"}, {"role": "assistant", "content": "rectangle"}],
        "images": ["train/0.png"],
    }
    assert all((data.train.parent / image).is_file() for sample in samples for image in sample["images"])


def test_held_out_pictures_are_not_training_pictures(data: DemoData):
    def digests(folder: str) -> set[str]:
        return {hashlib.sha256(path.read_bytes()).hexdigest() for path in (data.train.parent / folder).iterdir()}

    assert len(data.heldout) == 200 and not digests("heldout") & digests("train")
    assert {q.kind for q in data.heldout} == {"color", "shape"}


def test_the_majority_answer_is_that_of_the_held_out_questions_of_its_type():
    asked = (question(0, "red"), question(1, "red"), question(2, "blue"), question(3, "circle", "shape"))
    assert DemoData(Path(), asked, (), 0).majority("color") == ("red", pytest.approx(2 / 3))
    answers = [Answered(asked[0], "red"), Answered(asked[1], "Red"), Answered(asked[2], "blue"), Answered(asked[3], "square")]
    color, shape = scores(answers, DemoData(Path(), asked, (), 0))
    assert (color.right, color.count, shape.right, shape.count) == (2, 3, 0, 1)


@pytest.mark.parametrize(("right", "majority", "sees"), [(80, 0.38, True), (52, 0.38, False), (54, 0.38, True), (38, 0.38, False), (100, 1.0, False)])
def test_better_than_the_majority_means_by_more_than_chance(right: int, majority: float, sees: bool):
    # Three standard errors of 52 in 100 are 0.150, of 54 in 100 0.1495.
    assert Score("color", right, 100, "red", majority).sees is sees


def test_pictures_on_the_page_take_turns_between_types_and_are_never_shown_twice():
    asked = [(0, "color"), (0, "color"), (1, "color"), (1, "shape"), (2, "shape"), (3, "shape")]
    answers = [Answered(question(number, "red", kind), "") for number, kind in asked]
    assert [(int(a.question.image.stem), a.question.kind) for a in shown(answers, 9)] == [(0, "color"), (1, "shape"), (2, "shape"), (3, "shape")]
    assert len(shown(answers, 2)) == 2


def test_a_training_that_was_stopped_is_not_reported_as_a_whole_one(tmp_path: Path):
    assert _whole([3.0, 2.0], 2, tmp_path) == [3.0, 2.0]
    with pytest.raises(DemoError, match="training ended after 1 of 2 steps"):
        _whole([3.0], 2, tmp_path)


def test_the_running_mean_is_over_the_last_values(tmp_path: Path):
    assert running_mean([4.0, 2.0, 6.0, 8.0], 2) == [4.0, 3.0, 4.0, 7.0]
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 4.0}\n{"step": 2, "loss": "nan"}\n')
    losses = read_losses(tmp_path / "metrics.jsonl")
    assert losses[0] == 4.0 and losses[1] != losses[1]
    plot_losses([4.0, 2.0, 6.0], tmp_path / "loss.png")
    with Image.open(tmp_path / "loss.png") as image:
        assert image.width > image.height > 200


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "hf_init"
    get_family("qwen2_5_vl").tiny(folder, 3, True, Recipe().sizes)
    return folder


def test_the_run_file_is_a_run_of_the_recipe(model_dir: Path, data: DemoData):
    recipe = Recipe()
    run = read_run(write_run_file(recipe, model_dir.parent))
    assert run.topology().model_parallel_size == recipe.processes == 4
    assert run.model.config.image_encoder is not None and not run.model.config.image_encoder.vision_encoder.freeze
    assert run.model.load == str(model_dir.parent / "mm") and run.training.train_iters == recipe.steps


@pytest.mark.compat
def test_answers_are_those_of_transformers_own_greedy_generation(model_dir: Path, data: DemoData):
    answerer = Answerer(model_dir, 56 * 56, 84 * 84)
    asked = [data.heldout[0], data.heldout[150], data.photos[0]]
    said = [answer.said for answer in answerer.answer(asked)]
    model = answerer.model
    for one, ours in zip(asked, said, strict=True):
        prompt = answerer._prompt(0, one)
        ids = torch.tensor([prompt.input_ids])
        known = {}
        if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
            known = {"mm_token_type_ids": token_types(ids, model.config.image_token_id, model.config.video_token_id)}
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            pixel_values=torch.from_numpy(prompt.image_pixels[0].expand()),
            image_grid_thw=torch.tensor([image.grid for image in prompt.images]),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=answerer._end,
            pad_token_id=answerer._end,
            **known,
        )
        theirs = answerer.tokenizer.decode([token for token in out[0, ids.shape[1] :].tolist() if token != answerer._end]).strip()
        assert ours == theirs


def test_the_drawing_counts_what_every_process_holds(model_dir: Path):
    model = get_family("qwen2_5_vl").from_hf_config(read_mapping(model_dir / "config.json"))
    whole = draw_split(model, Topology.build(vision_layers=2, text_layers=4))
    from transformers import AutoModelForImageTextToText

    count = AutoModelForImageTextToText.from_pretrained(model_dir).num_parameters()
    assert f"process 0: {count:,} weights" in whole
    topology = Topology.build(vision_layers=2, text_layers=4, tensor=2, vit_pp_layers=[2, 0], llm_pp_layers=[1, 3])
    assert contents(topology.chunk(0)) == ["patch embedding", "vision blocks 0 to 1", "projector", "word embedding", "text layer 0"]
    assert contents(topology.chunk(1)) == ["text layers 1 to 3", "final norm, head, loss"]
    assert re.findall(r"process (\d):", draw_split(model, topology)) == ["0", "1", "2", "3"]


def test_the_page_stands_alone_and_escapes_what_models_say(data: DemoData, tmp_path: Path):
    plot_losses([2.0, 1.0], tmp_path / "loss.png")
    page = Page(
        facts=[("4", "processes")],
        curve=tmp_path / "loss.png",
        split="<svg></svg>",
        scores=[Score("color", 9, 10, "red", 0.25)],
        heldout=[Answered(data.heldout[0], "<script>")],
        photos=[Answered(data.photos[0], data.photos[0].answer)],
        checks=[Check(True, "fine"), Check(False, "not fine")],
        commands=["tangram align"],
    )
    text = render_page(page)
    assert "<script>" not in text and "&lt;script&gt;" in text
    assert text.count('class="wrong"') == 1 and text.count('class="right"') == 1 and "class=failed" in text
    assert "90.0 % (9 of 10)" in text and "25.0 %" in text
    sources = re.findall(r'src="([^"]*)"', text)
    assert len(sources) == 3 and all(source.startswith("data:image/") for source in sources)
    assert "http" not in re.sub(r"data:image/[^\"]*", "", text)
