"""Media and tools as they stand in columns of a record or in parts of a message."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tangram.data.conversation import Video
from tangram.errors import DataError

SHORT = 60
"""Characters of a value that a message shows."""
AUDIO_COLUMNS = ("audios", "audio")


def short(value: Any) -> str:
    """A value as a message shows it."""
    try:
        text = repr(value)
    except RecursionError:
        text = f"a {type(value).__name__} nested too deeply"
    return text if len(text) <= SHORT else text[:SHORT] + "..."


def is_empty(value: Any) -> bool:
    """Whether a column holds no media: missing, null or an empty list."""
    return value is None or (isinstance(value, list) and not value)


def take(record: Mapping[str, Any], column: str | None, singular: str) -> tuple[str, Any]:
    """The name and value of a media column; ``images`` also finds ``image`` and ``videos`` ``video``, where only that is there.

    Args:
        column: its name, None where none is read.
        singular: the name that ``singular`` with an s also finds.
    """
    if column is None:
        return singular + "s", None
    if column == singular + "s" and is_empty(record.get(column)) and not is_empty(record.get(singular)):
        return singular, record[singular]
    return column, record.get(column)


def refuse_audio(record: Mapping[str, Any], where: str) -> None:
    """Raises DataError where a record holds sound, which would otherwise be left out without a word."""
    for column in AUDIO_COLUMNS:
        if not is_empty(record.get(column)):
            raise DataError(f"{where}: column {column!r} is not empty; audio is not supported: remove the sample")


def media_path(value: Any, media_dir: str, where: str, what: str) -> str:
    """A path, media folder included.

    Args:
        value: text, or the struct with ``path`` and ``bytes`` of Hugging Face's parquet files.
        what: how messages call the value.

    Raises:
        DataError: an address, bytes, or neither text nor such a struct.
    """
    if isinstance(value, dict) and "path" in value:
        if value.get("bytes") is not None:
            raise DataError(f"{where}: {what} holds the file's bytes; save it as a file in basic_parameters.dataset_dir and give its path")
        value = value["path"]
    if not isinstance(value, str) or not value:
        raise DataError(f"{where}: {what} must be a path or a list of paths, got {short(value)}")
    if value.startswith(("http://", "https://", "data:")):
        raise DataError(f"{where}: {what} is {short(value)}, no file; save it in basic_parameters.dataset_dir and give its path")
    return str(Path(media_dir, value.removeprefix("file://")))


def images_of(value: Any, media_dir: str, where: str, column: str) -> tuple[str, ...]:
    """A path or a list of paths; missing, null and ``[]`` are none.

    Raises:
        DataError: it is anything else.
    """
    if value is None:
        return ()
    if not isinstance(value, list):
        return (media_path(value, media_dir, where, repr(column)),)
    return tuple(media_path(each, media_dir, where, repr(column)) for each in value)


def videos_of(value: Any, media_dir: str, where: str, column: str) -> tuple[Video, ...]:
    """A video or a list of videos; missing, null and ``[]`` are none. See ``video_of`` for one video.

    Raises:
        DataError: it is anything else.
    """
    if value is None:
        return ()
    return tuple(video_of(each, media_dir, where, repr(column)) for each in (value if isinstance(value, list) else [value]))


def video_of(value: Any, media_dir: str, where: str, what: str, sample_fps: Any = None) -> Video:
    """One video: a path, a list of its frames' paths, or ``{"frames": [...], "sample_fps": 1.0}``.

    Raises:
        DataError: it is anything else, holds no frame, or frames per second that are no positive number.
    """
    if isinstance(value, dict) and value.get("frames") is not None:
        other = sorted(str(key) for key, inner in value.items() if key not in ("frames", "sample_fps") and inner is not None)
        if other:
            raise DataError(f"{where}: {what} has the key {other[0]!r}, which is not supported beside frames and sample_fps; remove it")
        value, sample_fps = value["frames"], value.get("sample_fps")
    if not isinstance(value, list):
        if sample_fps is not None:
            raise DataError(f"{where}: {what} gives sample_fps to a video file, which has its own; give it to a list of frames alone")
        return Video((media_path(value, media_dir, where, what),))
    if not value:
        raise DataError(f"{where}: {what} is a video of 0 frames; remove it or list its frames")
    if sample_fps is not None and (isinstance(sample_fps, bool) or not isinstance(sample_fps, int | float) or not 0 < sample_fps < math.inf):
        raise DataError(f"{where}: {what} has sample_fps {short(sample_fps)}; it must be a number above 0")
    frames = tuple(media_path(frame, media_dir, where, what) for frame in value)
    return Video(frames, is_frames=True, sample_fps=None if sample_fps is None else float(sample_fps))


def tools_of(value: Any, where: str, column: str) -> str | None:
    """A JSON list of tools, given as text or as a list; missing, null, ``[]`` and ``""`` are none.

    Raises:
        DataError: it is no JSON list of objects.
    """
    if value is None or value in ("", []):
        return None
    try:
        tools = json.loads(value) if isinstance(value, str) else value
        if isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools):
            return value if isinstance(value, str) else json.dumps(tools, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError):  # what is no JSON, or holds what JSON cannot hold
        pass
    raise DataError(f"{where}: {column!r} must be a JSON list of tools, got {short(value)}")


def text_of(record: Mapping[str, Any], column: str | None, where: str) -> str | None:
    """The text in a column; None where it is missing or null.

    Raises:
        DataError: it is no text.
    """
    value = record.get(column) if column is not None else None
    if value is not None and not isinstance(value, str):
        raise DataError(f"{where}: {column!r} must be a string, got {short(value)}")
    return value


def some(names: Sequence[str]) -> str:
    """Names as a message lists them, in their order."""
    return ", ".join(map(repr, names))
