"""Conversations with images, as JSON: ``{"messages": [{"role": ..., "content": ...}, ...], "images": [...]}``.

Column and tag names come from data.json's ``attr``. Images missing, null or ``[]`` mean text only; a string is one image. Each ``<image>`` in
the text stands for the next image.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from tangram.config.data import BasicParameters, DatasetAttr
from tangram.data.conversation import IMAGE_PLACEHOLDER, Conversation, Message, Role
from tangram.data.images import ImageProcessor
from tangram.data.records import JsonRecords
from tangram.errors import DataError

UNSUPPORTED_COLUMNS = ("videos", "audios")
UNSUPPORTED_PLACEHOLDERS = ("<video>", "<audio>")


class ConversationDataset:
    """Random access to conversations of one or several files.

    Args:
        paths: JSON arrays or JSON-lines files; their samples follow one another.
        attr: names of columns and tags.
        media_dir: folder that relative image paths start from.
        max_samples: use only so many, from the beginning.

    Raises:
        DataError: a file that cannot be read, no samples at all, fewer than ``max_samples``, or a first sample that breaks the format.
    """

    def __init__(self, paths: Sequence[str], attr: DatasetAttr, media_dir: str = ".", max_samples: int | None = None) -> None:
        self.attr = attr
        self.media_dir = media_dir
        self._files = [JsonRecords(path) for path in paths]
        self._ends = list(accumulate(len(file) for file in self._files))
        names = ", ".join(paths)
        total = self._ends[-1] if self._ends else 0
        if total == 0:
            raise DataError(f"{names}: the dataset is empty: 0 samples")
        if max_samples is not None and max_samples > total:
            raise DataError(f"{names}: max_samples is {max_samples} but the dataset has {total} samples; lower max_samples or remove it")
        self._length = total if max_samples is None else max_samples
        # A file that is no list of samples would else be called too short.
        self[0]

    @classmethod
    def from_config(cls, basic: BasicParameters, attr: DatasetAttr, split: str = "train") -> ConversationDataset:
        """The training set of data.json, or with ``split="valid"`` its validation set.

        Raises:
            DataError: as the class, and where data.json names no validation set.
        """
        names, limit = (basic.dataset, basic.max_samples) if split == "train" else (basic.val_dataset, basic.val_max_samples)
        paths = [path.strip() for path in (names or "").split(",") if path.strip()]
        if not paths:
            key = "dataset" if split == "train" else "val_dataset"
            raise DataError(f"basic_parameters.{key} names no file; give the path of a JSON file, or several separated by commas")
        return cls(paths, attr, basic.dataset_dir, limit)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Conversation:
        """Sample ``index``, from 0.

        Raises:
            DataError: the record breaks the format; the message names file, record and what is wrong.
        """
        if not 0 <= index < self._length:
            raise IndexError(index)
        file = bisect_right(self._ends, index)
        local = index - (self._ends[file - 1] if file else 0)
        return self._conversation(index, f"{self._files[file].path}, record {local}", self._files[file][local])

    def __iter__(self) -> Iterator[Conversation]:
        records = ((f"{file.path}, record {local}", record) for file in self._files for local, record in enumerate(file))
        for index, (where, record) in enumerate(islice(records, self._length)):
            yield self._conversation(index, where, record)

    def check(self, images: ImageProcessor | None = None) -> None:
        """Check the format of every record, its placeholders against its images, and that the images are there; nothing is decoded.

        Args:
            images: given: the header of every image is read too, which finds files that are no images or too thin.

        Raises:
            DataError: the first fault, with how many images are missing in all where that is the fault.
        """
        missing: list[Conversation] = []
        paths: dict[str, bool] = {}
        first = ""
        for sample in self:
            for path in sample.images:
                if path not in paths:
                    paths[path] = Path(path).is_file()
                    if images is not None and paths[path]:
                        images.grid(path, sample.where)
                if not paths[path]:
                    first = first or path
                    missing.append(sample)
        if missing:
            absent = sum(not there for there in paths.values())
            raise DataError(
                f"{first}: no such image file, in {missing[0].where}; {absent} of {len(paths)} image files are missing; "
                f"check basic_parameters.dataset_dir ({self.media_dir})"
            )

    def _conversation(self, index: int, where: str, record: dict[str, Any]) -> Conversation:
        for column in UNSUPPORTED_COLUMNS:
            if record.get(column):
                raise DataError(f"{where}: column {column!r} is not empty; only images and text are supported")
        images = self._images(where, record)
        system, messages = self._messages(where, record)
        texts = (system or "", *(message.content for message in messages))
        for placeholder in UNSUPPORTED_PLACEHOLDERS:
            if any(placeholder in text for text in texts):
                mend = "remove the sample, or write the word otherwise"
                raise DataError(f"{where}: holds the placeholder {placeholder}; only images and text are supported: {mend}")
        marks = sum(text.count(IMAGE_PLACEHOLDER) for text in texts)
        if marks != len(images):
            raise DataError(f"{where}: {marks} {IMAGE_PLACEHOLDER} placeholders but {len(images)} images; each image needs one placeholder")
        return Conversation(index, where, system, messages, images)

    def _images(self, where: str, record: dict[str, Any]) -> tuple[str, ...]:
        value = record.get(self.attr.images) if self.attr.images else None
        paths = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(paths, list) or not all(isinstance(path, str) and path for path in paths):
            raise DataError(f"{where}: {self.attr.images!r} must be a path or a list of paths, got {_short(value)}")
        return tuple(str(Path(self.media_dir, path)) for path in paths)

    def _messages(self, where: str, record: dict[str, Any]) -> tuple[str | None, tuple[Message, ...]]:
        attr = self.attr
        raw = record.get(attr.messages)
        if not isinstance(raw, list) or not raw:
            inner = next((key for key, value in record.items() if isinstance(value, list) and value and isinstance(value[0], dict)), None)
            hint = f" (the record's list is {inner!r})" if inner is not None and inner != attr.messages else ""
            raise DataError(
                f"{where}: {attr.messages!r} must be a list of messages, got {_short(raw)}{hint}; data.json's attr.messages names the column; "
                "a file is a JSON array of samples or has one sample a line"
            )
        system = record.get(attr.system) if attr.system else None
        if system is not None and not isinstance(system, str):
            raise DataError(f"{where}: {attr.system!r} must be a string, got {_short(system)}")
        roles: dict[str, Role] = {attr.user_tag: "user", attr.assistant_tag: "assistant"}
        messages: list[Message] = []
        for number, message in enumerate(raw):
            role, content = (message.get(attr.role_tag), message.get(attr.content_tag)) if isinstance(message, dict) else (None, None)
            if not isinstance(role, str) or not isinstance(content, str):
                raise DataError(f"{where}, message {number}: needs the strings {attr.role_tag!r} and {attr.content_tag!r}, got {_short(message)}")
            if role == attr.system_tag and number == 0:
                if system is not None:
                    raise DataError(f"{where}: a system prompt both in column {attr.system!r} and as first message; keep one")
                system = content
                continue
            expected = (attr.user_tag, attr.assistant_tag)[len(messages) % 2]
            if role != expected:
                raise DataError(
                    f"{where}, message {number}: role {role!r} where {expected!r} must stand; {attr.user_tag!r} and {attr.assistant_tag!r} take turns"
                )
            messages.append(Message(roles[role], content))
        if len(messages) < 2 or len(messages) % 2:
            raise DataError(f"{where}: {len(messages)} messages; a conversation ends with an answer of {attr.assistant_tag!r}")
        return system, tuple(messages)


def _short(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."
