"""Records to conversations: turns, placeholders and media are checked alike, whatever the format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, TypeVar

from tangram.config.data import DatasetAttr
from tangram.data.conversation import (
    ANSWERING,
    ASKING,
    AUDIO_PLACEHOLDER,
    IMAGE_PLACEHOLDER,
    VIDEO_PLACEHOLDER,
    Conversation,
    Message,
    Role,
    Video,
)
from tangram.data.formats.alpaca import alpaca_columns, alpaca_messages
from tangram.data.formats.columns import images_of, refuse_audio, short, some, take, text_of, tools_of, videos_of
from tangram.data.formats.detect import LOOKED_AT, Names, detect, first_whole
from tangram.data.formats.openai import Inline, calls_text, content_text, with_reasoning
from tangram.errors import DataError, suggest

Medium = TypeVar("Medium", str, Video)
WEIGHTS = ("weight", "loss")
"""Keys by which other trainers take a message out of the loss."""


class RecordReader:
    """Reads the records of one file.

    Args:
        attr: names of columns and tags, as the user gives them.
        media_dir: folder that relative media paths start from.
        path: the file, for messages.
        records: its records from the beginning, or faults; as many are looked at as it takes to see what attr leaves open.

    Raises:
        DataError: no record shows what the format needs; the columns of the first are listed.
    """

    def __init__(self, attr: DatasetAttr, media_dir: str, path: str, records: Iterable[Mapping[str, Any] | DataError]) -> None:
        self.attr = attr
        self.media_dir = media_dir
        self.names: Names | None = None
        if attr.formatting == "alpaca":
            _look_for_alpaca(attr, path, records)
            return
        self.names = names = detect(attr, path, records)
        observation = attr.observation_tag or ("tool" if attr.formatting == "openai" else "observation")
        self._roles: dict[str, Role] = {
            observation: "observation",
            attr.function_tag or "function_call": "function_call",
            names.user_tag: "user",
            names.assistant_tag: "assistant",
        }

    def __str__(self) -> str:
        """What the log says of the file."""
        if self.names is None:
            prompt, query, response = alpaca_columns(self.attr)
            return f"alpaca, columns {prompt!r}, {query!r} and {response!r}"
        column, role, content, user, assistant = self.names
        return f"{self.attr.formatting}, messages in {column!r} with {role!r} and {content!r}, roles {user!r} and {assistant!r}"

    def __call__(self, index: int, where: str, record: Mapping[str, Any]) -> Conversation:
        """The conversation of one record.

        Args:
            index: the sample's id.
            where: file and record, for messages.

        Raises:
            DataError: the record breaks the format.
        """
        attr, inline = self.attr, Inline()
        refuse_audio(record, where)
        system = text_of(record, attr.system, where)
        if self.names is None:
            messages = alpaca_messages(attr, record, where)
        else:
            first, messages = self._turns(self.names, record, where, inline)
            if first is not None and system is not None:
                raise DataError(f"{where}: a system prompt both in column {attr.system!r} and as first message; keep one")
            system = first if system is None else system
        self._check_turns(messages, where)
        column, value = take(record, attr.images, "image")
        images = _one_place(inline.images, images_of(value, self.media_dir, where, column), column, where)
        column, value = take(record, attr.videos, "video")
        videos = _one_place(inline.videos, videos_of(value, self.media_dir, where, column), column, where)
        texts = (system or "", *(message.content for message in messages))
        _check_placeholders(texts, {"image": len(images), "video": len(videos)}, where)
        tools = attr.tools or ("tools" if attr.formatting == "openai" else None)
        return Conversation(index, where, system, tuple(messages), images, videos, tools_of(record.get(tools), where, tools) if tools else None)

    def _turns(self, names: Names, record: Mapping[str, Any], where: str, inline: Inline) -> tuple[str | None, list[Message]]:
        """System prompt and messages."""
        raw = record.get(names.messages)
        if not isinstance(raw, list) or not raw:
            columns = some([str(key) for key in record]) or "none"
            raise DataError(f"{where}: {names.messages!r} must be a list of messages, got {short(raw)}; its columns are {columns}")
        system: str | None = None
        messages: list[Message] = []
        for number, message in enumerate(raw):
            place = f"{where}, message {number}"
            word = message.get(names.role_tag) if isinstance(message, dict) else None
            if not isinstance(word, str):
                raise DataError(f"{place}: needs the strings {names.role_tag!r} and {names.content_tag!r}, got {short(message)}")
            _refuse_weights(message, place)
            text, calls = self._content(names, message, place, inline)
            if number == 0 and word == self.attr.system_tag and word not in self._roles:
                system = text
                continue
            messages.append(Message(self._role(names, word, calls, len(messages), place), text))
        return system, messages

    def _content(self, names: Names, message: Mapping[str, Any], place: str, inline: Inline) -> tuple[str, bool]:
        """Text of a message, and whether it calls tools."""
        content, calls = message.get(names.content_tag), message.get("tool_calls")
        if self.attr.formatting == "openai":
            if calls not in (None, []):
                if content not in (None, "", []):
                    raise DataError(f"{place}: holds both tool_calls and a text, {short(content)}, which would be lost; keep one")
                return with_reasoning(message, calls_text(calls, place), place), True
            return with_reasoning(message, content_text(content, self.media_dir, place, inline), place), False
        if calls not in (None, []):
            raise DataError(f"{place}: 'tool_calls' are read with attr.formatting 'openai' alone")
        if not isinstance(content, str):
            hint = "; contents that are lists of parts need attr.formatting 'openai'" if isinstance(content, list) else ""
            raise DataError(f"{place}: needs the strings {names.role_tag!r} and {names.content_tag!r}, got {short(message)}{hint}")
        return content, False

    def _role(self, names: Names, word: str, calls: bool, position: int, place: str) -> Role:
        known = [names.user_tag, names.assistant_tag]
        role, expected = self._roles.get(word), known[position % 2]
        if role is None and word != self.attr.system_tag:
            every = [*known, *(tag for tag in (*self._roles, self.attr.system_tag) if tag is not None and tag not in known)]
            raise DataError(f"{place}: role {word!r} is none of {some(every)}{suggest(word, every)}; attr names the roles")
        if role is None or role not in (ASKING, ANSWERING)[position % 2]:
            raise DataError(f"{place}: role {word!r} where {expected!r} must stand; {known[0]!r} and {known[1]!r} take turns")
        if calls and role != "assistant":
            raise DataError(f"{place}: role {word!r} calls tools; only {names.assistant_tag!r} may")
        return "function_call" if calls else role

    def _check_turns(self, messages: list[Message], where: str) -> None:
        if len(messages) < 2 or len(messages) % 2:
            assistant = self.names.assistant_tag if self.names else "assistant"
            raise DataError(f"{where}: {len(messages)} messages; a conversation ends with an answer of {assistant!r}")
        for number, message in enumerate(messages):
            if message.role in ANSWERING and not message.content.strip():
                raise DataError(f"{where}: answer {number // 2} of {len(messages) // 2} is empty and teaches nothing; write it or remove the turn")


def _look_for_alpaca(attr: DatasetAttr, path: str, records: Iterable[Mapping[str, Any] | DataError]) -> None:
    """Raises DataError unless one of the first records has the columns of the prompt and the response."""
    prompt, _, response = alpaca_columns(attr)
    looked_at: list[Mapping[str, Any] | DataError] = []
    for record in islice(records, LOOKED_AT):
        if not isinstance(record, DataError) and prompt in record and response in record:
            return
        looked_at.append(record)
    columns = some([str(key) for key in first_whole(looked_at)]) or "none"
    raise DataError(
        f"{path}, record 0: no columns {prompt!r} and {response!r}; its columns are {columns}; name them in attr.prompt and attr.response, "
        "or set another attr.formatting"
    )


def _one_place(inline: list[Medium], listed: tuple[Medium, ...], column: str, where: str) -> tuple[Medium, ...]:
    if inline and listed:
        raise DataError(f"{where}: {len(inline)} files in the messages and {len(listed)} in column {column!r}; list them in one place")
    return tuple(inline) or listed


def _refuse_weights(message: Mapping[str, Any], place: str) -> None:
    for key in WEIGHTS:
        if message.get(key) is not None and not message[key]:
            raise DataError(f"{place}: {key} {message[key]!r}, but all answers are learnt, or the last alone with mask_history; remove the key")


def _check_placeholders(texts: Iterable[str], media: Mapping[str, int], where: str) -> None:
    every = "\n".join(texts)
    if AUDIO_PLACEHOLDER in every:
        raise DataError(f"{where}: holds the placeholder {AUDIO_PLACEHOLDER}; audio is not supported: remove the sample, or write the word otherwise")
    for kind, placeholder in (("image", IMAGE_PLACEHOLDER), ("video", VIDEO_PLACEHOLDER)):
        marks = every.count(placeholder)
        if marks != media[kind]:
            raise DataError(f"{where}: {marks} {placeholder} placeholders but {media[kind]} {kind}s; each {kind} needs one placeholder")
