"""Templates, labels, placeholders and truncation, read back as text with the real tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tangram.config.data import PreprocessParameters
from tangram.config.model import ModelConfig
from tangram.data.choice import cutoff
from tangram.data.conversation import Conversation, Message, Video
from tangram.data.encode import IGNORE, EncodedSample, SampleEncoder
from tangram.data.images import ImageProcessor
from tangram.data.media import Media
from tangram.data.template import get_template
from tangram.data.tokenizer import TURN_END, Tokenizer, load_tokenizer
from tangram.errors import ConfigError, DataError
from tests.data.small_tokenizers import QWEN_TOKENS, Shapes, characters, like_llama

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


def sample(*texts: str, system: str | None = None, images: tuple[str, ...] = (), videos: tuple[str, ...] = ()) -> Conversation:
    messages = tuple(Message(("user", "assistant")[i % 2], text) for i, text in enumerate(texts))  # type: ignore[arg-type]
    return Conversation(0, "data.json, record 0", system, messages, images, tuple(Video((path,)) for path in videos))


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
    message = rf"data\.json, record 0: the first turn takes {needed} tokens \(6 of media\) but the cutoff .* is {needed - 1}"
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


def test_labels_of_a_character_tokenizer() -> None:
    """The exact strings of zhangfaen/finetune-Qwen2-VL#24."""
    own = characters()
    chat = sample("Q1", "A1", "Q2", "A2", system="S")
    make = partial(SampleEncoder, own, get_template("qwen2vl"), None, 1000)
    assert learnt(own, make()(chat)) == "A1<|im_end|>A2<|im_end|>"
    assert learnt(own, make(mask_history=True)(chat)) == "A2<|im_end|>"
    calling = replace(chat, messages=(Message("user", "Q"), Message("function_call", '{"name": "f", "arguments": {}}'), *chat.messages[2:]))
    assert learnt(own, make()(calling)) == '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>A2<|im_end|>'


