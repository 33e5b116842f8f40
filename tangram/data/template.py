"""Chat templates: conversations to pieces of text, each trained on or not. Named in data.json; a family names its default.

Those that come with Tangram are in ``tangram.data.builtin_templates``, those that users bring as Jinja files in ``tangram.data.jinja``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from tangram.config.data import BasicParameters
from tangram.data.conversation import IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER, Conversation, Message
from tangram.data.tools import THOUGHT_END, THOUGHT_START, ToolTexts, read_calls, read_tools
from tangram.errors import ConfigError, DataError, suggest
from tangram.families.base import Family

PLACEHOLDER = re.compile(f"({IMAGE_PLACEHOLDER}|{VIDEO_PLACEHOLDER})")
EMPTY_THOUGHT = f"{THOUGHT_START}\n\n{THOUGHT_END}\n\n"
"""What a model that thinks writes where there is nothing to think."""


@dataclass(frozen=True)
class Piece:
    """A run of text that is tokenised on its own, so that an answer's tokens are those that the model would produce after the prompt."""

    text: str
    answer: bool = False
    """True: what the assistant says, with the token that ends its turn."""


@dataclass(frozen=True)
class MediaTokens:
    """The tokens of a model's images and videos.

    Args:
        image, video: repeated for every merged cell; None: the model takes no such media.
        start, end: stand around the tokens of one image, or of one video; empty: nothing does.
        others: more tokens that never carry a label.
        timestamps: True: each step of a video's time axis has its own start and end and follows its time, as in ``<0.5 seconds>``.
    """

    image: str | None = None
    video: str | None = None
    start: str = ""
    end: str = ""
    others: tuple[str, ...] = ()
    timestamps: bool = False

    @property
    def all(self) -> tuple[str, ...]:
        """Every token that never carries a label."""
        return tuple(token for token in (self.image, self.video, self.start, self.end, *self.others) if token)


class ChatTemplate(Protocol):
    """What the encoder needs of a template."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def media(self) -> MediaTokens: ...

    @property
    def begins_with_bos(self) -> bool:
        """The tokenizer's ``bos_token``, where it has one, opens every sample."""

    def bind(self, special: Mapping[str, str]) -> ChatTemplate:
        """The template with the special tokens of a tokenizer, by their names.

        Raises:
            ConfigError: a token that it needs is not among them.
        """

    def turns(self, conversation: Conversation) -> list[list[Piece]]:
        """The pieces of each pair of asking and answering messages; the system prompt belongs to the first.

        Raises:
            DataError: the conversation holds what the template cannot write.
        """


