"""``tangram data mock`` makes datasets of the size that is asked for, which training reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tangram.cli.main import main
from tangram.config.run import RunConfig
from tangram.data.build import build_loader
from tangram.data.mock import MockOptions, write_mock
from tangram.errors import ConfigError, DataError
from tangram.families.base import get_family


@pytest.fixture
def make(tmp_path: Path, hf_dir: Path) -> Callable[..., Path]:
    """Write a small mock dataset and return its path."""

    def run(folder: str = "mock", **options: Any) -> Path:
        small = {"num_samples": 3, "num_pics": 2, "pic_width": 90, "pic_height": 60, "text_length": 41}
        given = {"save_dir": str(tmp_path / folder), "tokenizer_path": str(hf_dir), **small, **options}
        return write_mock(MockOptions(**given)).dataset

    return run


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_texts_have_exactly_the_tokens_that_are_asked_for(make: Callable[..., Path], hf_dir: Path) -> None:
    """Counted by transformers."""
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(tokenizer_file=str(hf_dir / "tokenizer.json"))
    for length in (2, 41, 1000):
        for record in json.loads(make(f"text{length}", text_length=length).read_text()):
            question, answer = (message["content"] for message in record["messages"])
            assert question.startswith("<image><image>")
            parts = [question.removeprefix("<image><image>"), answer]
            assert sum(len(reference(part)["input_ids"]) for part in parts) == length
            assert len(reference(answer)["input_ids"]) == max(1, length // 4)


def test_pictures_are_different_and_of_the_size(make: Callable[..., Path]) -> None:
    dataset = make(num_samples=5, num_pics=3)
    assert dataset.name == "mock_data_pic_num_3_textlen_41.json"
    records = json.loads(dataset.read_text())
    paths = [dataset.parent / path for record in records for path in record["images"]]
    assert len(set(paths)) == 15
    pixels = [np.asarray(Image.open(path)).astype(int) for path in paths]
    assert {values.shape for values in pixels} == {(60, 90, 3)}
    nearest = min(np.abs(a - b).mean() for number, a in enumerate(pixels) for b in pixels[:number])
    assert nearest > 5, "two pictures show the same"
    assert len({json.dumps(record["messages"]) for record in records}) == 5


def test_the_seed_makes_the_files(make: Callable[..., Path]) -> None:
    first, same, other = (content(make(name, seed=seed).parent) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    assert first == same
    assert not set(first.values()) & set(other.values())


def test_pictures_are_taken_in_turn_where_many_are_needed(make: Callable[..., Path]) -> None:
    records = json.loads(make(num_samples=40, num_pics=3, pic_width=8, pic_height=8).read_text())
    used = [path for record in records for path in record["images"]]
    assert len(used) == 120 and len(set(used)) == 64
    assert all(len(set(record["images"])) == 3 for record in records)


def test_training_reads_it(make: Callable[..., Path], make_run: Callable[..., RunConfig]) -> None:
    dataset = make()
    run = make_run(str(dataset), basic={"dataset_dir": str(dataset.parent)}, global_batch_size=3)
    (step,) = [next(iter(build_loader(run, get_family("qwen2_5_vl"), 0, 1)))]
    assert len(step) == 3
    for batch in step:
        # 60 x 90 pixels are 2 x 3 cells of 28, each of 4 patches; two pictures.
        assert batch["image_grid_thw"].tolist() == [[1, 4, 6]] * 2 and len(batch["pixel_values"]) == 48
        assert int((batch["labels"] != -100).sum()) == 41 // 4 + 1, "the answer and its end"


def test_text_alone(make: Callable[..., Path]) -> None:
    dataset = make(num_pics=0)
    assert [path.name for path in dataset.parent.iterdir()] == [dataset.name]
    assert all(record["images"] == [] and "<image>" not in record["messages"][0]["content"] for record in json.loads(dataset.read_text()))


def test_an_existing_dataset_is_kept_unless_told(make: Callable[..., Path]) -> None:
    before = content(make().parent)
    with pytest.raises(DataError, match=r"mock_data_pic_num_2_textlen_41.json: exists already; give --overwrite"):
        make(seed=5)
    assert content(make(seed=0, overwrite=True).parent) == before
    assert content(make(seed=5, overwrite=True).parent) != before


def test_a_tokenizer_without_words_is_refused(tmp_path: Path, make: Callable[..., Path]) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    characters = Tokenizer(WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    characters.pre_tokenizer = Split("", "isolated")
    characters.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="everyday English words are one token"):
        make(tokenizer_path=str(tmp_path))


def test_the_command(tmp_path: Path, hf_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data", "mock", "--save_dir", str(tmp_path), "--tokenizer_path", str(hf_dir), "--num_samples", "2", "--num-pics", "1"]
    assert main([*words, "--pic_width", "30", "--pic_height", "20", "--text_length", "9"]) == 0
    assert "2 samples, 1 pictures each, 2 different, 9 tokens of text" in capsys.readouterr().out
    assert main([*words, "--text_length", "1"]) == 2
    assert "--text_length: Input should be greater than or equal to 2, got 1" in capsys.readouterr().err
    assert main([*words, "--pic_width", "3000", "--pic_height", "2"]) == 2
    assert "sides may be to each other as 200 to 1 at most" in capsys.readouterr().err
