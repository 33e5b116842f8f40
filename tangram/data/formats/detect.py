"""Which column holds the messages of a file, and by which names, where attr leaves it open."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from tangram.config.data import DatasetAttr
from tangram.data.formats.columns import short, some
from tangram.errors import DataError

COLUMNS = ("messages", "conversations")
ROLE_TAGS, CONTENT_TAGS = ("role", "from"), ("content", "value")
LOOKED_AT = 1000
"""Records that are looked at before a file is said to show nothing: a first record may be a faulty one."""


class Names(NamedTuple):
    """Column and tags of the messages of one file."""

    messages: str
    role_tag: str
    content_tag: str
    user_tag: str
    assistant_tag: str


def detect(attr: DatasetAttr, path: str, records: Iterable[Mapping[str, Any] | DataError]) -> Names:
    """The names that attr gives or, where it leaves one open, that the first record shows which shows any.

    Args:
        records: of the file, from its beginning; faults among them are passed over.

    Raises:
        DataError: no record shows messages; the columns of the first are listed.
    """
    looked_at: list[Mapping[str, Any] | DataError] = []
    for record in islice(records, LOOKED_AT):
        names = None if isinstance(record, DataError) else _shown(attr, record)
        if names is not None:
            return names
        looked_at.append(record)
    raise _nothing_shown(attr, path, first_whole(looked_at))


def first_whole(records: Sequence[Mapping[str, Any] | DataError]) -> Mapping[str, Any]:
    """The first record that is no fault.

    Raises:
        DataError: all are; the first of them.
    """
    for record in records:
        if not isinstance(record, DataError):
            return record
    if records and isinstance(records[0], DataError):
        raise records[0]
    return {}


def _shown(attr: DatasetAttr, record: Mapping[str, Any]) -> Names | None:
    for column in (attr.messages,) if attr.messages else COLUMNS:
        turns = record.get(column)
        messages = [turn for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []
        if not messages:
            continue
        role_tag = attr.role_tag or next((tag for tag in ROLE_TAGS if tag in messages[0]), None)
        content_tag = attr.content_tag or next((tag for tag in CONTENT_TAGS if any(tag in message for message in messages)), None)
        if role_tag is None or content_tag is None:
            continue
        words = [message.get(role_tag) for message in messages]
        is_human = ("human" in words or "gpt" in words) if {"human", "gpt", "user", "assistant"}.intersection(map(str, words)) else role_tag == "from"
        user, assistant = ("human", "gpt") if is_human else ("user", "assistant")
        return Names(column, role_tag, content_tag, attr.user_tag or user, attr.assistant_tag or assistant)
    return None


def _nothing_shown(attr: DatasetAttr, path: str, record: Mapping[str, Any]) -> DataError:
    wanted = repr(attr.messages) if attr.messages else " or ".join(map(repr, COLUMNS))
    columns = [str(key) for key in record]
    column = next((name for name in ((attr.messages,) if attr.messages else COLUMNS) if name in record), None)
    inner = next((key for key, value in record.items() if isinstance(value, list) and value and isinstance(value[0], dict)), None)
    if column is not None:
        hint = f"{column!r} is {short(record[column])}; it must hold messages with {some(ROLE_TAGS)} and {some(CONTENT_TAGS)}, or as attr names them"
    elif {"instruction", "output"} <= set(columns):
        hint = "for 'instruction' and 'output' set data.json's attr.formatting to 'alpaca'"
    elif inner is not None and len(columns) == 1:
        hint = f"save the list under {inner!r} alone: a file is a JSON array of samples or has one sample a line"
    else:
        hint = "data.json's attr.messages names the column"
    return DataError(f"{path}, record 0: no list of messages in {wanted}; its columns are {some(columns) or 'none'}; {hint}")
