"""Records that hold one question and its answer, in columns of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tangram.config.data import DatasetAttr
from tangram.data.conversation import Message
from tangram.data.formats.columns import short, some, text_of
from tangram.errors import DataError


def alpaca_columns(attr: DatasetAttr) -> tuple[str, str, str]:
    """Columns of the prompt, the query and the response."""
    return attr.prompt or "instruction", attr.query or "input", attr.response or "output"


def alpaca_messages(attr: DatasetAttr, record: Mapping[str, Any], where: str) -> list[Message]:
    """History, then prompt and query on a line each, then the response.

    Raises:
        DataError: a column is missing or no text, or the history holds other than pairs of texts.
    """
    prompt, query, response = alpaca_columns(attr)
    for column in (prompt, response):
        if record.get(column) is None:
            raise DataError(f"{where}: no text in column {column!r}; its columns are {some([str(key) for key in record]) or 'none'}")
    messages: list[Message] = []
    history = record.get(attr.history) if attr.history else None
    if history is not None and not isinstance(history, list):
        raise DataError(f"{where}: {attr.history!r} must be a list of questions and answers, got {short(history)}")
    for pair in history or []:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise DataError(f"{where}: {attr.history!r} must hold pairs of a question and an answer, got {short(pair)}")
        messages += [Message("user", pair[0]), Message("assistant", pair[1])]
    question = "\n".join(text for column in (prompt, query) if (text := text_of(record, column, where)))
    if not question:
        raise DataError(f"{where}: columns {prompt!r} and {query!r} hold no question; write one or remove the sample")
    return [*messages, Message("user", question), Message("assistant", text_of(record, response, where) or "")]
