"""What holds for every conversation, template and cutoff, against a renderer of its own, with one token a character."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.data.conversation import Conversation, Message, Video
from tangram.data.encode import IGNORE, EncodedSample, SampleEncoder
from tangram.data.jinja import JinjaTemplate
from tangram.data.template import get_template
from tangram.errors import DataError
from tests.data.small_tokenizers import QWEN_TOKENS, Shapes, characters
from tests.data.test_jinja import CHATML

TOKENIZER = characters((*QWEN_TOKENS, "<image>", "<s>", "</s>"), bos_token="<s>", eos_token="</s>")
QWEN = get_template("qwen2vl").media
TEMPLATES = {name: get_template(name) for name in ("qwen2vl", "qwen3_vl", "qwen3_vl_nothink", "llava")}
TEMPLATES["default"] = replace(get_template("default"), media=QWEN)
JINJA = JinjaTemplate("chat.jinja", CHATML, QWEN)
MEDIA_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_pad|>")
SPECIAL = re.compile("|".join(map(re.escape, (*QWEN_TOKENS, "<s>", "</s>"))))

TEXT = st.text("abc <>|{}1:\n", max_size=6)
SIDES = st.sampled_from([2, 4, 6])
IMAGE = st.builds("{}x{}".format, SIDES, SIDES)
VIDEO = st.builds("{}x{}x{}".format, st.integers(1, 3), SIDES, SIDES)


@st.composite
def conversations(draw: st.DrawFn, videos: bool) -> Conversation:
    """Texts and media in any order, in questions and answers."""
    images: list[str] = []
    films: list[Video] = []

    def content() -> str:
        parts = []
        for kind in draw(st.lists(st.sampled_from(["text", "image", "video"] if videos else ["text", "image"]), max_size=3)):
            if kind == "text":
                parts.append(draw(TEXT))
            elif kind == "image":
                images.append(draw(IMAGE))
                parts.append("<image>")
            else:
                films.append(Video((draw(VIDEO),)))
                parts.append("<video>")
        return "".join(parts)

    messages = tuple(Message(role, content()) for _ in range(draw(st.integers(1, 4))) for role in ("user", "assistant"))  # type: ignore[arg-type]
    return Conversation(7, "data.json, record 7", draw(st.none() | TEXT), messages, tuple(images), tuple(films))


def written(name: str, chat: Conversation) -> Iterator[tuple[str, bool]]:
    """The texts of a conversation as the published formats have them, and whether they are learnt."""
    system = chat.system
    if name == "llava":
        start = (
            "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, and polite answers to "
        )
        yield "<s>" + (start + "the user's questions." if system is None else system) + " ", False
    elif name == "default":
        yield "<s>" + ("" if system is None else f"System: {system}</s>\n"), False
    elif system is not None or name == "qwen2vl":
        yield f"<|im_start|>system\n{'You are a helpful assistant.' if system is None else system}<|im_end|>\n", False
    for question, answer in zip(chat.messages[::2], chat.messages[1::2], strict=True):
        if name == "llava":
            yield f"USER: {question.content} ASSISTANT:", False
            yield f" {answer.content}</s>", True
        elif name == "default":
            yield f"Human: {question.content}</s>\nAssistant:", False
            yield f"{answer.content}</s>", True
            yield "\n", False
        else:
            yield f"<|im_start|>user\n{question.content}<|im_end|>\n<|im_start|>assistant\n", False
            thought = "<think>\n\n</think>\n\n" if name == "qwen3_vl" else ""
            yield f"{thought}{answer.content}<|im_end|>", True
            yield "\n", False


def expanded(name: str, text: str, shapes: dict[str, list[str]]) -> str:
    """The text with the tokens of media; U+0001 stands for a token of LLaVA, which is spelled like its placeholder."""

    def medium(match: re.Match[str]) -> str:
        *steps, height, width = map(int, shapes[match[0]].pop(0).split("x"))
        count = height * width // 4
        if name == "llava":
            return "\x01" * count
        start, end = "<|vision_start|>", "<|vision_end|>"
        if not steps:
            return start + "<|image_pad|>" * count + end
        if not name.startswith("qwen3"):
            return start + "<|video_pad|>" * (count * steps[0]) + end
        return "".join(f"<{step + 0.25:.1f} seconds>{start}{'<|video_pad|>' * count}{end}" for step in range(steps[0]))

    return re.sub("<image>|<video>", medium, text)


def length(text: str) -> int:
    """Tokens of a text: characters, but special tokens count once."""
    return len(SPECIAL.sub("x", text))


def encoder(name: str, cutoff: int, **kwargs: Any) -> SampleEncoder:
    return SampleEncoder(TOKENIZER, TEMPLATES[name], Shapes(), cutoff, **kwargs)  # type: ignore[arg-type]


def first(chat: Conversation, turns: int) -> Conversation:
    """The first turns with their media."""
    messages = chat.messages[: 2 * turns]
    text = (chat.system or "") + "".join(message.content for message in messages)
    return replace(chat, messages=messages, images=chat.images[: text.count("<image>")], videos=chat.videos[: text.count("<video>")])


def shapes_of(chat: Conversation) -> dict[str, list[str]]:
    return {"<image>": list(chat.images), "<video>": [video.paths[0] for video in chat.videos]}


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_texts_labels_and_media(name: str, data: st.DataObject) -> None:
    chat = data.draw(conversations(videos=name != "llava"))
    on_prompt, last_alone = data.draw(st.sampled_from([(False, False), (True, False), (False, True)]))
    encoded = encoder(name, 10000, train_on_prompt=on_prompt, mask_history=last_alone)(chat)
    pieces = list(written(name, chat))
    text = expanded(name, "".join(text for text, _ in pieces), shapes_of(chat))
    assert TOKENIZER.decode(encoded.input_ids) == text.replace("\x01", "<image>")
    assert len(encoded.input_ids) == length(text)
    assert len(encoded.labels) == len(encoded.input_ids)
    assert all(label in (IGNORE, token) for label, token in zip(encoded.labels, encoded.input_ids, strict=True))
    assert not {TOKENIZER.id(token) for token in (*MEDIA_TOKENS, "<image>")} & set(encoded.labels)
    answers = [text for text, learnt in pieces if learnt]
    learnt = [text for text, _ in pieces] if on_prompt else answers[-1:] if last_alone else answers
    assert TOKENIZER.decode([label for label in encoded.labels if label != IGNORE]) == re.sub("<image>|<video>", "", "".join(learnt))
    pads = sum(encoded.input_ids.count(TOKENIZER.id(token)) for token in ("<|image_pad|>", "<|video_pad|>", "<image>"))
    assert pads == sum(map(Shapes().tokens, (*encoded.images, *encoded.videos)))
    assert len(encoded.images) == len(chat.images) and len(encoded.videos) == len(chat.videos)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_cutoff_keeps_the_leading_turns_that_fit(name: str, data: st.DataObject) -> None:
    chat = data.draw(conversations(videos=name != "llava"))
    turns = len(chat.messages) // 2
    lengths = []
    for kept in range(1, turns + 1):
        part = first(chat, kept)
        lengths.append(length(expanded(name, "".join(text for text, _ in written(name, part)), shapes_of(part))))
    cutoff = data.draw(st.sampled_from([near for whole in lengths for near in (whole - 1, whole, whole + 1)]))
    fitting = sum(whole <= cutoff for whole in lengths)

    def all_or_nothing() -> EncodedSample:
        return encoder(name, cutoff, truncation="sample")(chat)

    if fitting < turns:
        with pytest.raises(DataError, match=rf"record 7: takes {lengths[-1]} tokens \(\d+ of media\) but the cutoff .* is {cutoff};"):
            all_or_nothing()
    if fitting == 0:
        with pytest.raises(DataError, match=rf"record 7: the first turn takes {lengths[0]} tokens \(\d+ of media\) but the cutoff .* is {cutoff};"):
            encoder(name, cutoff)(chat)
        return
    encoded = encoder(name, cutoff)(chat)
    assert encoded.turns_dropped == turns - fitting
    assert len(encoded.input_ids) == lengths[fitting - 1]
    assert replace(encoded, turns_dropped=0) == encoder(name, 10000)(first(chat, fitting))
    if fitting == turns:
        assert all_or_nothing() == encoded


@settings(max_examples=25, deadline=None)
@given(chat=conversations(videos=True))
def test_a_jinja_file_gives_the_same_as_the_built_in_template(chat: Conversation) -> None:
    chat = replace(chat, system=chat.system or "S")
    by_file = SampleEncoder(TOKENIZER, JINJA, Shapes(), 10000)(chat)  # type: ignore[arg-type]
    assert by_file == encoder("qwen2vl", 10000)(chat)
