"""Video files: every container and coding gives the frames that FFmpeg decodes from the beginning; faults are named."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from av.stream import Disposition

from tangram.data.conversation import Video
from tangram.data.video_file import VideoFile
from tangram.errors import DataError
from tests.data.video_kit import Make, clip, copy_packets, every_frame, write_video

KINDS: dict[str, dict[str, Any]] = {
    "h264.mp4": {},
    "h264.mkv": {"g": "12"},
    "h264.mov": {"g": "12"},
    "h264.ts": {"g": "12"},
    "h264.h264": {},
    "open.mp4": {"x264-params": "keyint=12:open-gop=1:bframes=3"},
    "refresh.mp4": {"x264-params": "intra-refresh=1:keyint=12"},
    "fragments.mp4": {"g": "12"},
    "vp8.webm": {"codec": "libvpx", "g": "12"},
    "vp9.webm": {"codec": "libvpx-vp9"},
    "mpeg4.avi": {"codec": "mpeg4", "bf": "2", "g": "12"},
    "mpeg2.mpg": {"codec": "mpeg2video", "bf": "2", "g": "12"},
    "mjpeg.avi": {"codec": "mjpeg"},
}
"""Containers with and without an index, time stamps, frames that depend on later ones and key frames that are no place to begin at."""


class TestFiles:
    @pytest.mark.parametrize("kind", KINDS)
    def test_sought_frames_are_those_of_decoding_through(self, tmp_path: Path, kind: str) -> None:
        path = write_video(tmp_path / kind, **KINDS[kind])
        if kind == "fragments.mp4":
            path = copy_packets(path, tmp_path / "cut.mp4", movflags="frag_keyframe+empty_moov")
        frames, file = every_frame(path), VideoFile(path)
        assert len(frames) == file.timeline.frames == 60
        assert file.timeline.duration == pytest.approx(2.4) and file.timeline.fps == 25
        for indexes in ([0, 30, 59], [17, 18, 41, 58], [59], list(range(60))):
            pictures = [np.asarray(picture) for picture in file.pictures(indexes)]
            assert len(pictures) == len(indexes)
            assert all(np.array_equal(picture, frames[index]) for picture, index in zip(pictures, indexes, strict=True)), indexes

    @pytest.mark.parametrize("kind", ["mp4", "mkv", "ts"])
    def test_few_frames_of_many_are_found_without_decoding_the_rest(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
        """With a key frame every ten, two frames of 200 cost at most twenty, and a few that a decoder reads ahead."""
        path = write_video(tmp_path / f"v.{kind}", frames=200, g="10")
        decoded = 0

        class Counting:
            def __init__(self, container: Any) -> None:
                self.container = container

            def decode(self, stream: Any) -> Iterator[Any]:
                nonlocal decoded
                for frame in self.container.decode(stream):
                    decoded += 1
                    yield frame

            def __getattr__(self, name: str) -> Any:
                return getattr(self.container, name)

        opened = VideoFile._opened

        @contextmanager
        def counted(file: VideoFile) -> Iterator[tuple[Any, Any]]:
            with opened(file) as (container, stream):
                yield Counting(container), stream

        monkeypatch.setattr(VideoFile, "_opened", counted)
        assert len(list(VideoFile(path).pictures([105, 198]))) == 2
        assert 0 < decoded <= 25

    def test_no_frame_is_decoded_for_the_grid(self, make_videos: Make, tmp_path: Path) -> None:
        data = bytearray(Path(clip("bikes.mp4")).read_bytes())
        start, end = data.find(b"mdat") + 4, data.find(b"moov") - 4
        data[start:end] = bytes(end - start)
        path = tmp_path / "blank.mp4"
        path.write_bytes(data)
        assert make_videos().medium(Video((str(path),))) == make_videos().medium(Video((clip("bikes.mp4"),)))
        with pytest.raises(DataError, match=r"blank\.mp4: cannot decode this video .*, in data, record 7; replace the file"):
            make_videos().patches(Video((str(path),)), "data, record 7")

    def test_frames_that_an_edit_list_cuts_off_do_not_count(self, tmp_path: Path) -> None:
        path = write_video(tmp_path / "whole.mp4")

        def earlier(packet: Any) -> None:
            packet.pts, packet.dts = (int(time - Fraction(20, 25) / packet.time_base) for time in (packet.pts, packet.dts))

        cut = copy_packets(path, tmp_path / "cut.mp4", earlier)
        file, frames = VideoFile(cut), every_frame(path)
        assert file.timeline.frames == 40 and file.timeline.duration == pytest.approx(1.6)
        assert [np.array_equal(np.asarray(picture), frames[20 + index]) for index, picture in enumerate(file.pictures(range(40)))] == [True] * 40

    def test_hidden_frames_of_vp8_do_not_count(self, tmp_path: Path) -> None:
        """A frame of VP8 whose header says that it is not shown (RFC 6386, section 9.1) is decoded and not put out."""
        path = write_video(tmp_path / "whole.webm", codec="libvpx", frames=20)
        hidden: list[int] = []

        def hide(packet: Any) -> None:
            if packet.pts == 400:
                data = np.frombuffer(packet, dtype=np.uint8)
                data.flags.writeable = True
                data[0] &= 0xEF
                hidden.append(packet.pts)

        other = copy_packets(path, tmp_path / "hides.webm", hide)
        assert hidden and len(every_frame(other)) == 19
        assert VideoFile(other).timeline.frames == len(list(VideoFile(other).pictures(range(19)))) == 19

    def test_rotation_is_not_applied(self, make_videos: Make, tmp_path: Path) -> None:
        path = write_video(tmp_path / "v.mp4", frames=8, size=(96, 48))
        data = bytearray(Path(path).read_bytes())
        matrix = data.find(b"tkhd") + 4 + 40
        assert struct.unpack(">9i", data[matrix : matrix + 36]) == (1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
        data[matrix : matrix + 36] = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)
        turned = tmp_path / "turned.mp4"
        turned.write_bytes(data)
        with av.open(str(turned)) as container:
            assert next(container.decode(video=0)).rotation % 360 in (90, 270)
        (ours, medium), (plain, _) = (make_videos(video_fps=25.0).patches(Video((name,))) for name in (str(turned), path))
        assert medium.grid[1] < medium.grid[2] and np.array_equal(ours, plain)


class Without:
    """A stream for which some attributes are None."""

    def __init__(self, stream: Any, names: Sequence[str]) -> None:
        self.stream = stream
        self.names = names

    def __getattr__(self, name: str) -> Any:
        return None if name in self.names else getattr(self.stream, name)


class TestFaults:
    """Each names path and sample."""

    def fails(self, make_videos: Make, path: Path | str, message: str, *, header: bool = True) -> None:
        video = Video((str(path),))
        for call in (make_videos().medium, make_videos().patches) if header else (make_videos().patches,):
            with pytest.raises(DataError, match=message) as fault:
                call(video, "data, record 7")
            assert str(path) in str(fault.value) and ", in data, record 7" in str(fault.value) and "\n" not in str(fault.value)

    def test_files_that_are_no_videos(self, make_videos: Make, tmp_path: Path) -> None:
        (tmp_path / "empty.mp4").write_bytes(b"")
        (tmp_path / "text.mp4").write_text("no video " * 1000)
        self.fails(make_videos, tmp_path / "gone.mp4", "no such video file")
        self.fails(make_videos, tmp_path, "no such video file")
        self.fails(make_videos, tmp_path / "empty.mp4", r"cannot open this video \(Invalid data found when processing input\)")
        self.fails(make_videos, tmp_path / "text.mp4", r"cannot open this video \(Invalid data found when processing input\)")

    def test_sound_alone(self, make_videos: Make, tmp_path: Path) -> None:
        sound = copy_packets(clip("bigbuckbunny.mp4"), tmp_path / "sound.mp4", kind="audio")
        self.fails(make_videos, sound, "holds no video; its streams: audio")

    def test_music_with_a_cover_picture(self, make_videos: Make, tmp_path: Path) -> None:
        path = tmp_path / "music.mp3"
        with av.open(str(path), "w") as container:
            sound, cover = container.add_stream("mp3", rate=44100), container.add_stream("png", rate=1)
            cover.width, cover.height, cover.pix_fmt, cover.disposition = 32, 32, "rgb24", Disposition.attached_pic
            container.mux(cover.encode(av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")))
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 44100), np.int16), format="s16", layout="mono")
            silence.sample_rate = 44100
            container.mux(sound.encode(silence) + sound.encode(None))
        self.fails(make_videos, path, "holds no video; its streams: audio, cover picture")

    def test_neither_time_stamps_nor_a_rate(self, make_videos: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """FFmpeg guesses a rate for every file that could be made here, so it is taken away."""
        path = write_video(tmp_path / "v.h264", frames=4)
        opened = VideoFile._opened

        @contextmanager
        def without_rate(file: VideoFile) -> Iterator[tuple[Any, Any]]:
            with opened(file) as (container, stream):
                yield container, Without(stream, ("average_rate", "guessed_rate"))

        monkeypatch.setattr(VideoFile, "_opened", without_rate)
        self.fails(make_videos, path, "has neither time stamps nor a frame rate, in data, record 7; write the file anew, as mp4")

    def test_no_frames(self, make_videos: Make, tmp_path: Path) -> None:
        """A file of fragments that has none yet."""
        path = copy_packets(write_video(tmp_path / "v.mp4", frames=4), tmp_path / "none.mp4", movflags="frag_keyframe+empty_moov")
        data = Path(path).read_bytes()
        Path(path).write_bytes(data[: data.find(b"moof") - 4])
        self.fails(make_videos, path, "holds no video frames")

    def test_a_file_cut_off_behind_its_header(self, make_videos: Make, tmp_path: Path) -> None:
        """In the middle of a frame, and between two."""
        whole = copy_packets(clip("bikes.mp4"), tmp_path / "whole.mp4", movflags="faststart")
        with av.open(whole) as container:
            place, size = next((packet.pos, packet.size) for number, packet in enumerate(container.demux(video=0)) if number == 116)
        path = tmp_path / "cut.mp4"
        path.write_bytes(Path(whole).read_bytes()[: place + size // 2])
        assert make_videos().medium(Video((str(path),))).grid == (10, 10, 28)
        self.fails(make_videos, path, "the data of frame 116 of 250 are damaged or cut off, in .*; replace the file", header=False)
        path.write_bytes(Path(whole).read_bytes()[:place])
        self.fails(
            make_videos, path, "its header says 250 frames but the file holds 116, in .*; the file is cut off or damaged: replace it", header=False
        )

    @pytest.mark.parametrize(
        ("kind", "message"),
        [
            ("mkv", r"its header says 2\.40 s but the file ends after [01]\.\d\d s, in .*; the file is cut off or damaged: replace it"),
            ("flv", r"the data of frame \d+ are damaged or cut off, in .*; replace the file"),
            ("mp4", r"the data of frame \d+ are damaged or cut off, in .*; replace the file"),
            ("avi", r"the data of frame \d+ of 60 are damaged or cut off, in .*; replace the file"),
        ],
    )
    def test_a_cut_off_file_without_an_index(self, make_videos: Make, tmp_path: Path, kind: str, message: str) -> None:
        path = Path(write_video(tmp_path / f"v.{kind}", codec="flv" if kind == "flv" else "mpeg4"))
        if kind == "mp4":
            path = Path(copy_packets(str(path), tmp_path / "fragments.mp4", movflags="frag_keyframe+empty_moov"))
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 6 // 10])
        self.fails(make_videos, path, message)

    def test_fewer_frames_than_the_header_of_an_avi_says(self, make_videos: Make, tmp_path: Path) -> None:
        """Its list of frames ends where the number of frames in its header says that there are more."""
        path = Path(write_video(tmp_path / "v.avi", codec="mjpeg", frames=10))
        data = bytearray(path.read_bytes())
        length = data.find(b"vids") + 32
        assert struct.unpack("<I", data[length : length + 4]) == (10,)
        data[length : length + 4] = struct.pack("<I", 12)
        path.write_bytes(data)
        self.fails(make_videos, path, "its header says 12 frames but the file holds 10")

    def test_a_file_cut_off_before_its_header(self, make_videos: Make, tmp_path: Path) -> None:
        data = Path(clip("bikes.mp4")).read_bytes()
        (tmp_path / "cut.mp4").write_bytes(data[: len(data) // 2])
        self.fails(make_videos, tmp_path / "cut.mp4", "cannot open this video")

    def test_a_damaged_frame_is_not_patched_up(self, make_videos: Make, tmp_path: Path) -> None:
        """Frame 97 of 250, which FFmpeg makes from its neighbours."""
        data = bytearray(Path(clip("bikes.mp4")).read_bytes())
        data[200000:200400] = bytes(range(200)) * 2
        path = tmp_path / "damaged.mp4"
        path.write_bytes(data)
        good, patched = every_frame(clip("bikes.mp4")), every_frame(str(path))
        assert len(patched) == 250 and not np.array_equal(good[97], patched[97])
        self.fails(make_videos, path, "frame 97 is damaged, in data, record 7; replace the file", header=False)

    def test_a_damaged_frame_of_hevc_ends_it(self, make_videos: Make, tmp_path: Path) -> None:
        """By default FFmpeg leaves the frame out, decodes those after it from what is left and marks none of them."""
        whole = write_video(tmp_path / "whole.mp4", codec="libx265", frames=30, size=(128, 96), **{"x265-params": "log-level=none"})
        with av.open(whole) as container:
            place, size = next((packet.pos, packet.size) for number, packet in enumerate(container.demux(video=0)) if number == 12)
        data = bytearray(Path(whole).read_bytes())
        data[place + size // 2 : place + size] = bytes(size - size // 2)
        path = tmp_path / "damaged.mp4"
        path.write_bytes(data)
        self.fails(make_videos, path, r"cannot decode this video \(Invalid data found when processing input\)", header=False)

    def test_a_coding_without_a_decoder(self, make_videos: Make, tmp_path: Path) -> None:
        path = Path(write_video(tmp_path / "v.avi", codec="mpeg4", frames=4))
        path.write_bytes(path.read_bytes().replace(b"FMP4", b"ZZZZ"))
        self.fails(make_videos, path, "is in a coding that this build of FFmpeg cannot decode")

    def test_frames_of_another_size_than_the_header_says(self, make_videos: Make, tmp_path: Path) -> None:
        small, large = (write_video(tmp_path / f"{side}.h264", frames=20, size=(side, side)) for side in (48, 64))
        path = tmp_path / "both.h264"
        path.write_bytes(Path(small).read_bytes() + Path(large).read_bytes())
        self.fails(make_videos, path, r"frame \d+ is 64 x 64 but the header says 48 x 48", header=False)

    def test_frames_too_thin(self, make_videos: Make, tmp_path: Path) -> None:
        path = write_video(tmp_path / "thin.mp4", frames=2, size=(2, 402))
        self.fails(make_videos, path, "its sides 2 x 402 are to each other as 201.00 to 1")
