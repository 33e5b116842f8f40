"""Chat templates as Jinja files, in the form that Hugging Face models carry them.

A file is rendered with what transformers gives it: ``messages``, ``tools``, ``documents``, ``add_generation_prompt``, ``enable_thinking``, the
tokenizer's special tokens, ``raise_exception`` and its ``tojson``. Time and chance are not given (``strftime_now``, ``random``, ``lipsum``): a
sample must be the same in every run. Whether the text of messages goes in as strings or as lists of parts is tried out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tangram.data.conversation import IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER, Conversation, Message
from tangram.data.template import PLACEHOLDER, MediaTokens, Piece
from tangram.data.tools import THOUGHT_END, read_calls, read_tools
from tangram.errors import ConfigError, DataError

if TYPE_CHECKING:
    from jinja2 import Template as Compiled

ANSWER_START, ANSWER_END = "\ufdd0", "\ufdd1"
"""Stand in the rendered text where a generation block begins and ends. Unicode keeps these two for such inner use: no text holds them."""
PART_TYPES = {IMAGE_PLACEHOLDER: "image", VIDEO_PLACEHOLDER: "video"}
FORMS: tuple[frozenset[str], ...] = (frozenset({"system", "user", "assistant", "tool"}), frozenset({"user"}), frozenset())
"""Roles whose content goes in as a list of parts, in the order in which they are tried."""


@dataclass(frozen=True)
class JinjaTemplate:
    """A chat template in a Jinja file.

    Learnt is what stands in ``{% generation %}`` blocks, one for each answer. In a file without such blocks it is what rendering the messages up
    to an answer adds to rendering those before it with ``add_generation_prompt``, without white space at its end.

    Args:
        path: the file, for messages.
        source: its content.
        media: the model's; the file writes them once for each image or video, with what stands around them.
        special: the tokenizer's special tokens by name.
    """

    path: str
    source: str
    media: MediaTokens
    enable_thinking: bool = True
    special: Mapping[str, str] = field(default_factory=dict)

    begins_with_bos = False
    """A file writes ``bos_token`` itself."""

    @classmethod
    def from_file(cls, path: str, media: MediaTokens, *, enable_thinking: bool = True) -> JinjaTemplate:
        """Read a file.

        Raises:
            ConfigError: it is missing, not UTF-8, or not Jinja (with the line).
        """
        from jinja2 import TemplateSyntaxError

        try:
            source = Path(path).read_text(encoding="utf-8-sig")
            _compile(source)
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such file; basic_parameters.chat_template names a Jinja file") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot read this chat template ({error})") from None
        except TemplateSyntaxError as error:
            raise ConfigError(f"{path}: line {error.lineno}: not a Jinja template: {error.message}") from None
        return cls(path, source, media, enable_thinking)

    @property
    def name(self) -> str:
        """The file, for messages."""
        return self.path

    def bind(self, special: Mapping[str, str]) -> JinjaTemplate:
        """See ``ChatTemplate``; a token that the tokenizer lacks is undefined, as in transformers."""
        return replace(self, special=dict(special))

    def turns(self, conversation: Conversation) -> list[list[Piece]]:
        """See ``ChatTemplate``.

        Raises:
            DataError: rendering fails, parts of the conversation are missing or in another order in what it gives, or answers cannot be told from
                prompts.
        """
        self._check_texts(conversation)
        text = self._render(conversation, len(conversation.messages))
        self._check_order(conversation, text)
        if ANSWER_START in text:
            return self._marked(conversation, text)
        return list(self._incremental(conversation))

    def _marked(self, conversation: Conversation, text: str) -> list[list[Piece]]:
        """Turns of a text with generation blocks. What follows a block belongs to the next turn, after the last block to the last."""
        pieces = re.split(f"[{ANSWER_START}{ANSWER_END}]", text)
        answers = len(conversation.messages) // 2
        marks = re.sub(f"[^{ANSWER_START}{ANSWER_END}]", "", text)
        if marks != (ANSWER_START + ANSWER_END) * answers:
            raise self._fault(
                conversation,
                f"{marks.count(ANSWER_START)} generation blocks for {answers} answers; put one {{% generation %}} block around each answer",
            )
        turns = [[Piece(before), Piece(said, answer=True)] for before, said in zip(pieces[:-1:2], pieces[1::2], strict=True)]
        turns[-1].append(Piece(pieces[-1]))
        return turns

    def _incremental(self, conversation: Conversation) -> Iterator[list[Piece]]:
        done = ""
        for number in range(0, len(conversation.messages), 2):
            prompt = self._render(conversation, number + 1, add_generation_prompt=True)
            whole = self._render(conversation, number + 2)
            for shorter, longer, count in ((done, prompt, number), (prompt, whole, number + 1)):
                if not longer.startswith(shorter):
                    raise self._fault(
                        conversation,
                        f"0 supervised tokens: what it writes for {count + 1} messages does not begin with what it writes for {count}, so answers "
                        "cannot be told from prompts; put {% generation %} and {% endgeneration %} around the answers in the file",
                    )
            # What follows the token that ends the turn, mostly a line feed, is not learnt.
            end = len(whole.rstrip())
            content = conversation.messages[number + 1].content
            if end < len(prompt) or (content[-1:].isspace() and whole.endswith(content)):
                end = len(whole)
            yield [Piece(prompt[len(done) :]), Piece(whole[len(prompt) : end], answer=True), Piece(whole[end:])]
            done = whole

    def _render(self, conversation: Conversation, count: int, *, add_generation_prompt: bool = False) -> str:
        """The text of the first ``count`` messages, with placeholders for media."""
        messages = ([] if conversation.system is None else [("system", conversation.system)]) + [*map(_role_and_text, conversation.messages[:count])]
        given = _Given(self.source, self.enable_thinking, tuple(sorted(self.special.items())))
        try:
            text = given.render(
                [_message(role, text, given.form, conversation.where) for role, text in messages],
                read_tools(conversation) or None,
                add_generation_prompt,
            )
        except DataError:
            raise
        except Exception as error:  # a template may do whatever Python's operators can
            raise self._fault(conversation, f"cannot be rendered: {' '.join(str(error).split()) or type(error).__name__}") from None
        for placeholder, token in ((IMAGE_PLACEHOLDER, self.media.image), (VIDEO_PLACEHOLDER, self.media.video)):
            if token is not None:
                text = text.replace(self.media.start + token + self.media.end, placeholder)
        return text

    def _check_texts(self, conversation: Conversation) -> None:
        """Texts may hold neither what marks answers here nor what stands for media in the rendered text."""
        for text in (conversation.system or "", conversation.tools or "", *(message.content for message in conversation.messages)):
            for mark in (ANSWER_START, ANSWER_END):
                if mark in text:
                    raise DataError(f"{conversation.where}: holds the character U+{ord(mark):04X}, which is no character of a text; remove it")
            for token in self.media.all:
                if token in text and token not in PART_TYPES:
                    raise DataError(
                        f"{conversation.where}: the text holds the media token {token!r} written out; "
                        f"write {IMAGE_PLACEHOLDER} or {VIDEO_PLACEHOLDER} and list the file"
                    )

    def _check_order(self, conversation: Conversation, text: str) -> None:
        """Every part of the conversation stands in the rendered text, in order. Earlier thoughts may be left out, as many templates do."""
        plain, place = text.replace(ANSWER_START, "").replace(ANSWER_END, ""), 0
        for role, part in _parts(conversation):
            found = plain.find(part, place)
            if found < 0:
                raise self._fault(conversation, f"the part {part[:40]!r} of the {role} is missing in what it writes, or out of order")
            place = found + len(part)
        if read_tools(conversation) and self._render(replace(conversation, tools=None), len(conversation.messages)) == text:
            raise self._fault(conversation, "it leaves out the tools of the sample")

    def _fault(self, conversation: Conversation, what: str) -> DataError:
        return DataError(f"{conversation.where}: chat_template {self.path}: {what}")


@dataclass(frozen=True)
class _Given:
    """A template and what it is rendered with whatever the conversation."""

    source: str
    enable_thinking: bool
    special: tuple[tuple[str, str], ...]

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, add_generation_prompt: bool = False) -> str:
        return _compile(self.source).render(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=self.enable_thinking,
            **dict(self.special),
        )

    @property
    def form(self) -> frozenset[str]:
        return _form(self)


@cache
def _form(given: _Given) -> frozenset[str]:
    """Roles whose content the template takes as a list of parts: the first of ``FORMS`` in which it writes a small conversation as it should."""
    asked, said = "What is asked", "What is said"
    for form in FORMS:
        try:
            text = given.render([_message("user", asked, form, ""), _message("assistant", said, form, "")])
        except Exception:  # as in _render; a fault that lies not in the form is found there
            continue
        # A list that the template takes for a text is written as Python writes it.
        if 0 <= text.find(asked) < text.find(said) and "'type'" not in text:
            return form
    return frozenset()


def _role_and_text(message: Message) -> tuple[str, str]:
    return {"observation": "tool"}.get(message.role, message.role), message.content


def _message(role: str, text: str, form: frozenset[str], where: str) -> dict[str, Any]:
    """A message as transformers has it."""
    if role == "function_call":
        thought, calls = read_calls(text, where)
        functions = [{"name": call.name, "arguments": _object(call.arguments)} for call in calls]
        calling = [{"type": "function", "function": function} for function in functions]
        return {"role": "assistant", "content": _content("assistant", thought.rstrip("\n"), form), "tool_calls": calling}
    return {"role": role, "content": _content(role, text, form)}


def _content(role: str, text: str, form: frozenset[str]) -> str | list[dict[str, str]]:
    if role not in form:
        return text
    parts = [part for part in PLACEHOLDER.split(text) if part]
    return [{"type": PART_TYPES[part]} if part in PART_TYPES else {"type": "text", "text": part} for part in parts]


def _object(arguments: str) -> Any:
    """Arguments as an object where they are one, since templates write objects and texts differently."""
    try:
        return json.loads(arguments)
    except json.JSONDecodeError:
        return arguments


def _parts(conversation: Conversation) -> Iterator[tuple[str, str]]:
    """Roles and the texts and placeholders that must stand in the rendered text, without white space around them."""
    if conversation.system is not None:
        yield from (("system prompt", part.strip()) for part in PLACEHOLDER.split(conversation.system))
    for message in conversation.messages:
        if message.role == "function_call":
            yield from ((message.role, call.name) for call in read_calls(message.content, conversation.where)[1])
        else:
            said = message.content.rpartition(THOUGHT_END)[2] if message.role == "assistant" else message.content
            yield from ((message.role, part.strip()) for part in PLACEHOLDER.split(said))


@cache
def _compile(source: str) -> Compiled:
    """As transformers does it: in a sandbox, with loop controls and generation blocks."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.runtime import Macro
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}``: puts marks around what the block writes."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Macro) -> str:
            return f"{ANSWER_START}{caller()}{ANSWER_END}"

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    del environment.filters["random"], environment.globals["lipsum"]
    return environment.from_string(source)
