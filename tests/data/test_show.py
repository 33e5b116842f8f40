"""``tangram data show`` shows what the model gets."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from tangram.cli.data_show import show_sample
from tangram.cli.main import main
from tangram.data.show import SampleView, token_texts, view_sample
from tangram.data.show_page import render_sample
from tangram.data.subject import SubjectOptions, build_subject
from tangram.data.tokenizer import Tokenizer
from tangram.errors import ConfigError, DataError


@pytest.fixture
def view(
    tmp_path: Path, model_dir: Path, record: Callable[..., dict[str, Any]], write_json: Callable[..., str], photo: Callable[[str], str]
) -> Callable[[int], SampleView]:
    """Views of a small dataset with two pictures of one sample."""
    for name in ("rocket.jpg", "coffee.png"):
        (tmp_path / name).symlink_to(photo(name))
    dataset = write_json(
        [
            record("<image>What stands & waits?", "A <b>rocket</b>.\nNo more.", "And <image>?", "Coffee 🚀.", images=["rocket.jpg", "coffee.png"]),
            record("Say hi.", "Hi."),
        ]
    )
    limits = {"model_name_or_path": str(model_dir), "image_max_pixels": 84 * 84, "image_min_pixels": 0}
    basic = {"dataset": dataset, "dataset_dir": str(tmp_path)}
    config = write_json({"dataset_param": {"preprocess_parameters": limits, "basic_parameters": basic}}, "config.json")
    subject = build_subject(SubjectOptions(config=config), needs_pixels=True)
    return lambda index: view_sample(subject, index)


def test_tokens_labels_and_positions(view: Callable[[int], SampleView]) -> None:
    """Worked by hand: 84 x 84 pixels at most make 2 x 4 merged cells of the rocket (427 x 640) and 2 x 3 of the coffee (400 x 600)."""
    shown = view(0)
    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
    texts = [(run.text, run.tokens[0].learnt) for run in shown.runs() if run.tokens[0].medium is None]
    assert texts == [
        (system, False),
        ("<|vision_end|>What stands & waits?<|im_end|>\n<|im_start|>assistant\n", False),
        ("A <b>rocket</b>.\nNo more.<|im_end|>", True),
        ("\n<|im_start|>user\nAnd <|vision_start|>", False),
        ("<|vision_end|>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("Coffee 🚀.<|im_end|>", True),
        ("\n", False),
    ]
    rocket, coffee = shown.media
    assert (len(rocket.places), rocket.grid, rocket.cell) == (6, (1, 4, 6), 28)
    first = next(run for run in shown.runs() if run.tokens[0].medium == 0)
    start = first.start
    assert first.positions == f"t {start} h {start}-{start + 1} w {start}-{start + 2}"
    after = shown.tokens[rocket.places[-1] + 1]
    assert after.position == (start + 3,) * 3, "text goes on after the largest position of the picture"
    assert shown.tokens[coffee.places[0]].id == 151655


def test_pictures_are_what_the_resizing_made(view: Callable[[int], SampleView], photo: Callable[[str], str]) -> None:
    for medium, name in zip(view(0).media, ("rocket.jpg", "coffee.png"), strict=True):
        _, rows, columns = medium.grid
        with Image.open(photo(name)) as image:
            expected = image.convert("RGB").resize((columns * 14, rows * 14), Image.Resampling.BICUBIC)
        assert np.array_equal(np.asarray(medium.pictures[0]), np.asarray(expected))


def test_a_character_of_several_tokens_has_its_text_once(tokenizer: Tokenizer) -> None:
    text = "A 🚀 日本 é!"
    texts = token_texts(tokenizer, tokenizer.encode(text))
    assert "".join(texts) == text and "" in texts


class _Page(HTMLParser):
    """Collects what a page holds, and that every element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.cells: list[str] = []
        self.learnt = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.sources += [value for key, value in attrs if key in ("src", "href") and value]
        if tag not in ("meta", "input", "br"):
            self.open.append("learnt" if "learnt" in (given.get("class") or "") and tag == "span" and "data-id" in given else tag)

    def handle_endtag(self, tag: str) -> None:
        last = self.open.pop()
        assert last == tag or (last == "learnt" and tag == "span")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [value for key, value in attrs if key in ("src", "href") and value]

    def handle_data(self, data: str) -> None:
        if "learnt" in self.open:
            self.learnt += data
        if self.open[-1:] == ["title"] and data.startswith("row"):
            self.cells.append(data)


def test_the_page_needs_no_other_file(view: Callable[[int], SampleView]) -> None:
    shown = view(0)
    text = render_sample(shown)
    page = _Page()
    page.feed(text)
    assert page.open == []
    assert page.learnt.replace("\u23ce", "").replace("\u00b7", "") == "A <b>rocket</b>.\nNo more.<|im_end|>Coffee 🚀.<|im_end|>"
    assert len(page.cells) == sum(len(medium.places) for medium in shown.media)
    assert page.cells[0] == f"row 0, column 0: token {shown.media[0].places[0]}, position {shown.media[0].places[0]}"
    assert not [source for source in page.sources if not source.startswith(("#medium", "data:image/png;base64,"))]
    for source, medium in zip([s for s in page.sources if s.startswith("data:")], shown.media, strict=True):
        picture = Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2])))
        assert np.array_equal(np.asarray(picture), np.asarray(medium.pictures[0]))
    assert not re.search(r"https?://|url\(", text)


def test_what_cannot_be_shown_is_told(view: Callable[[int], SampleView]) -> None:
    with pytest.raises(DataError, match="sample 2: the dataset has 2 samples, 0 to 1"):
        view(2)
    assert view(1).media == ()


def test_the_command(
    tmp_path: Path,
    model_dir: Path,
    capsys: pytest.CaptureFixture[str],
    record: Callable[..., Any],
    write_json: Callable[..., str],
    photo: Callable[[str], str],
) -> None:
    (tmp_path / "rocket.jpg").symlink_to(photo("rocket.jpg"))
    dataset = write_json([record("<image>What [red]is[/red] this?", "A rocket.", "More?", "No.", images="rocket.jpg")])
    words = ["data", "show", dataset, "0", "--tokenizer", str(model_dir)]
    assert main([*words, "--cutoff", "390", "--html", str(tmp_path / "page.html")]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "What [red]is[/red] this?" in shown and "<|image_pad|> x 345" in shown and "151655 x 345" in shown
    assert "1 turns are left out at the cutoff" in shown
    assert "644 x 420 pixels, grid 1 x 30 x 46, 345 tokens" in shown
    assert (tmp_path / "page.html").stat().st_size > 100_000
    assert main(["data", "show", dataset, "0"]) == 2
    assert "tokens need a tokenizer: give --tokenizer HF" in capsys.readouterr().err


def test_on_a_terminal_what_is_learnt_is_green_and_nothing_is_left_out(view: Callable[[int], SampleView]) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=60)
    show_sample(terminal, view(1))
    written = terminal.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[1;32mHi.<|im_end|>" in written
    assert "\u2026" not in written, "a long word was cut"
    plain = re.sub(r"\x1b\[[0-9;]*m", "", written)
    assert all(str(token.id) in plain for token in view(1).tokens)


def test_without_a_tokenizer_nothing_is_shown(tmp_path: Path, record: Callable[..., Any], write_json: Callable[..., str]) -> None:
    subject = build_subject(SubjectOptions(dataset=write_json([record("a", "b")])), needs_pixels=True)
    with pytest.raises(ConfigError, match="need a tokenizer"):
        view_sample(subject, 0)
