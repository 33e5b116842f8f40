"""LLaVA's instruction files (``id``, ``image``, ``conversations``) to records that training reads (``images``, ``messages``).

The result has the JSON value that MindSpeed-MM's tool gives: images as ``./train2017/<name>``, relative to the COCO folder, and the samples in
the order of the file. It is read and written in one pass, in the memory of a few megabytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from tangram.checkpoints.publish import new_file
from tangram.data.conversation import IMAGE_PLACEHOLDER
from tangram.data.formats.columns import short
from tangram.data.json_stream import Progress, json_values
from tangram.errors import DataError

IMAGE_FOLDER = "train2017"
"""Folder of the images inside the COCO folder."""
ROLES = {"human": "user", "gpt": "assistant"}
IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")
"""Files that ``expect_images`` counts."""
NAMES_SHOWN = 5
CHUNK = 1 << 20
"""Characters that are written at a time."""
SKIPPED_ENDING = ".skipped.jsonl"

_quoted = json.encoder.encode_basestring
"""A JSON string; other than ASCII characters stay as they are."""


@dataclass
class Report:
    """What a conversion found and wrote."""

    records: int = 0
    """Of the LLaVA file."""
    written: int = 0
    without_image: int = 0
    """Text only, of ``records``."""
    skipped: int = 0
    """Records whose images are missing, left out because of ``skip_missing``."""
    images_found: int = 0
    """Image files in the folder."""
    images_used: int = 0
    """Of them, how many the written records name."""
    miscounted: list[int] = field(default_factory=list)
    """Records with another number of ``<image>`` in their text than images; training refuses them."""


class _Folder:
    """The image folder, read once: a look-up costs no system call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_dir():
            raise DataError(f"{path}: no such folder; coco_path must be the folder that holds {IMAGE_FOLDER}")
        with os.scandir(path) as entries:
            self.names: Set[str] = {entry.name for entry in entries if entry.is_file()}
        self.images = sum(name.lower().endswith(IMAGE_ENDINGS) for name in self.names)

    def __contains__(self, name: str) -> bool:
        return name in self.names or ("/" in name and (self.path / name).is_file())


