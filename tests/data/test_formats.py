"""Records of every format become the same conversations, and what is wrong with one is said with file, record and numbers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tangram.config.data import DatasetAttr
from tangram.data.conversation import Conversation, Message, Video
from tangram.data.dataset import ConversationDataset
from tangram.errors import DataError

Write = Callable[..., str]
Record = Callable[..., dict[str, Any]]


@pytest.fixture
def read(write_json: Write) -> Callable[..., list[Conversation]]:
    """``read(record, ..., media_dir=".", **attr)``: the conversations of a file of these records."""

    def conversations(*records: Any, media_dir: str = ".", **attr: Any) -> list[Conversation]:
        return list(ConversationDataset.of_files([write_json(list(records))], DatasetAttr(**attr), media_dir))

    return conversations


Read = Callable[..., list[Conversation]]
QUESTION, ANSWER = Message("user", "q"), Message("assistant", "a")


def turns(role: str, content: str, *pairs: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{role: word, content: text} for word, text in pairs]


# Detection


def test_the_public_llava_file_needs_no_attr(read: Read) -> None:
    """Columns and tags of LLaVA-Instruct-150K; text-only records of its successors have no image at all."""
    talk = turns("from", "value", ("human", "<image>\nWhat?"), ("gpt", "A bus."))
    first, second = read(
        {"id": "000000033471", "image": "000000033471.jpg", "conversations": talk},
        {"id": "text", "conversations": turns("from", "value", ("human", "q"), ("gpt", "a"))},
        media_dir="/coco",
    )
    assert first.messages == (Message("user", "<image>\nWhat?"), Message("assistant", "A bus."))
    assert first.images == ("/coco/000000033471.jpg",)
    assert (second.messages, second.images) == ((QUESTION, ANSWER), ())


@pytest.mark.parametrize("column", ["messages", "conversations"])
@pytest.mark.parametrize(("role", "content"), [("role", "content"), ("from", "value")])
@pytest.mark.parametrize(("user", "assistant"), [("user", "assistant"), ("human", "gpt")])
def test_column_tags_and_roles_are_seen_each_for_itself(read: Read, column: str, role: str, content: str, user: str, assistant: str) -> None:
    (sample,) = read({column: turns(role, content, (user, "q"), (assistant, "a"))})
    assert sample.messages == (QUESTION, ANSWER)


def test_what_attr_names_wins_over_what_the_record_shows(read: Read) -> None:
    record = {
        "messages": turns("role", "content", ("user", "wrong"), ("assistant", "wrong")),
        "talk": turns("speaker", "content", ("Q", "q"), ("gpt", "a")),
        "image": "no.png",
        "picture": [],
    }
    (sample,) = read(record, messages="talk", role_tag="speaker", user_tag="Q", assistant_tag="gpt", images="picture")
    assert sample.messages == (QUESTION, ANSWER) and sample.images == ()


def test_the_first_record_that_shows_anything_counts(write_json: Write, record: Record) -> None:
    """A faulty first record is one fault, not the end of the file."""
    path = write_json([{"messages": []}, 3, {"conversations": turns("from", "value", ("human", "q"), ("gpt", "a"))}])
    faults = list(ConversationDataset.of_files([path], DatasetAttr()).faults())
    assert [index for index, _ in faults] == [0, 1]
    assert "data.json, record 0: 'conversations' must be a list of messages, got None; its columns are 'messages'" in str(faults[0][1])
    assert "data.json, record 1: a int; every record must be an object" in str(faults[1][1])
    other = [{"conversations": turns("from", "value", *((who, "s") for who in words))} for words in (["system"], ["human", "gpt"])]
    assert [index for index, _ in ConversationDataset.of_files([write_json(other)], DatasetAttr()).faults()] == [0], "'from' goes with 'human'"


@pytest.mark.parametrize(
    ("record", "attr", "message"),
    [
        ({"id": 1, "text": "t"}, {}, "no list of messages in 'messages' or 'conversations'; its columns are 'id', 'text'; data.json's attr.messages"),
        ({"messages": "hello"}, {}, "'messages' is 'hello'; it must hold messages with 'role', 'from' and 'content', 'value'"),
        ({"instruction": "i", "output": "o"}, {}, "for 'instruction' and 'output' set data.json's attr.formatting to 'alpaca'"),
        ({"data": [{"messages": []}]}, {}, "its columns are 'data'; save the list under 'data' alone"),
        ({"messages": turns("role", "content", ("user", "q"))}, {"messages": "talk"}, "no list of messages in 'talk'; its columns are 'messages'"),
        ({}, {}, "its columns are none"),
        ({"prompt": "p"}, {"formatting": "alpaca"}, "no columns 'instruction' and 'output'; its columns are 'prompt'; name them in attr.prompt"),
    ],
)
def test_a_file_that_shows_nothing_lists_its_columns(read: Read, record: Any, attr: Any, message: str) -> None:
    with pytest.raises(DataError) as error:
        read(record, **attr)
    assert message in str(error.value) and "data.json, record 0: " in str(error.value)


def test_the_log_says_once_what_was_found(tmp_path: Path, write_json: Write, record: Record, caplog: pytest.LogCaptureFixture) -> None:
    other = {"conversations": turns("from", "value", ("human", "q"), ("gpt", "a"))}
    paths = [write_json([record("q", "a")], "a.json"), write_json([record("q", "a")], "b.json"), write_json([other], "c.json")]
    with caplog.at_level(logging.INFO, "tangram"):
        ConversationDataset.of_files(paths, DatasetAttr())
    assert [line.partition(": ")[2] for line in caplog.messages] == [
        "sharegpt, messages in 'messages' with 'role' and 'content', roles 'user' and 'assistant'",
        "sharegpt, messages in 'conversations' with 'from' and 'value', roles 'human' and 'gpt'",
    ]


# Sharegpt


def test_tools_and_their_answers_take_turns(read: Read) -> None:
    pairs = [("human", "Weather?"), ("function_call", '{"name": "w", "arguments": {}}'), ("observation", "rain"), ("gpt", "Rain.")]
    record = {"conversations": turns("from", "value", ("system", "S"), *pairs), "tools": '[{"name": "w"}]'}
    (sample,) = read(record, tools="tools")
    assert [message.role for message in sample.messages] == ["user", "function_call", "observation", "assistant"]
    assert (sample.system, sample.tools) == ("S", '[{"name": "w"}]')
    (sample,) = read(record)
    assert sample.tools is None


def test_roles_of_tools_under_names_of_ones_own(read: Read) -> None:
    pairs = [("human", "Weather?"), ("calls", '{"name": "w", "arguments": {}}'), ("result", "rain"), ("gpt", "Rain.")]
    (sample,) = read({"conversations": turns("from", "value", *pairs)}, observation_tag="result", function_tag="calls")
    assert [message.role for message in sample.messages] == ["user", "function_call", "observation", "assistant"]


@pytest.mark.parametrize(("value", "want"), [(None, None), ("", None), ([], None), ([{"name": "é"}], '[{"name": "é"}]')])
def test_tools_may_be_a_list(read: Read, record: Record, value: Any, want: str | None) -> None:
    assert read(record("q", "a", tools=value), tools="tools")[0].tools == want


@pytest.mark.parametrize("value", ["{}", "no json", [1], 3, {"name": "w"}, "[1]"])
def test_tools_of_another_kind_are_an_error(read: Read, record: Record, value: Any) -> None:
    with pytest.raises(DataError, match="data.json, record 0: 'tools' must be a JSON list of tools, got"):
        read(record("q", "a", tools=value), tools="tools")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([("assistant", "a")], "message 0: role 'assistant' where 'user' must stand"),
        ([("user", "q"), ("user", "q")], "message 1: role 'user' where 'assistant' must stand; 'user' and 'assistant' take turns"),
        ([("user", "q"), ("observation", "o")], "message 1: role 'observation' where 'assistant' must stand"),
        ([("function_call", "c"), ("assistant", "a")], "message 0: role 'function_call' where 'user' must stand"),
        ([("user", "q"), ("assistant", "a"), ("user", "q")], "3 messages; a conversation ends with an answer of 'assistant'"),
        ([("user", "q"), ("asistant", "a")], "role 'asistant' is none of 'user', 'assistant', 'observation', 'function_call', 'system' (did you"),
        ([("user", "q"), ("system", "s")], "message 1: role 'system' where 'assistant' must stand"),
        ([("system", "s"), ("system", "s")], "message 1: role 'system' where 'user' must stand"),
        ([("system", "s")], "0 messages"),
        ([("user", 3), ("assistant", "a")], "message 0: needs the strings 'role' and 'content'"),
        ([("user", "q"), ("assistant", None)], "message 1: needs the strings 'role' and 'content'"),
        ([("user", ["q"]), ("assistant", "a")], "contents that are lists of parts need attr.formatting 'openai'"),
        ([("user", "q"), ("assistant", "")], "answer 0 of 1 is empty and teaches nothing"),
        ([("user", "q"), ("assistant", "a"), ("user", "q"), ("assistant", " \n")], "answer 1 of 2 is empty and teaches nothing"),
    ],
)
def test_roles_take_turns_and_answers_hold_text(read: Read, messages: list[tuple[str, Any]], message: str) -> None:
    with pytest.raises(DataError) as error:
        read({"messages": turns("role", "content", *messages)})
    assert "data.json, record 0" in str(error.value) and message in str(error.value)


@pytest.mark.parametrize(("key", "value"), [("weight", 0), ("loss", False)])
def test_answers_taken_out_of_the_loss_are_refused(read: Read, record: Record, key: str, value: Any) -> None:
    sample = record("q", "a")
    sample["messages"][1][key] = 1
    assert len(read(sample)) == 1
    sample["messages"][1][key] = value
    with pytest.raises(DataError, match=f"record 0, message 1: {key} {value}, but all answers are learnt"):
        read(sample)


def test_system_prompts_come_from_a_message_or_a_column(read: Read, record: Record) -> None:
    pair = record("q", "a")["messages"]
    first = {"role": "system", "content": "S"}
    samples = read({"messages": [first, *pair]}, {"messages": pair, "prompt": "T"}, {"messages": pair}, system="prompt")
    assert [sample.system for sample in samples] == ["S", "T", None]
    with pytest.raises(DataError, match="both in column 'prompt' and as first message"):
        read({"messages": [first, *pair], "prompt": "T"}, system="prompt")
    with pytest.raises(DataError, match="record 0: 'prompt' must be a string, got 3"):
        read({"messages": pair, "prompt": 3}, system="prompt")
    with pytest.raises(DataError, match="message 0: role 'system' is none of 'user', 'assistant'"):
        read({"messages": [first, *pair]}, system_tag=None)


# Media


def test_images_missing_null_and_empty_mean_text_only(read: Read, record: Record) -> None:
    samples = read(record("q", "a"), record("q", "a", images=None), record("q", "a", images=[]), record("q", "a", videos=[]))
    assert [(s.messages, s.images, s.videos) for s in samples] == [((QUESTION, ANSWER), (), ())] * 4


def test_a_string_is_one_image(read: Read, record: Record) -> None:
    """Its length of 5 is not taken for five images."""
    structs = [{"bytes": None, "path": "a.jpg"}]
    for images in ("a.jpg", ["a.jpg"], structs, structs[0]):
        assert read(record("<image>\nhi", "ok", images=images), media_dir="/m")[0].images == ("/m/a.jpg",), images


@pytest.mark.parametrize(
    ("value", "message"),
    [
        *((value, "'images' must be a path or a list of paths, got") for value in (3, {"a": 1}, ["a", 3], [""], "", [["a"]], {"path": None}, 0)),
        ("https://a.org/b.png", "'images' is 'https://a.org/b.png', no file; save it"),
        (["data:image/png;base64,AAAA"], "no file; save it"),
        ([{"bytes": "AAAA", "path": "a.png"}], "'images' holds the file's bytes; save it as a file"),
    ],
)
def test_images_of_another_kind_are_an_error(read: Read, record: Record, value: Any, message: str) -> None:
    with pytest.raises(DataError) as error:
        read(record("<image>", "a", images=value))
    assert "data.json, record 0: " in str(error.value) and message in str(error.value)


@pytest.mark.parametrize("kind", ["image", "video"])
def test_placeholders_and_media_must_agree(write_json: Write, record: Record, kind: str) -> None:
    """Of three records the first is fine, and the two others are named with both numbers."""
    column = {f"{kind}s": ["a.bin"]}
    records = [record(f"<{kind}> q", "a", **column), record("q", "a", **column), record(f"<{kind}> q", f"<{kind}>a")]
    faults = dict(ConversationDataset.of_files([write_json(records)], DatasetAttr()).faults(files=False))
    assert sorted(faults) == [1, 2]
    assert f"data.json, record 1: 0 <{kind}> placeholders but 1 {kind}s; each {kind} needs one placeholder" in str(faults[1])
    assert f"data.json, record 2: 2 <{kind}> placeholders but 0 {kind}s" in str(faults[2])


@pytest.mark.parametrize("column", ["audio", "audios"])
def test_sound_is_refused(read: Read, record: Record, column: str) -> None:
    assert len(read(record("q", "a", **{column: []}))) == 1
    with pytest.raises(DataError, match=f"record 0: column '{column}' is not empty; audio is not supported"):
        read(record("q", "a", **{column: ["a.wav"]}))
    with pytest.raises(DataError, match="record 0: holds the placeholder <audio>; audio is not supported"):
        read(record("<audio>Who?", "I."))


def test_videos_are_files_or_frames(read: Read, record: Record) -> None:
    file, frames = Video(("/m/a.mp4",)), Video(("/m/1.png", "/m/2.png"), is_frames=True)
    cases: list[tuple[Any, tuple[Video, ...]]] = [
        ("a.mp4", (file,)),
        (["a.mp4"], (file,)),
        (["a.mp4", "a.mp4"], (file, file)),
        ([["1.png", "2.png"]], (frames,)),
        ([["1.png", "2.png"], "a.mp4"], (frames, file)),
        ([{"frames": ["1.png", "2.png"], "sample_fps": 1}], (Video(frames.paths, is_frames=True, sample_fps=1.0),)),
        ({"frames": ["1.png", "2.png"]}, (frames,)),
    ]
    for value, want in cases:
        for column in ("videos", "video"):
            assert read(record("<video>" * len(want), "a", **{column: value}), media_dir="/m")[0].videos == want, value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "'videos' must be a path or a list of paths, got 3"),
        ([[]], "'videos' is a video of 0 frames"),
        ([{"frames": []}], "'videos' is a video of 0 frames"),
        ([{"frames": ["a"], "sample_fps": 0}], "'videos' has sample_fps 0; it must be a number above 0"),
        ([{"frames": ["a"], "sample_fps": "1"}], "has sample_fps '1'; it must be"),
        ([{"frames": ["a"], "sample_fps": True}], "has sample_fps True; it must be"),
        ([{"frames": "a.mp4", "sample_fps": 1.0}], "gives sample_fps to a video file"),
        ([{"frames": ["a"], "fps": 1.0}], "has the key 'fps', which is not supported"),
        ([["a", 3]], "'videos' must be a path or a list of paths, got 3"),
    ],
)
def test_videos_of_another_kind_are_an_error(read: Read, record: Record, value: Any, message: str) -> None:
    with pytest.raises(DataError) as error:
        read(record("<video>", "a", videos=value))
    assert "data.json, record 0: " in str(error.value) and message in str(error.value)


# Alpaca


def test_alpaca_columns(read: Read) -> None:
    """Prompt and query are joined by a line feed, as in LLaMA-Factory."""
    record = {"instruction": "Say", "input": "hi <image>", "output": "Hi.", "system": "S", "past": [["q", "a"]], "image": "a.png"}
    (sample,) = read(record, formatting="alpaca", history="past", system="system")
    assert sample.messages == (QUESTION, ANSWER, Message("user", "Say\nhi <image>"), Message("assistant", "Hi."))
    assert (sample.system, sample.images) == ("S", ("a.png",))
    (sample,) = read({**record, "input": None}, formatting="alpaca", images=None)
    assert sample.messages == (Message("user", "Say"), Message("assistant", "Hi."))
    (sample,) = read({"q": "Say", "more": "", "a": "Hi."}, formatting="alpaca", prompt="q", query="more", response="a")
    assert sample.messages == (Message("user", "Say"), Message("assistant", "Hi."))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output": None}, "no text in column 'output'; its columns are 'instruction', 'input', 'output', 'past'"),
        ({"output": ""}, "answer 1 of 2 is empty"),
        ({"output": ["a", "b"]}, "'output' must be a string, got ['a', 'b']"),
        ({"instruction": "", "input": ""}, "columns 'instruction' and 'input' hold no question"),
        ({"input": 3}, "'input' must be a string, got 3"),
        ({"past": "q"}, "'past' must be a list of questions and answers, got 'q'"),
        ({"past": [["q"]]}, "'past' must hold pairs of a question and an answer, got ['q']"),
        ({"past": [["q", ""]]}, "answer 0 of 2 is empty"),
    ],
)
def test_alpaca_records_that_cannot_be_used(write_json: Write, change: dict[str, Any], message: str) -> None:
    good = {"instruction": "Say", "input": "hi", "output": "Hi.", "past": [["q", "a"]]}
    data = ConversationDataset.of_files([write_json([good, {**good, **change}])], DatasetAttr(formatting="alpaca", history="past"))
    assert len(data[0].messages) == 4
    with pytest.raises(DataError) as error:
        data[1]
    assert "data.json, record 1: " in str(error.value) and message in str(error.value)


# OpenAI


def test_openai_parts_become_placeholders_in_order(read: Read) -> None:
    content = [
        {"type": "text", "text": "Compare "},
        {"type": "image", "image": "a.png"},
        {"type": "text", "text": " with "},
        {"type": "image_url", "image_url": {"url": "file:///b.png"}},
        {"type": "video", "video": ["1.png", "2.png"], "sample_fps": 2.0},
        {"type": "video_url", "video_url": "c.mp4"},
    ]
    messages = turns("role", "content", ("system", "S"), ("user", content), ("assistant", [{"type": "text", "text": "Same."}]))
    (sample,) = read({"messages": messages}, formatting="openai", media_dir="/m")
    assert sample.messages == (Message("user", "Compare <image> with <image><video><video>"), Message("assistant", "Same."))
    assert sample.images == ("/m/a.png", "/b.png") and sample.system == "S"
    assert sample.videos == (Video(("/m/1.png", "/m/2.png"), is_frames=True, sample_fps=2.0), Video(("/m/c.mp4",)))


def test_openai_parts_without_a_path_take_the_images_of_the_column(read: Read) -> None:
    messages = turns("role", "content", ("user", [{"type": "image"}, {"type": "text", "text": "q"}]), ("assistant", "a"))
    (sample,) = read({"messages": messages, "images": ["a.png"]}, formatting="openai")
    assert sample.messages[0].content == "<image>q" and sample.images == ("a.png",)
    with pytest.raises(DataError, match="record 0: 1 <image> placeholders but 0 images"):
        read({"messages": messages}, formatting="openai")
    messages[0]["content"][0]["image"] = "b.png"
    with pytest.raises(DataError, match="record 0: 1 files in the messages and 1 in column 'images'; list them in one place"):
        read({"messages": messages, "images": ["a.png"]}, formatting="openai")


def test_openai_tool_calls_become_json(read: Read) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Köln"}'}}
    other = {"id": "2", "type": "function", "function": {"name": "time", "arguments": {}}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "1"},
        {"role": "assistant", "content": "", "tool_calls": [call, other], "reasoning_content": "Once more."},
        {"role": "tool", "content": "rain, noon"},
        {"role": "assistant", "content": "Rain.", "tool_calls": None, "reasoning_content": "\nClear.\n"},
    ]
    (sample,) = read({"messages": messages, "tools": [{"name": "weather"}]}, formatting="openai")
    assert [message.role for message in sample.messages] == ["user", "function_call", "observation", "function_call", "observation", "assistant"]
    weather = {"name": "weather", "arguments": {"town": "Köln"}}
    assert sample.messages[1].content == '{"name": "weather", "arguments": {"town": "Köln"}}'
    thought, _, calls = sample.messages[3].content.partition("\n</think>\n\n")
    assert thought == "<think>\nOnce more." and json.loads(calls) == [weather, {"name": "time", "arguments": {}}]
    assert sample.messages[5].content == "<think>\nClear.\n</think>\n\nRain."
    assert sample.tools == '[{"name": "weather"}]'


CALL = {"function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": 3}, "message 1: the content must be a string or a list of parts, got 3"),
        ({"content": None}, "message 1: the content must be a string or a list of parts, got None"),
        ({"content": [{"type": "input_audio"}]}, "message 1, part 0: a part must be a text, image, image_url, video or video_url"),
        ({"content": [{"type": "text", "text": 3}]}, "message 1, part 0: a part must be"),
        ({"content": [{"type": "image", "image": "a", "max_pixels": 9}]}, "part 0: key 'max_pixels' of a part of type 'image' is not supported"),
        ({"content": [{"type": "image", "image": "a", "path": "a"}]}, "part 0: 2 of the keys image, path, url are given"),
        ({"content": [{"type": "image_url", "image_url": {"url": "https://a.org/b"}}]}, "image_url is 'https://a.org/b', no file"),
        ({"content": []}, "answer 0 of 1 is empty"),
        ({"content": "text", "tool_calls": [CALL]}, "message 1: holds both tool_calls and a text, 'text', which would be lost"),
        ({"tool_calls": [{"function": {"arguments": "{}"}}]}, "message 1: a tool call needs a function with a name"),
        ({"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "message 1: the arguments of 'f' must be a JSON object, got '{'"),
        ({"tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}, "the arguments of 'f' must be a JSON object, got [1]"),
        ({"tool_calls": "f()"}, "message 1: 'tool_calls' must be a list, got 'f()'"),
        ({"role": "user", "tool_calls": [CALL]}, "message 1: role 'user' where 'assistant' must stand"),
        ({"content": "a", "reasoning_content": 3}, "message 1: 'reasoning_content' must be a string, got 3"),
    ],
)
def test_openai_messages_that_cannot_be_used(read: Read, message: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError) as error:
        read({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", **message}]}, formatting="openai")
    assert "data.json, record 0" in str(error.value) and text in str(error.value)


def test_tool_calls_in_sharegpt_are_not_dropped(read: Read, record: Record) -> None:
    sample = record("q", "a")
    sample["messages"][1]["tool_calls"] = [CALL]
    with pytest.raises(DataError, match="message 1: 'tool_calls' are read with attr.formatting 'openai' alone"):
        read(sample)