@dataclass(frozen=True)
class Template:
    """The texts around the parts of a conversation; ``{content}`` stands for the part.

    Args:
        name: under which it is registered.
        default_system: system prompt of conversations that have none; None: they go without.
        observation: what a tool answered; None: as ``user``.
        answer: comes before an answer and is learnt with it.
        answer_end: ends an answer and is learnt with it; ``{eos_token}`` stands for the tokenizer's, here and in ``system`` and ``user``.
        after_answer: follows ``answer_end``; not learnt.
        thinks: True: an answer without a thought gets an empty one, which is learnt.
        enable_thinking: False: where the template thinks, thoughts are taken out of the answers and an empty one ends each prompt, not learnt.
        tools: how tools are written; None: conversations with tools are refused.
        media: tokens of the model's media.
        begins_with_bos: the tokenizer's ``bos_token``, where it has one, opens every sample.
    """

    system: str
    user: str
    answer_end: str
    after_answer: str = ""
    observation: str | None = None
    answer: str = ""
    default_system: str | None = None
    thinks: bool = False
    enable_thinking: bool = True
    tools: ToolTexts | None = None
    media: MediaTokens = field(default_factory=MediaTokens)
    begins_with_bos: bool = False
    name: str = ""

    def bind(self, special: Mapping[str, str]) -> Template:
        """See ``ChatTemplate``."""
        texts = {key: getattr(self, key) for key in ("system", "user", "answer_end")}
        if any("{eos_token}" in text for text in texts.values()):
            if "eos_token" not in special:
                raise ConfigError(
                    f"template {self.name} ends answers with the tokenizer's eos_token, but tokenizer_config.json names none; add it there"
                )
            texts = {key: text.replace("{eos_token}", special["eos_token"]) for key, text in texts.items()}
        return replace(self, **texts)

    def turns(self, conversation: Conversation) -> list[list[Piece]]:
        """See ``ChatTemplate``."""
        opening = self._opening(conversation)
        turns = []
        for question, answer in zip(conversation.messages[::2], conversation.messages[1::2], strict=True):
            before, said = self._answer(answer, conversation.where)
            turns.append([Piece(opening + self._asked(question) + before), Piece(said, answer=True), Piece(self.after_answer)])
            opening = ""
        return turns

    def _opening(self, conversation: Conversation) -> str:
        prompt = conversation.system if conversation.system is not None else self.default_system
        tools = read_tools(conversation)
        if tools:
            described = self._tools(conversation.where).describe(tools)
            prompt = described if not prompt else f"{prompt}\n\n{described}"
        return "" if prompt is None else self.system.replace("{content}", prompt)

    def _asked(self, message: Message) -> str:
        text = self.observation if message.role == "observation" and self.observation is not None else self.user
        return text.replace("{content}", message.content)

    def _answer(self, message: Message, where: str) -> tuple[str, str]:
        """What comes before the answer without being learnt, and what is learnt."""
        said = message.content
        if message.role == "function_call":
            thought, calls = read_calls(said, where)
            said = thought + self._tools(where).write(calls)
        before = ""
        if self.thinks and not self.enable_thinking:
            before, said = EMPTY_THOUGHT, _without_thought(said, where)
        elif self.thinks and THOUGHT_START not in said and THOUGHT_END not in said:
            said = EMPTY_THOUGHT + said
        return before, self.answer + said + self.answer_end

    def _tools(self, where: str) -> ToolTexts:
        if self.tools is None:
            raise DataError(f"{where}: holds tools, which the template {self.name} cannot write; choose one that can, such as qwen3_vl")
        return self.tools


def _without_thought(said: str, where: str) -> str:
    rest = said.rpartition(THOUGHT_END)[2].lstrip("\n") if THOUGHT_END in said else said
    if THOUGHT_START in rest:
        raise DataError(f"{where}: an answer holds {THOUGHT_START} without {THOUGHT_END}; with enable_thinking false its thought cannot be taken out")
    return rest


_templates: dict[str, Template] = {}


def register_template(name: str, template: Template) -> None:
    """Add a template.

    Raises:
        ConfigError: the name is taken.
    """
    if name in _templates:
        raise ConfigError(f"template {name!r} is registered already")
    _templates[name] = replace(template, name=name)


def get_template(name: str | None) -> Template:
    """The template of that name.

    Args:
        name: None: neither data.json nor the family names one.

    Raises:
        ConfigError: no such template, or no name.
    """
    import tangram.data.builtin_templates  # noqa: F401  registers the templates that ship with Tangram

    if name is None:
        raise ConfigError("this model family has no chat template here; register one in a plug-in and name it in basic_parameters.template")
    if name not in _templates:
        raise ConfigError(f"unknown template {name!r}{suggest(name, _templates)}; known: {', '.join(sorted(_templates))}")
    return _templates[name]


def select_template(basic: BasicParameters, family: Family) -> ChatTemplate:
    """The template of a run: the Jinja file of data.json, the template that data.json names, or the family's.

    Whichever it is, the tokens of media are those of the family's template, since they belong to the model.

    Raises:
        ConfigError: no such template or file, or ``enable_thinking`` false where the template does not think.
    """
    media = None if family.template is None else get_template(family.template).media
    if basic.chat_template is not None:
        from tangram.data.jinja import JinjaTemplate

        return JinjaTemplate.from_file(basic.chat_template, media or MediaTokens(), enable_thinking=basic.enable_thinking)
    template = get_template(basic.template or family.template)
    if not basic.enable_thinking and not template.thinks:
        raise ConfigError(f"basic_parameters.enable_thinking false does nothing: the template {template.name} writes no thoughts; remove it")
    return replace(template, media=media or template.media, enable_thinking=basic.enable_thinking)