def convert_llava(
    coco: Path,
    source: Path,
    output: Path,
    *,
    expect_images: int | None = None,
    skip_missing: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Convert ``source`` and publish ``output``: whole and flushed to the disk, or not at all.

    Args:
        coco: folder that holds ``train2017``.
        expect_images: fail unless the folder holds so many image files.
        skip_missing: leave out records whose images are missing, and list them in ``<output>.skipped.jsonl`` with index, id and image.
        overwrite: take the place of an existing ``output``.
        progress: called with bytes read and bytes in all.

    Raises:
        DataError: ``output`` exists; another number of image files than expected; a record of another form, by index and id; images that are
            missing: any without ``skip_missing``, all with it. In every case ``output`` is left as it was.
    """
    if output.resolve() == source.resolve():
        raise DataError(f"{output}: is the file to convert; write elsewhere")
    if output.exists() and not overwrite:
        raise DataError(f"{output}: exists already; give --overwrite to replace it, or write elsewhere")
    folder = _Folder(coco / IMAGE_FOLDER)
    if expect_images is not None and folder.images != expect_images:
        raise DataError(
            f"{folder.path}: {folder.images} image files where {expect_images} are expected; unpack the archive again, or correct --expect-images"
        )
    skipped_path = output.with_name(output.name + SKIPPED_ENDING)
    conversion = _Conversion(source, folder, skip_missing)
    if skip_missing:
        with new_file(output, replace=overwrite) as file, new_file(skipped_path, replace=True) as skipped:
            conversion.run(file, skipped, progress)
    else:
        with new_file(output, replace=overwrite) as file:
            conversion.run(file, None, progress)
        # An earlier conversion's list would be told of this one.
        skipped_path.unlink(missing_ok=True)
    return conversion.report


class _Writer:
    """Writes an array, one record a line, some megabytes at a time."""

    def __init__(self, file: BinaryIO, source: Path) -> None:
        self._file, self._source = file, source
        self._texts: list[str] = []
        self._indexes: list[int] = []
        self._size = 0
        self.written = 0

    def add(self, index: int, text: str) -> None:
        self._texts.append(("[\n" if self.written == 0 else ",\n") + text)
        self._indexes.append(index)
        self._size += len(text)
        self.written += 1
        if self._size > CHUNK:
            self.flush()

    def flush(self) -> None:
        try:
            self._file.write("".join(self._texts).encode("utf-8"))
        except UnicodeEncodeError:
            index = next(index for index, text in zip(self._indexes, self._texts, strict=True) if not _is_text(text))
            raise DataError(
                f"{self._source}: record {index} holds half of a surrogate pair (\\ud800 to \\udfff), which is no character; remove it"
            ) from None
        self._texts, self._indexes, self._size = [], [], 0

    def close(self) -> None:
        self.flush()
        self._file.write(b"\n]\n")


def _is_text(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


class _Conversion:
    def __init__(self, source: Path, folder: _Folder, skip_missing: bool) -> None:
        self.source, self.folder, self.skip_missing = source, folder, skip_missing
        self.report = Report(images_found=folder.images)
        self.used: set[str] = set()
        self.with_missing = 0
        """Records that lack an image."""
        self.any_found = False
        self.missing: dict[str, None] = {}
        """Names of missing images, in the order met."""

    def run(self, file: BinaryIO, skipped: BinaryIO | None, progress: Progress | None) -> None:
        """Write the records to ``file`` and those left out to ``skipped``.

        Without ``skipped``, no more is written after the first missing image, but all are counted.
        """
        report, writer = self.report, _Writer(file, self.source)
        for index, record in enumerate(json_values(self.source, progress)):
            report.records += 1
            names, text = self._converted(index, record)
            report.without_image += not names
            absent = [name for name in names if name not in self.folder]
            self.any_found = self.any_found or len(absent) < len(names)
            if absent:
                self.with_missing += 1
                self.missing.update(dict.fromkeys(absent))
                if skipped is not None:
                    left_out = {"index": index, "id": record.get("id"), "image": record["image"]}
                    skipped.write(json.dumps(left_out).encode("ascii") + b"\n")
                continue
            self.used.update(names)
            if skipped is not None or not self.missing:
                writer.add(index, text)
        self._require_images(writer.written)
        writer.close()
        report.written, report.skipped, report.images_used = writer.written, self.with_missing, len(self.used)

    def _converted(self, index: int, record: Any) -> tuple[list[str], str]:
        """Names of a record's images, and the record as JSON text on a line of its own."""
        if not isinstance(record, dict):
            raise DataError(f"{self.source}: record {index} is a {type(record).__name__}; every record must be an object with conversations")
        names = self._names(index, record)
        turns = record.get("conversations")
        if not isinstance(turns, list) or not turns:
            raise self._fault(index, record, f"'conversations' must be a list of messages, got {short(turns)}")
        messages, marks = [], 0
        for number, turn in enumerate(turns):
            role, content = (turn.get("from"), turn.get("value")) if isinstance(turn, dict) else (None, None)
            if not isinstance(role, str) or not isinstance(content, str):
                raise self._fault(index, record, f"message {number}: needs the strings 'from' and 'value', got {short(turn)}")
            if role not in ROLES:
                raise self._fault(index, record, f"message {number}: role {role!r}; the roles are {' and '.join(map(repr, ROLES))}")
            marks += content.count(IMAGE_PLACEHOLDER)
            messages.append(f'{{"role": "{ROLES[role]}", "content": {_quoted(content)}}}')
        if marks != len(names):
            self.report.miscounted.append(index)
        images = ", ".join([_quoted(f"./{IMAGE_FOLDER}/{name}") for name in names])
        return names, f'{{"images": [{images}], "messages": [{", ".join(messages)}]}}'

    def _names(self, index: int, record: dict[str, Any]) -> list[str]:
        image = record.get("image")
        if not image:
            return []
        names = [image] if isinstance(image, str) else image
        if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
            raise self._fault(index, record, f"'image' must be a name or a list of names, got {short(image)}")
        return names

    def _require_images(self, written: int) -> None:
        report, path = self.report, self.folder.path
        if not report.records:
            raise DataError(f"{self.source}: 0 records; there is nothing to convert")
        if self.missing and not self.any_found:
            raise DataError(
                f"{path}: all images are missing: {len(self.missing)} files of {self.with_missing} records, such as {self._some()}; "
                f"{self._what_is_there()}; coco_path must be the folder that holds {IMAGE_FOLDER} with the images of COCO 2017"
            )
        if self.missing and not (self.skip_missing and written):
            raise DataError(
                f"{path}: {len(self.missing)} image files of {self.with_missing} records are missing: {self._some()}; "
                "unpack the archive again, or give --skip-missing to leave these records out"
            )

    def _some(self) -> str:
        more = f" and {len(self.missing) - NAMES_SHOWN} more" if len(self.missing) > NAMES_SHOWN else ""
        return ", ".join(list(self.missing)[:NAMES_SHOWN]) + more

    def _what_is_there(self) -> str:
        """What the folder holds instead; COCO 2014 has the same pictures under longer names."""
        old = next((name for name in sorted(self.folder.names) if name.startswith("COCO_")), None)
        if old:
            return f"the folder holds names of COCO 2014 ({old}), whose pictures are the same under other names"
        if not self.folder.names:
            return "the folder is empty"
        return f"the folder holds {len(self.folder.names)} files, such as {min(self.folder.names)}"

    def _fault(self, index: int, record: dict[str, Any], what: str) -> DataError:
        return DataError(f"{self.source}: record {index} (id {record.get('id')!r}): {what}")
