"""Video files, read with PyAV: when their frames are shown, and the frames that are asked for.

How a video is read, everywhere in Tangram:

- The first video stream counts; cover pictures of music files are none. Sound is not read.
- Rotation that the container asks for is not applied, nor is a pixel shape other than square, as in transformers and LLaMA-Factory.
- Frames become RGB by FFmpeg's own conversion without options, as in transformers.
- Frames that an edit list cuts off, and hidden frames of VP8, do not count.
- Where the rate varies, a frame's time is its own time stamp, counted from the first frame's. Where every frame lies within a tick of the time
  base where the average rate puts it, it is its number over the rate, as in transformers.
- A frame that FFmpeg would patch up from its neighbours because its data are damaged is an error where it is decoded: if it is taken, or lies
  between the key frame before and one that is. So is a file that holds more or fewer frames than its header says, or ends before its duration.
  What coding and container do not tell cannot be told here: VP8 and VP9 decode most damage to other pictures, and a cut off MPEG-TS or GIF has
  no header to compare with.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tangram.data.images import of
from tangram.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

ATTACHED_PICTURE = 0x400
"""FFmpeg's AV_DISPOSITION_ATTACHED_PIC."""
TELL_DURATION = ("matroska,webm", "flv")
"""FFmpeg's names of containers that tell no number of frames but a duration; of the others without one FFmpeg guesses it from the end of the file."""
SLACK = 1.0
"""Seconds by which such a duration may be wrong."""
VP8_SHOWN = 0x10
"""Bit of a VP8 frame's first byte: the frame is shown (RFC 6386, section 9.1)."""


@dataclass(frozen=True)
class Timeline:
    """When the frames of a video are shown."""

    frames: int
    duration: float
    """Seconds."""
    fps: float | None = None
    """Frames per second; None: the rate varies."""
    seconds: tuple[float, ...] = ()
    """Where the rate varies: each frame's time after the first."""

    def time(self, index: int) -> float:
        """Seconds from the first frame to frame ``index``."""
        return index / self.fps if self.fps else self.seconds[index]


class Packet(NamedTuple):
    """The data of one frame; times in ticks of the stream's time base."""

    pts: int | None
    dts: int | None
    duration: int
    is_key: bool


class _Inexact(Exception):
    """A seek did not lead to the frame that was looked for."""


