"""Templates, labels, placeholders and truncation, read back as text with the real tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tangram.config.data import PreprocessParameters
from tangram.config.model import ModelConfig
from tangram.data.conversation import Conversation, Message
from tangram.data.encode import IGNORE, EncodedSample, SampleEncoder
from tangram.data.images import ImageProcessor
from tangram.data.media import Media
from tangram.data.template import get_template
from tangram.data.tokenizer import Tokenizer, load_tokenizer
from tangram.errors import ConfigError, DataError

SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"


@pytest.fixture
def encoder(hf_dir: Path, tokenizer: Tokenizer, model: ModelConfig) -> Callable[..., SampleEncoder]:
    assert model.image_encoder is not None
    preprocess = PreprocessParameters(model_name_or_path=str(hf_dir), image_min_pixels=0, image_max_pixels=100 * 784)
    images = ImageProcessor.from_config(preprocess, model.image_encoder.vision_encoder)

    def make(cutoff: int = 1000, template: Any = None, **kwargs: Any) -> SampleEncoder:
        return SampleEncoder(tokenizer, template or get_template("qwen2vl"), kwargs.pop("media", Media(images)), cutoff, **kwargs)

    return make


Make = Callable[..., SampleEncoder]


def sample(*texts: str, system: str | None = None, images: tuple[str, ...] = ()) -> Conversation:
    messages = tuple(Message(("user", "assistant")[i % 2], text) for i, text in enumerate(texts))  # type: ignore[arg-type]
    return Conversation(0, "data.json, record 0", system, messages, images)


def learnt(tokenizer: Tokenizer, encoded: EncodedSample) -> str:
    assert len(encoded.labels) == len(encoded.input_ids)
    assert all(label in (IGNORE, token) for label, token in zip(encoded.labels, encoded.input_ids, strict=True))
    return tokenizer.decode([label for label in encoded.labels if label != IGNORE])


@pytest.fixture
def picture(tmp_path: Path) -> str:
    """56 x 84 pixels: six merged cells."""
    path = tmp_path / "picture.png"
    Image.new("RGB", (84, 56), "green").save(path)
    return str(path)


def test_ids_of_the_published_template(encoder: Make, tokenizer: Tokenizer) -> None:
    encoded = encoder()(sample("Hello world", "Hi"))
    assert encoded.input_ids[:14] == [151644, 8948, 198, 2610, 525, 264, 10950, 17847, 13, 151645, 198, 151644, 872, 198]
    assert encoded.input_ids[14:16] == [9707, 1879]
    assert tokenizer.decode(encoded.input_ids) == SYSTEM + "<|im_start|>user\nHello world<|im_end|>\n<|im_start|>assistant\nHi<|im_end|>\n"


def test_only_answers_and_their_end_are_learnt(encoder: Make, tokenizer: Tokenizer) -> None:
    chat = sample("Q1", "A1", "Q2", "A2")
    assert learnt(tokenizer, encoder()(chat)) == "A1<|im_end|>A2<|im_end|>"
    assert learnt(tokenizer, encoder(mask_history=True)(chat)) == "A2<|im_end|>"
    assert learnt(tokenizer, encoder()(sample("Q", ""))) == "<|im_end|>"


def test_training_on_the_prompt_learns_all_but_media(encoder: Make, tokenizer: Tokenizer, picture: str) -> None:
    encoded = encoder(train_on_prompt=True)(sample("<image>\nQ1", "A1", images=(picture,)))
    assert learnt(tokenizer, encoded) == SYSTEM + "<|im_start|>user\n\nQ1<|im_end|>\n<|im_start|>assistant\nA1<|im_end|>\n"
    with pytest.raises(ConfigError, match="train_on_prompt and mask_history exclude each other"):
        encoder(train_on_prompt=True, mask_history=True)


def test_a_system_prompt_of_ones_own(encoder: Make, tokenizer: Tokenizer) -> None:
    text = tokenizer.decode(encoder()(sample("Q1", "A1", "Q2", "A2", system="Be {content} brief.")).input_ids)
    assert text.startswith("<|im_start|>system\nBe {content} brief.<|im_end|>\n<|im_start|>user\nQ1") and text.count("system") == 1


def test_an_answer_is_tokenised_as_the_model_would_write_it(encoder: Make, tokenizer: Tokenizer) -> None:
    """After "assistant\\n" a model that answers "\\nHi" writes those tokens, not one that swallows both line feeds."""
    ids = encoder()(sample("Q", "\nHi")).input_ids
    prompt = tokenizer.encode(SYSTEM + "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n")
    assert ids == prompt + tokenizer.encode("\nHi<|im_end|>") + tokenizer.encode("\n")


def test_a_placeholder_becomes_one_token_per_merged_cell(encoder: Make, tokenizer: Tokenizer, picture: str) -> None:
    encoded = encoder()(sample("<image>\nWhat?", "Green.", images=(picture,)))
    assert "user\n<|vision_start|>" + "<|image_pad|>" * 6 + "<|vision_end|>\nWhat?" in tokenizer.decode(encoded.input_ids)
    assert [image.grid for image in encoded.images] == [(1, 4, 6)]
    assert encoded.image_pixels is not None and encoded.image_pixels[0].shape == (24, 1176)
    media = "<|vision_start|>" + "<|image_pad|>" * 6 + "<|vision_end|>"
    whole = SYSTEM + "<|im_start|>user\n" + media + "\nWhat?<|im_end|>\n<|im_start|>assistant\nGreen.<|im_end|>\n"
    assert encoded.input_ids == tokenizer.encode(whole)


def test_each_placeholder_takes_the_next_picture(encoder: Make, tokenizer: Tokenizer, picture: str, photo: Callable[[str], str]) -> None:
    """Six cells, then 4 x 4 of a photograph of 102 x 102 pixels, twice."""
    encoded = encoder(cutoff=2000)(
        sample("<image>?", "<image>.", "<image>!", "Yes.", images=(picture, photo("microaneurysms.png"), photo("microaneurysms.png")))
    )
    runs = [len(run.replace("<|image_pad|>", "x")) for run in re.findall(r"(?:<\|image_pad\|>)+", tokenizer.decode(encoded.input_ids))]
    assert runs == [6, 16, 16] and [image.grid for image in encoded.images] == [(1, 4, 6), (1, 8, 8), (1, 8, 8)]
    assert [len(patches) for patches in encoded.image_pixels or ()] == [24, 64, 64]


def test_media_tokens_in_an_answer_carry_no_label(encoder: Make, tokenizer: Tokenizer, picture: str) -> None:
    encoded = encoder()(sample("zoom", "zoom <image> ok", images=(picture,)))
    assert encoded.input_ids.count(151655) == 6
    assert learnt(tokenizer, encoded) == "zoom  ok<|im_end|>"
    assert not {151652, 151653, 151655, 151656} & set(encoded.labels)


def test_without_pixels_only_the_headers_are_read(encoder: Make, picture: str, photo: Callable[[str], str], tmp_path: Path) -> None:
    half = tmp_path / "half.jpg"
    half.write_bytes(Path(photo("rocket.jpg")).read_bytes()[:40000])
    chat = sample("<image>", "a", images=(str(half),))
    encoded = encoder(needs_pixels=False)(chat)
    assert encoded.image_pixels is None
    assert encoded.images == encoder(needs_pixels=False)(sample("<image>", "a", images=(photo("rocket.jpg"),))).images
    with pytest.raises(DataError, match=r"half\.jpg: cannot decode.*data\.json, record 0"):
        encoder()(chat)


def test_whole_turns_are_dropped_from_the_end_with_their_images(encoder: Make, tokenizer: Tokenizer, picture: str) -> None:
    chat = sample("<image>Q1", "A1", "<image>Q2", "A2", "Q3", "A3", images=(picture, picture))
    whole, one_turn = encoder()(chat), encoder()(sample("<image>Q1", "A1", images=(picture,)))
    exact = encoder(cutoff=len(whole.input_ids))(chat)
    assert exact.input_ids == whole.input_ids and exact.turns_dropped == 0
    got = encoder(cutoff=len(one_turn.input_ids) + 3)(chat)
    assert got.input_ids == one_turn.input_ids and got.labels == one_turn.labels
    assert len(got.images) == len(got.image_pixels or []) == 1
    assert got.turns_dropped == 2
    masked = encoder(cutoff=len(one_turn.input_ids) + 3, mask_history=True)(chat)
    assert learnt(tokenizer, masked) == "A1<|im_end|>"


def test_a_first_turn_that_does_not_fit_is_an_error_with_the_numbers(encoder: Make, picture: str) -> None:
    needed = len(encoder()(sample("<image>Q", "A", images=(picture,))).input_ids)
    message = rf"data\.json, record 0: the first turn takes {needed} tokens \(6 of media\) but the cutoff \(cutoff_len, else seq_length\) is {needed - 1}"
    with pytest.raises(DataError, match=message):
        encoder(cutoff=needed - 1)(sample("<image>Q", "A", "Q2", "A2", images=(picture,)))


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|vision_start|>", "<|video_pad|>"])
def test_media_tokens_written_out_are_an_error(encoder: Make, token: str) -> None:
    with pytest.raises(DataError, match=r"data\.json, record 0: the text holds the media token '<\|"):
        encoder()(sample(f"look {token}", "a"))


def test_a_sample_that_teaches_nothing_is_an_error(encoder: Make) -> None:
    class NoAnswers(type(get_template("qwen2vl"))):  # type: ignore[misc]
        def turns(self, conversation: Conversation) -> Any:
            return [[replace(piece, answer=False) for piece in turn] for turn in super().turns(conversation)]

    template = get_template("qwen2vl")
    silent = NoAnswers(**{name: getattr(template, name) for name in template.__dataclass_fields__})
    with pytest.raises(DataError, match=r"data\.json, record 0: 0 supervised tokens"):
        encoder(template=silent)(sample("Q", "A"))


def test_images_for_a_model_without_eyes_are_an_error(encoder: Make, picture: str) -> None:
    with pytest.raises(DataError, match="holds 1 images but the model has no image_encoder"):
        encoder(media=None)(sample("<image>", "a", images=(picture,)))


def test_unknown_templates_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown template 'qwen2_vl' \(did you mean 'qwen2vl'\?\); known: default, llava"):
        get_template("qwen2_vl")


def test_special_ids_are_compared_with_the_model(hf_dir: Path, model: ModelConfig, tmp_path: Path) -> None:
    assert load_tokenizer(hf_dir, model).id("<|endoftext|>") == 151643
    with pytest.raises(ConfigError, match=r"'<\|image_pad\|>' has id 151655 but model.json expects 5"):
        load_tokenizer(hf_dir, model.model_copy(update={"img_context_token_id": 5}))
    small = model.model_copy(update={"text_decoder": model.text_decoder.model_copy(update={"vocab_size": 151000})})
    with pytest.raises(ConfigError, match="ids reach 151668 but model.json's vocab_size is 151000"):
        load_tokenizer(hf_dir, small)
    with pytest.raises(ConfigError, match=r"tokenizer\.json: no such file"):
        load_tokenizer(tmp_path, model)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not a tokenizer file"):
        load_tokenizer(tmp_path, model)


def test_known_texts_have_the_published_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(" hello sir. How are you Edward?") == [23811, 27048, 13, 2585, 525, 498, 21891, 30]
    assert tokenizer.encode("杭州是个好地方") == [104130, 104104, 52801, 100371]
