"""Messages in OpenAI's form: contents as lists of parts, and calls of tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tangram.data.conversation import IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER, Video
from tangram.data.formats.columns import media_path, short, video_of
from tangram.data.tools import THOUGHT_END, THOUGHT_START
from tangram.errors import DataError

MEDIA_KEYS = {"image": ("image", "path", "url"), "image_url": ("image_url",), "video": ("video", "path", "url"), "video_url": ("video_url",)}
"""Type of a part: the keys under which its medium may stand."""


@dataclass
class Inline:
    """Media that stand in the messages of a record, in order."""

    images: list[str] = field(default_factory=list)
    videos: list[Video] = field(default_factory=list)


def content_text(content: Any, media_dir: str, where: str, inline: Inline) -> str:
    """A content as one text; the parts of a list follow one another, each medium as its placeholder.

    Args:
        inline: gets the media. A medium without a path takes the next of the record's column.

    Raises:
        DataError: neither text nor a list of known parts.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"{where}: the content must be a string or a list of parts, got {short(content)}")
    return "".join(_part(part, media_dir, f"{where}, part {number}", inline) for number, part in enumerate(content))


def _part(part: Any, media_dir: str, where: str, inline: Inline) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        _refuse_others(part, ("text",), where)
        return str(part["text"])
    if not isinstance(kind, str) or kind not in MEDIA_KEYS:
        raise DataError(f"{where}: a part must be a text, image, image_url, video or video_url, got {short(part)}")
    _refuse_others(part, (*MEDIA_KEYS[kind], *(("sample_fps",) if kind == "video" else ())), where)
    given = [part[key] for key in MEDIA_KEYS[kind] if part.get(key) is not None]
    if len(given) > 1:
        raise DataError(f"{where}: {len(given)} of the keys {', '.join(MEDIA_KEYS[kind])} are given; keep one")
    is_image = kind.startswith("image")
    if given:
        value = given[0].get("url") if kind.endswith("_url") and isinstance(given[0], dict) else given[0]
        if is_image:
            inline.images.append(media_path(value, media_dir, where, kind))
        else:
            inline.videos.append(video_of(value, media_dir, where, kind, part.get("sample_fps")))
    return IMAGE_PLACEHOLDER if is_image else VIDEO_PLACEHOLDER


def _refuse_others(part: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    """A key of a part that is not read could have meant something."""
    for key, value in part.items():
        if key not in ("type", *known) and value is not None:
            raise DataError(f"{where}: key {short(key)} of a part of type {part['type']!r} is not supported; remove it")


def calls_text(calls: Any, where: str) -> str:
    """Tool calls as the JSON text of a function_call message: ``{"name": ..., "arguments": {...}}``, or a list of several.

    Raises:
        DataError: a call without name, or with arguments that are no JSON object.
    """
    if not isinstance(calls, list):
        raise DataError(f"{where}: 'tool_calls' must be a list, got {short(calls)}")
    read = [_call(call, where) for call in calls]
    return json.dumps(read[0] if len(read) == 1 else read, ensure_ascii=False)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise DataError(f"{where}: a tool call needs a function with a name, got {short(call)}")
    arguments = function.get("arguments")
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        json.dumps(arguments)
    except (ValueError, TypeError, RecursionError):  # what is no JSON, or holds what JSON cannot hold
        arguments = None
    if not isinstance(arguments, dict):
        raise DataError(f"{where}: the arguments of {name!r} must be a JSON object, got {short(function.get('arguments'))}")
    return {"name": name, "arguments": arguments}


def with_reasoning(message: Mapping[str, Any], text: str, where: str) -> str:
    """An answer after its ``reasoning_content``, as Qwen3's own chat template writes it."""
    reasoning = message.get("reasoning_content")
    if reasoning in (None, ""):
        return text
    if not isinstance(reasoning, str):
        raise DataError(f"{where}: 'reasoning_content' must be a string, got {short(reasoning)}")
    return f"{THOUGHT_START}\n" + reasoning.strip("\n") + f"\n{THOUGHT_END}\n\n" + text.lstrip("\n")
