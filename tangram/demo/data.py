"""The demo's data: photographs with written questions, and the published easy-VQA set (pictures of one coloured shape each)."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from tangram.align.default_batch import photo_folder
from tangram.demo.photos import QUESTIONS
from tangram.errors import ConfigError

Kind = Literal["color", "shape"]
KINDS: tuple[Kind, ...] = ("color", "shape")
"""Question types that need sight. easy-VQA's third type, yes or no, is left out: its questions are three quarters of the set."""
COLORS = ("black", "blue", "brown", "gray", "green", "red", "teal", "yellow")
SHAPES = ("circle", "rectangle", "triangle")
PHOTO_SIDE = 448
"""Longest side of the copies of the photographs, pixels: for people to look at; training scales them down further."""


@dataclass(frozen=True)
class Question:
    """A question about one picture.

    Args:
        image: path of the picture.
        kind: question type; "photo" for those about photographs.
    """

    image: Path
    text: str
    answer: str
    kind: str


@dataclass(frozen=True)
class DemoData:
    """What ``write_data`` made.

    Args:
        train: file of the training samples.
        heldout: questions about pictures that training does not see.
        photos: questions about the photographs; training sees them.
        samples: number of training samples.
    """

    train: Path
    heldout: tuple[Question, ...]
    photos: tuple[Question, ...]
    samples: int

    def majority(self, kind: str) -> tuple[str, float]:
        """The most frequent answer to held-out questions of a type, and the share of questions that it answers."""
        answers = Counter(question.answer for question in self.heldout if question.kind == kind)
        ((answer, count),) = answers.most_common(1)
        return answer, count / answers.total()


def kind_of(answer: str) -> str:
    """The type of an easy-VQA question, told by its answer."""
    return "color" if answer in COLORS else "shape" if answer in SHAPES else "yes or no"


def write_data(folder: Path, photo_repeats: int, heldout_per_kind: int) -> DemoData:
    """Write pictures, ``train.json`` and ``heldout.json`` into ``folder``.

    Args:
        photo_repeats: how often each question about a photograph stands among the training samples.
        heldout_per_kind: questions of each type, from the test set, which has pictures of its own.

    Raises:
        ConfigError: scikit-image or easy_vqa is not installed.
    """
    source = easy_vqa_folder()
    photos = _copy_photos(folder / "photos")
    train = [question for question in read_easy_vqa(source / "train") if question.kind in KINDS]
    heldout = _first_of_each(read_easy_vqa(source / "test"), heldout_per_kind)
    train = _copy_pictures(train, folder / "train")
    heldout = _copy_pictures(heldout, folder / "heldout")
    samples = [*train, *photos * photo_repeats]
    _write_samples(folder / "train.json", samples, folder)
    _write_samples(folder / "heldout.json", heldout, folder)
    return DemoData(folder / "train.json", tuple(heldout), tuple(photos), len(samples))


def easy_vqa_folder() -> Path:
    """Folder of the easy-VQA pictures.

    Raises:
        ConfigError: it is not installed.
    """
    # find_spec, not import: importing the package reads all questions.
    found = find_spec("easy_vqa")
    if found is None or not found.submodule_search_locations:
        raise ConfigError("the demo's questions come with easy_vqa, which is not installed: pip install easy_vqa")
    return Path(found.submodule_search_locations[0]) / "data"


def read_easy_vqa(split: Path) -> list[Question]:
    """All questions of ``questions.json``, ``[[question, answer, picture number], ...]``, in the file's order."""
    raw = json.loads((split / "questions.json").read_text(encoding="utf-8"))
    return [Question(split / "images" / f"{number}.png", text, answer, kind_of(answer)) for text, answer, number in raw]


def _first_of_each(questions: Iterable[Question], count: int) -> list[Question]:
    """The first ``count`` questions of each type, of every picture at most one per type, so that many pictures are seen."""
    taken: dict[str, dict[Path, Question]] = {kind: {} for kind in KINDS}
    for question in questions:
        chosen = taken.get(question.kind)
        if chosen is not None and len(chosen) < count:
            chosen.setdefault(question.image, question)
    return [question for kind in KINDS for question in taken[kind].values()]


def _copy_pictures(questions: Sequence[Question], folder: Path) -> list[Question]:
    folder.mkdir(parents=True, exist_ok=True)
    copies = {image: folder / image.name for image in {question.image for question in questions}}
    for image, copy in copies.items():
        shutil.copyfile(image, copy)
    return [Question(copies[q.image], q.text, q.answer, q.kind) for q in questions]


def _copy_photos(folder: Path) -> list[Question]:
    from PIL import Image

    source = photo_folder()
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for name, pairs in QUESTIONS.items():
        copy = folder / f"{Path(name).stem}.png"
        with Image.open(source / name) as image:
            small = image.convert("RGB")
            small.thumbnail((PHOTO_SIDE, PHOTO_SIDE))
            small.save(copy)
        found += [Question(copy, text, answer, "photo") for text, answer in pairs]
    return found


def _write_samples(path: Path, questions: Iterable[Question], root: Path) -> None:
    """Samples in the form that ``tangram.data.dataset`` reads, pictures relative to ``root``."""
    samples: list[dict[str, Any]] = [
        {
            "messages": [{"role": "user", "content": f"<image>{question.text}"}, {"role": "assistant", "content": question.answer}],
            "images": [str(question.image.relative_to(root))],
        }
        for question in questions
    ]
    path.write_text(json.dumps(samples, indent=0) + "\n", encoding="utf-8")