class VideoFile:
    """A video file; opening it reads its header alone.

    Args:
        where: the sample, for messages.

    Raises:
        DataError: the file is missing, no video that FFmpeg knows, or holds no video stream.
    """

    def __init__(self, path: str, where: str = "") -> None:
        self.path = path
        self.where = where
        with self._opened() as (_, stream):
            self.width, self.height = int(stream.width), int(stream.height)
            self._timeline_of_header = _from_header(stream)

    @cached_property
    def timeline(self) -> Timeline:
        """From the header where it tells of every frame, as mp4's and mov's does, else from the time stamps of all packets; no frame is decoded.

        Raises:
            DataError: the video has no frames, or neither time stamps nor a frame rate.
        """
        if self._timeline_of_header:
            return self._timeline_of_header
        packets = self._packets
        if not packets:
            raise self._error("holds no video frames", "replace the file or remove the sample")
        with self._opened() as (_, stream):
            timeline = _from_packets(packets, stream)
        if timeline is None:
            raise self._error("has neither time stamps nor a frame rate", "write the file anew, as mp4")
        return timeline

    def pictures(self, indexes: Sequence[int]) -> Iterator[Image.Image]:
        """RGB pictures of the frames of these numbers, which ascend; each is decoded when it is asked for.

        Raises:
            DataError: a frame that is damaged or missing, of another size than the header says, or another number of frames than it says.
        """
        from PIL import Image

        if len(self._packets) != self.timeline.frames:
            counts = f"its header says {self.timeline.frames} frames but the file holds {len(self._packets)}"
            raise self._error(counts, "write the file anew")
        for index, frame in zip(indexes, self._frames(indexes), strict=True):
            if (frame.width, frame.height) != (self.width, self.height):
                sizes = f"frame {index} is {frame.width} x {frame.height} but the header says {self.width} x {self.height}"
                raise self._error(sizes, "write the file anew with frames of one size")
            yield Image.fromarray(frame.to_ndarray(format="rgb24"))

    def _frames(self, indexes: Sequence[int]) -> Iterator[Any]:
        """The frames of these numbers, by seeking if the file allows it, else by decoding all up to the last."""
        import av

        done = 0
        times = [packet.pts for packet in self._packets if packet.pts is not None]
        if len(set(times)) == len(self._packets):
            try:
                for frame in self._sought([sorted(times)[index] for index in indexes]):
                    yield frame
                    done += 1
                return
            except (_Inexact, av.FFmpegError):
                # Not every key frame is a place to begin at: what follows it may refer to what lies before.
                pass
        try:
            yield from self._counted_through(indexes[done:])
        except av.FFmpegError as error:
            raise self._error(f"cannot decode this video ({error.strerror})", "replace the file") from None

    def _sought(self, wanted: Sequence[int]) -> Iterator[Any]:
        """The frames with these time stamps. From one to the next it is decoded on, unless a key frame lies between them.

        Raises:
            _Inexact, av.FFmpegError: it cannot be done so.
        """
        keys = sorted((packet.pts, packet.dts) for packet in self._packets if packet.is_key and packet.pts is not None)
        with self._opened() as (container, stream):
            frames = container.decode(stream)
            last = None
            for pts in wanted:
                place = bisect_right(keys, pts, key=lambda key: key[0]) - 1
                if place > 0 and (last is None or keys[place][0] > last):
                    shown, read = keys[place]
                    container.seek(shown if read is None else read, stream=stream)
                    frames = container.decode(stream)
                yield _next_at(pts, frames)
                last = pts

    def _counted_through(self, indexes: Sequence[int]) -> Iterator[Any]:
        """The frames of these numbers; all up to the last are decoded."""
        left = list(reversed(indexes))
        number = -1
        with self._opened() as (container, stream):
            for number, frame in enumerate(container.decode(stream)):
                if frame.is_corrupt:
                    raise self._error(f"frame {number} is damaged", "replace the file")
                if left and number == left[-1]:
                    yield frame
                    left.pop()
                if not left:
                    return
        decoded = f"its header says {self.timeline.frames} frames but {number + 1} can be decoded"
        raise self._error(decoded, "the file is cut off or damaged: replace it")

    @cached_property
    def _packets(self) -> list[Packet]:
        """Those of all frames that are shown, in the order of the file.

        Raises:
            DataError: the file ends before its header says, or the container marks a packet as damaged.
        """
        import av

        shown: list[Packet] = []
        count, end = 0, 0.0
        with self._opened() as (container, stream):
            hides = stream.codec_context.name == "vp8"
            try:
                for packet in container.demux():
                    if not packet.size:
                        continue
                    end = max(end, float(((packet.pts or 0) + (packet.duration or 0)) * packet.time_base))
                    if packet.stream_index != stream.index:
                        continue
                    if packet.is_corrupt:
                        number = f"{count} of {stream.frames}" if stream.frames else f"{count}"
                        raise self._error(f"the data of frame {number} are damaged or cut off", "replace the file")
                    count += 1
                    if not packet.is_discard and not (hides and not bytes(packet)[0] & VP8_SHOWN):
                        shown.append(Packet(packet.pts, packet.dts, packet.duration or 0, packet.is_keyframe))
            except av.FFmpegError as error:
                raise self._error(f"cannot read this video ({error.strerror})", "replace the file") from None
            self._check_end(container, stream, count, end)
        return shown

    def _check_end(self, container: Any, stream: Any, count: int, end: float) -> None:
        """Compare what was read with what the header says of the whole file.

        Args:
            count: frames, hidden ones included.
            end: seconds, of all streams.
        """
        mend = "the file is cut off or damaged: replace it"
        if count < stream.frames:
            raise self._error(f"its header says {stream.frames} frames but the file holds {count}", mend)
        if container.format.name in TELL_DURATION and container.duration and end + SLACK < container.duration / 1e6:
            raise self._error(f"its header says {container.duration / 1e6:.2f} s but the file ends after {end:.2f} s", mend)

    @contextmanager
    def _opened(self) -> Iterator[tuple[Any, Any]]:
        """The container and its first video stream, at the beginning."""
        import av

        if not Path(self.path).is_file():
            raise DataError(f"{self.path}: no such video file{of(self.where)}")
        try:
            # Titles in an unknown encoding are no fault of the video.
            container = av.open(self.path, options={"err_detect": "explode"}, metadata_errors="ignore")
        except av.FFmpegError as error:
            raise self._error(f"cannot open this video ({error.strerror})", "replace the file") from None
        with container:
            kinds = ["cover picture" if stream.disposition & ATTACHED_PICTURE else stream.type for stream in container.streams]
            if "video" not in kinds:
                raise self._error(f"holds no video; its streams: {', '.join(kinds) or 'none'}", "replace the file or remove the sample")
            stream = container.streams[kinds.index("video")]
            context = stream.codec_context
            if context is None:
                raise self._error("is in a coding that this build of FFmpeg cannot decode", "write the file anew, as mp4 with H.264")
            # Workers read several videos at once already, and one thread reports a fault with the frame that has it.
            context.thread_count = 1
            # Else damaged frames are patched up from their neighbours and nothing is said.
            context.options = {"err_detect": "explode"}
            yield container, stream

    def _error(self, what: str, mend: str) -> DataError:
        return DataError(f"{self.path}: {what}{of(self.where)}; {mend}")


