"""An encoded sample without its pixels as a few bytes, and back.

``kind, tokens, images, videos, turns dropped | ids | labels | media``; all little-endian. Labels that repeat the id, which is what they do
where they are learnt, are one bit each. A sample that cannot be used is its fault's text.
"""

from __future__ import annotations

import math
import struct

from tangram.data.encode import IGNORE, EncodedSample
from tangram.data.media import Medium
from tangram.errors import DataError

HEAD = struct.Struct("<BIIII")
MEDIUM = struct.Struct("<iiidI")
LABEL_BITS, LABEL_IDS, FAULT = range(3)
"""Kinds: labels as bits, labels as numbers, no sample."""


def pack(encoded: EncodedSample) -> bytes:
    """The bytes of a sample; its pixels and its id are left out."""
    import numpy as np

    ids, labels = (np.asarray(values, dtype="<i4") for values in (encoded.input_ids, encoded.labels))
    learnt = labels != IGNORE
    repeats = bool((labels[learnt] == ids[learnt]).all())
    head = HEAD.pack(LABEL_BITS if repeats else LABEL_IDS, len(ids), len(encoded.images), len(encoded.videos), encoded.turns_dropped)
    media = b"".join(_pack_medium(medium) for medium in (*encoded.images, *encoded.videos))
    return head + ids.tobytes() + (np.packbits(learnt).tobytes() if repeats else labels.tobytes()) + media


def pack_fault(text: str) -> bytes:
    """The bytes of a sample that cannot be used."""
    raw = text.encode("utf-8", "surrogateescape")
    return HEAD.pack(FAULT, len(raw), 0, 0, 0) + raw


def unpack(raw: memoryview | bytes, sample: int) -> EncodedSample:
    """The sample of ``pack``.

    Raises:
        DataError: it cannot be used; the text is the one that ``pack_fault`` got.
    """
    import numpy as np

    kind, tokens, images, videos, turns_dropped = HEAD.unpack_from(raw)
    at = HEAD.size
    if kind == FAULT:
        raise DataError(bytes(raw[at : at + tokens]).decode("utf-8", "surrogateescape"))
    ids = np.frombuffer(raw, "<i4", tokens, at)
    at += 4 * tokens
    if kind == LABEL_BITS:
        size = -(-tokens // 8)
        learnt = np.unpackbits(np.frombuffer(raw, np.uint8, size, at), count=tokens).astype(bool)
        labels = np.where(learnt, ids, IGNORE)
    else:
        size = 4 * tokens
        labels = np.frombuffer(raw, "<i4", tokens, at)
    at += size
    media: list[Medium] = []
    for _ in range(images + videos):
        medium, at = _unpack_medium(raw, at)
        media.append(medium)
    return EncodedSample(sample, ids.tolist(), labels.tolist(), media[:images], media[images:], turns_dropped=turns_dropped)


def _pack_medium(medium: Medium) -> bytes:
    seconds = math.nan if medium.seconds_per_grid is None else medium.seconds_per_grid
    times = medium.timestamps
    return MEDIUM.pack(*medium.grid, seconds, len(times)) + struct.pack(f"<{len(times)}d", *times)


def _unpack_medium(raw: memoryview | bytes, at: int) -> tuple[Medium, int]:
    rows_in_time, rows, columns, seconds, count = MEDIUM.unpack_from(raw, at)
    at += MEDIUM.size
    times = struct.unpack_from(f"<{count}d", raw, at)
    return Medium((rows_in_time, rows, columns), None if math.isnan(seconds) else seconds, times), at + 8 * count