class TestVideos:
    """Shapes are paths: 3x4x4 has three steps of four cells."""

    def test_qwen2(self, encoder: Make, tokenizer: Tokenizer) -> None:
        encoded = encoder(media=Shapes())(sample("Look: <video>?", "Yes.", videos=("3x4x4",)))
        assert "user\nLook: <|vision_start|>" + "<|video_pad|>" * 12 + "<|vision_end|>?" in tokenizer.decode(encoded.input_ids)
        assert [video.grid for video in encoded.videos] == [(3, 4, 4)] and encoded.video_pixels == ["pixels of 3x4x4"]

    def test_qwen3_has_one_time_and_one_frame_of_tokens_for_each_step(self, encoder: Make, tokenizer: Tokenizer) -> None:
        """As in EvolvingLMMs-Lab/lmms-engine#132."""
        encoded = encoder(media=Shapes(), template=get_template("qwen3_vl_nothink"))(sample("<video>?", "Yes.", videos=("3x4x4",)))
        step = "<|vision_start|>" + "<|video_pad|>" * 4 + "<|vision_end|>"
        # 0.25 s is written 0.2, as Python's format does for transformers too.
        assert f"user\n<0.2 seconds>{step}<1.2 seconds>{step}<2.2 seconds>{step}?<|im_end|>" in tokenizer.decode(encoded.input_ids)

    @pytest.mark.parametrize("before", ["", "Look:", "Look: ", "Look\n", "(1) <<"])
    def test_times_are_tokenised_with_the_text_before_them(self, encoder: Make, tokenizer: Tokenizer, before: str) -> None:
        """transformers' processor writes the times into the text, and then tokenises the whole."""
        encoded = encoder(media=Shapes(), template=get_template("qwen3_vl_nothink"))(sample(before + "<video>", "Yes.", videos=("2x2x2",)))
        steps = "".join(f"<{seconds} seconds><|vision_start|><|video_pad|><|vision_end|>" for seconds in ("0.2", "1.2"))
        assert encoded.input_ids == tokenizer.encode(f"<|im_start|>user\n{before}{steps}<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n")

    def test_times_are_not_learnt(self, tokenizer: Tokenizer) -> None:
        make = partial(SampleEncoder, tokenizer, get_template("qwen3_vl_nothink"), Shapes(), 1000)  # type: ignore[arg-type]
        chat = sample("Q", "See: <video>!", videos=("2x2x2",))
        # The space goes with the "<" of the time: they are one token.
        assert learnt(tokenizer, make()(chat)) == "See:!<|im_end|>"
        assert learnt(tokenizer, make(train_on_prompt=True)(chat)).endswith("<|im_start|>assistant\nSee:!<|im_end|>\n")

    def test_images_and_videos_in_the_order_of_their_placeholders(self, encoder: Make, tokenizer: Tokenizer) -> None:
        chat = sample("<video><image><video>", "a", "<image>", "b", images=("2x2", "2x4"), videos=("1x2x6", "1x2x8"))
        encoded = encoder(media=Shapes())(chat)
        text = re.sub(r"<\|vision_start\|>|<\|vision_end\|>", "", tokenizer.decode(encoded.input_ids))
        assert [len(run) // 13 for run in re.findall(r"(?:<\|image_pad\|>)+|(?:<\|video_pad\|>)+", text)] == [3, 1, 4, 2]
        assert [medium.grid[2] for medium in encoded.images] == [2, 4] and [medium.grid[2] for medium in encoded.videos] == [6, 8]
        first = encoder(media=Shapes(), cutoff=len(encoded.input_ids) - 1)(chat)
        assert (len(first.images), len(first.videos), first.turns_dropped) == (1, 2, 1)
        assert first.image_pixels == ["pixels of 2x2"] and first.video_pixels == ["pixels of 1x2x6", "pixels of 1x2x8"]

    def test_a_model_that_takes_none(self, tokenizer: Tokenizer) -> None:
        encoder = SampleEncoder(characters((*QWEN_TOKENS, "<image>"), eos_token=TURN_END), get_template("llava"), Shapes(), 1000)  # type: ignore[arg-type]
        with pytest.raises(DataError, match="record 0: holds 1 videos but the model has no token for videos; remove the sample"):
            encoder(sample("<video>", "a", videos=("1x2x2",)))


@pytest.mark.compat
@pytest.mark.parametrize("first_only", [True, False])
def test_llava_has_the_ids_of_the_whole_text(first_only: bool) -> None:
    """As in transformers' LlavaProcessor: pictures are expanded in the text, then it is tokenised at once. Parts on their own get other spaces."""
    from transformers import PreTrainedTokenizerFast

    chat = sample("<image>\nWhat is it?", "A cat.", "Is it a\n\ncat<image>?", " é, yes.", images=("4x4", "2x6"))
    texts = [piece.text for turn in get_template("llava").bind({"eos_token": "</s>"}).turns(chat) for piece in turn]
    fast = like_llama(texts, first_only)
    own = Tokenizer(fast, "llama", {"bos_token": "<s>", "eos_token": "</s>"})
    encoded = SampleEncoder(own, get_template("llava"), Shapes(), 1000)(chat)  # type: ignore[arg-type]
    text = "".join(texts).replace("<image>", "<image>" * 4, 1).replace("cat<image>", "cat" + "<image>" * 3)
    assert encoded.input_ids == PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>", eos_token="</s>")(text)["input_ids"]
    assert [fast.id_to_token(label) for label in encoded.labels if label != IGNORE and fast.id_to_token(label) in ("</s>", "▁A", "<image>")] == [
        "▁A",
        "</s>",
        "</s>",
    ]
    said = "".join(fast.id_to_token(label) for label in encoded.labels if label != IGNORE)
    assert said == "▁A▁cat.</s>▁▁é,▁yes.</s>"


def test_llava_plain_learns_the_caption() -> None:
    own = characters((*QWEN_TOKENS, "<image>", "<s>"), bos_token="<s>")
    encoded = SampleEncoder(own, get_template("llava_plain"), Shapes(), 1000)(sample("<image>", "A cat.", images=("4x4",)))  # type: ignore[arg-type]
    assert own.decode(encoded.input_ids) == "<s>" + "<image>" * 4 + "A cat.\n"
    assert learnt(own, encoded) == "A cat.\n"


class TestCutoff:
    def test_samples_that_are_too_long_as_a_whole(self, encoder: Make) -> None:
        chat = sample("Q1", "A1", "<image>Q2", "A2", images=("4x4",))
        length = len(encoder(media=Shapes())(chat).input_ids)
        assert len(encoder(media=Shapes(), cutoff=length, truncation="sample")(chat).input_ids) == length
        message = rf"data\.json, record 0: takes {length} tokens \(4 of media\) but the cutoff \(cutoff_len, else seq_length\) is {length - 1}; raise"
        with pytest.raises(DataError, match=message):
            encoder(media=Shapes(), cutoff=length - 1, truncation="sample")(chat)

    def test_the_smaller_limit_of_data_json(self, make_run: Callable[..., Any], write_json: Callable[..., str], record: Callable[..., Any]) -> None:
        data = write_json([record("Q", "A")])
        assert cutoff(make_run(data)) == 256
        assert cutoff(make_run(data, basic={"cutoff_len": 200})) == 200
        with pytest.raises(ConfigError, match=r"basic_parameters\.cutoff_len 257 is larger than seq_length 256; lower the first or raise the second"):
            cutoff(make_run(data, basic={"cutoff_len": 257}))


def test_placeholders_that_stand_for_nothing(encoder: Make) -> None:
    """The reader of records finds those in messages; what is left are the descriptions of tools."""
    chat = replace(sample("Q", "A"), tools='[{"name": "crop", "description": "Crops <image>"}]')
    with pytest.raises(DataError, match=r"record 0: 1 <image> placeholders in what the template qwen2vl writes but 0 files"):
        encoder()(chat)


class TestSettings:
    def test_special_tokens_as_texts_and_as_objects(self, hf_dir: Path, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").symlink_to((hf_dir / "tokenizer.json").resolve())
        assert Tokenizer.from_folder(tmp_path).special == {}
        settings = {"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>", "lstrip": False}, "bos_token": None}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        assert Tokenizer.from_folder(tmp_path).special == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
        (tmp_path / "tokenizer_config.json").write_text('{"eos_token": 3}')
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json: not a tokenizer's settings"):
            Tokenizer.from_folder(tmp_path)

    def test_the_token_that_fills_rows(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.pad_id == 151643
        assert characters(("<pad>", "</s>"), pad_token="<pad>", eos_token="</s>").pad_id == 100
        assert characters(("</s>",), pad_token="<pad>", eos_token="</s>").pad_id == 100
        with pytest.raises(ConfigError, match=r"the vocabulary has no token '<\|endoftext\|>'"):
            characters(()).pad_id  # noqa: B018

    def test_a_llava_is_told_by_its_image_token(self, model: ModelConfig, tmp_path: Path) -> None:
        like_llama(["a"], True).save(str(tmp_path / "tokenizer.json"))
        llava = model.model_copy(update={"img_context_token_id": 259, "video_token_id": None, "vision_start_token_id": None})
        assert load_tokenizer(tmp_path, llava).id("<image>") == 259
        with pytest.raises(ConfigError, match="'<image>' has id 259 but model.json expects 258"):
            load_tokenizer(tmp_path, llava.model_copy(update={"img_context_token_id": 258}))


def test_known_texts_have_the_published_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(" hello sir. How are you Edward?") == [23811, 27048, 13, 2585, 525, 498, 21891, 30]
    assert tokenizer.encode("杭州是个好地方") == [104130, 104104, 52801, 100371]