def _next_at(pts: int, frames: Iterator[Any]) -> Any:
    """The frame with this time stamp; those before it are passed over.

    Raises:
        _Inexact: there is none, or one of them is damaged, so that what follows may be.
    """
    for frame in frames:
        if frame.is_corrupt or frame.pts is None or frame.pts > pts:
            break
        if frame.pts == pts:
            return frame
    raise _Inexact


def _from_header(stream: Any) -> Timeline | None:
    """The timeline of a header that lists every frame and spaces them evenly; None: it does not."""
    entries, rate = stream.index_entries, stream.average_rate
    if not stream.frames or len(entries) != stream.frames or not stream.duration or not rate:
        return None
    times: list[int] = []
    for entry in entries:
        if entry.is_discard:
            return None
        times.append(entry.timestamp)
    if not _is_even(times, rate * stream.time_base):
        return None
    return Timeline(int(stream.frames), float(stream.duration * stream.time_base), float(rate))


def _from_packets(packets: Sequence[Packet], stream: Any) -> Timeline | None:
    """The timeline of a video whose packets were all read; None: they have no times and there is no rate."""
    base, rate = stream.time_base, stream.average_rate or stream.guessed_rate
    times = sorted(packet.pts for packet in packets if packet.pts is not None)
    timed = len(times) == len(packets)
    if rate and (not timed or _is_even(times, rate * base)):
        return Timeline(len(packets), float(len(packets) / rate), float(rate))
    if not timed:
        return None
    span = times[-1] - times[0] + max(packets, key=lambda packet: packet.pts or 0).duration
    seconds = tuple(float((time - times[0]) * base) for time in times)
    return Timeline(len(packets), float(span * base), seconds=seconds) if span > 0 else None


def _is_even(times: Sequence[int], per_tick: Fraction) -> bool:
    """Whether each time lies within a tick of where a constant rate puts it.

    Args:
        times: ticks, ascending.
        per_tick: frames per tick.
    """
    frames, ticks = per_tick.as_integer_ratio()
    return all(abs((time - times[0]) * frames - number * ticks) <= frames for number, time in enumerate(times))
