"""Which frames of a video are taken, and their patches."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tangram.config.data import PreprocessParameters
from tangram.config.model import ModelConfig
from tangram.data import frame_list
from tangram.data.conversation import Video
from tangram.data.images import ImageProcessor
from tangram.data.media import Media
from tangram.data.video import VideoProcessor, choose_frames
from tangram.data.video_file import VideoFile
from tangram.errors import ConfigError, DataError
from tests.data.video_kit import Make, clip, every_frame, write_video

GOLDEN = Path(__file__).parent / "golden"


class TestChoice:
    """Numbers, times and grids."""

    def test_frames_are_those_of_numpy(self) -> None:
        for total in (1, 2, 3, 7, 20, 120, 250, 380, 1441, 100003):
            for count in range(1, min(total, 130) + 1):
                assert choose_frames(total, count) == np.linspace(0, total - 1, count).astype(int).tolist()

    def test_two_frames_from_each_second_of_a_real_video(self, make_videos: Make) -> None:
        """250 frames of 640 x 272, 25 a second: 20 of them, so ten steps; 272 x 640 is 140 x 392 within 65,536 pixels."""
        medium = make_videos().medium(Video((clip("bikes.mp4"),)))
        assert medium.grid == (10, 10, 28)
        assert medium.seconds_per_grid == 1.0
        indexes = np.linspace(0, 249, 20).astype(int)
        assert medium.timestamps == pytest.approx((indexes[::2] + indexes[1::2]) / 50)

    def test_a_broadcast_rate(self, make_videos: Make) -> None:
        """120 frames at 30000/1001 are 4.004 s: eight frames."""
        medium = make_videos().medium(Video((clip("carphone_pristine.mp4"),)))
        assert medium.grid[0] == 4 and medium.seconds_per_grid == pytest.approx(1.001)
        assert medium.timestamps[0] == pytest.approx(17 * 1001 / 60000)

    def test_a_video_with_sound(self, make_videos: Make) -> None:
        """132 frames, 5.28 s: 10 frames; the sound is 5.312 s long, which does not count."""
        medium = make_videos().medium(Video((clip("bigbuckbunny.mp4"),)))
        assert medium.grid == (5, 12, 24) and medium.seconds_per_grid == pytest.approx(1.056)

    def test_timestamps_come_from_the_rate_of_the_file(self, make_videos: Make, tmp_path: Path) -> None:
        """380 frames, 30 a second, 8 taken, as a public report has it."""
        path = write_video(tmp_path / "long.mp4", frames=380, rate=30, size=(32, 32))
        medium = make_videos(video_num_frames=8).medium(Video((path,)))
        assert medium.grid[0] == 4
        assert [f"{seconds:.1f}" for seconds in medium.timestamps] == ["0.9", "4.5", "8.1", "11.7"]

    def test_an_odd_number_of_frames_repeats_the_last(self, make_videos: Make, tmp_path: Path) -> None:
        path = write_video(tmp_path / "short.mp4", frames=20)
        patches, medium = make_videos(video_num_frames=7).patches(Video((path,)))
        assert medium.grid[0] == len(medium.timestamps) == 4
        assert medium.timestamps[-1] == 19 / 25 and medium.seconds_per_grid == pytest.approx(2 * 0.8 / 7)
        steps = patches.expand().reshape(4, -1, 3, 2, 196)
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
    def test_keys_of_the_config_choose_the_number(self, make_videos: Make, tmp_path: Path, limits: dict[str, Any], steps: int) -> None:
        path = write_video(tmp_path / "v.mp4", frames=60)
        patches, medium = make_videos(**limits).patches(Video((path,)))
        assert medium.grid[0] == steps and len(patches) == np.prod(medium.grid)

    def test_where_the_rate_varies_times_are_those_of_the_frames(self, make_videos: Make, tmp_path: Path) -> None:
        times = [100, 140, 300, 320, 700, 1000, 1020, 1500, 1510, 2100]
        for kind in ("mp4", "mkv"):
            path = write_video(tmp_path / f"vary.{kind}", frames=10, times=times)
            medium = make_videos(video_num_frames=10).medium(Video((path,)))
            assert medium.timestamps == pytest.approx([0.02, 0.21, 0.75, 1.16, 1.705]), kind
            assert VideoFile(path).timeline.fps is None

    def test_pixel_limits_hold_for_each_frame_whatever_their_number(self, make_videos: Make, tmp_path: Path) -> None:
        path = write_video(tmp_path / "v.mp4", frames=40, size=(640, 480))
        for count in (2, 40):
            medium = make_videos(video_num_frames=count, video_max_pixels=28 * 28 * 12, video_min_pixels=0).medium(Video((path,)))
            assert medium.grid == (count // 2, 6, 8)
        larger = make_videos(video_min_pixels=28 * 28 * 100, video_max_pixels=28 * 28 * 200).medium(Video((clip("carphone_pristine.mp4"),)))
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
        difference = np.abs((patches.expand() * scale + shift) * 255 - golden[f"{case}_bytes"].astype(np.float64))
        assert difference.max() < 1.001 and difference.mean() < 0.02

    @pytest.mark.compat
    def test_every_frame_is_resized_and_cut_as_transformers_does_with_a_picture(self, make_videos: Make) -> None:
        """Bit for bit; a picture's patch holds it twice, a video's two frames."""
        try:
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil as Processor
        except ImportError:
            from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor as Processor
        name = clip("carphone_pristine.mp4")
        patches, medium = make_videos(video_num_frames=5, video_min_pixels=3136, video_max_pixels=50176).patches(Video((name,)))
        ours = patches.expand().reshape(3, -1, 3, 2, 196)
        frames = every_frame(name)
        theirs = Processor(min_pixels=3136, max_pixels=50176)
        for place, index in enumerate((0, 29, 59, 89, 119, 119)):
            pixels = theirs(images=[Image.fromarray(frames[index])], return_tensors="np")["pixel_values"].reshape(-1, 3, 2, 196)
            assert np.array_equal(ours[place // 2, :, :, place % 2], pixels[:, :, 0]), index
        assert ours.dtype == np.float32 and len(patches) == np.prod(medium.grid)

    def test_a_video_of_one_repeated_picture_is_that_picture(self, make_videos: Make, photo: Callable[[str], str]) -> None:
        picture = photo("rocket.jpg")
        videos = make_videos(video_min_pixels=3136, video_max_pixels=50176)
        images = ImageProcessor(14, 2, 2, 3136, 50176, videos.values)
        patches, medium = videos.patches(Video((picture, picture), is_frames=True))
        want, grid = images.patches(picture)
        assert medium.grid == grid and np.array_equal(patches, want)


class TestFrameLists:
    @pytest.fixture
    def frames(self, tmp_path: Path) -> tuple[str, ...]:
        paths = [tmp_path / f"{number}.png" for number in range(8)]
        for number, path in enumerate(paths):
            Image.new("RGB", (56, 84), (30 * number, 0, 0)).save(path)
        return tuple(map(str, paths))

    @pytest.mark.parametrize(("sample_fps", "markers"), [(1.0, ["0.5", "2.5", "4.5", "6.5"]), (2.0, ["0.2", "1.2", "2.2", "3.2"])])
    def test_the_sample_tells_their_rate(self, make_videos: Make, frames: tuple[str, ...], sample_fps: float, markers: list[str]) -> None:
        """Times as a public report has them. None is left out, whatever ``video_fps`` says: somebody chose them already."""
        patches, medium = make_videos(video_fps=0.5, video_min_pixels=0).patches(Video(frames, is_frames=True, sample_fps=sample_fps))
        assert medium.grid == (4, 6, 4) and medium.seconds_per_grid == 2 / sample_fps
        assert [f"{seconds:.1f}" for seconds in medium.timestamps] == markers
        values = patches.expand().reshape(4, 24, 3, 2, 196)[:, :, 0].reshape(4, 24, 2, 196)
        assert [values[step, 0, time, 0] for step in range(4) for time in range(2)] == pytest.approx(
            [(30 * number / 255 - 0.48145466) / 0.26862954 for number in range(8)]
        )

    def test_an_absent_rate_is_two_and_is_said_once(self, make_videos: Make, frames: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
        frame_list._say.cache_clear()
        video = Video(frames, is_frames=True)
        with caplog.at_level(logging.WARNING, logger="tangram"):
            media = [make_videos().medium(video, f"data, record {number}") for number in range(3)]
        assert media[0].seconds_per_grid == 1.0
        said = "frames of a video without sample_fps, in data, record 0: 2.0 a second are assumed, here and wherever it is missing"
        assert [record.getMessage() for record in caplog.records] == [said]

    def test_a_long_list_is_thinned_evenly(self, make_videos: Make, frames: tuple[str, ...]) -> None:
        for limit in ({"video_maxlen": 3}, {"video_num_frames": 3}):
            medium = make_videos(**limit).medium(Video(frames, is_frames=True, sample_fps=1.0))
            assert medium.grid[0] == 2 and medium.timestamps == (1.5, 7.0)

    def test_faults_name_the_frame(self, make_videos: Make, frames: tuple[str, ...], tmp_path: Path) -> None:
        Image.new("RGB", (56, 56)).save(tmp_path / "other.png")
        (tmp_path / "half.png").write_bytes(Path(frames[0]).read_bytes()[:60])
        cases = {
            "other.png": r"other\.png: is 56 x 56 but the video's first frame, .*0\.png, 56 x 84, in data, record 7",
            "gone.png": r"gone\.png: no such image file, in data, record 7",
        }
        for name, message in cases.items():
            video = Video((*frames, str(tmp_path / name)), is_frames=True, sample_fps=1.0)
            for call in (make_videos().medium, make_videos().patches):
                with pytest.raises(DataError, match=message):
                    call(video, "data, record 7")
        with pytest.raises(DataError, match=r"half\.png: cannot decode this image .*, in data, record 7"):
            make_videos().patches(Video((*frames, str(tmp_path / "half.png")), is_frames=True, sample_fps=1.0), "data, record 7")
        with pytest.raises(DataError, match=r"0\.png: sample_fps of its frames is -1\.0, in data, record 7; it must be above 0"):
            make_videos().medium(Video(frames, is_frames=True, sample_fps=-1.0), "data, record 7")
        with pytest.raises(DataError, match="a video is an empty list of frames, in data, record 7"):
            make_videos().medium(Video((), is_frames=True, sample_fps=1.0), "data, record 7")


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

    def test_limits_that_leave_no_size_are_refused(self, make_videos: Make) -> None:
        with pytest.raises(ConfigError, match="video_min_pixels 256, video_max_pixels 700: the maximum must be at least 784"):
            make_videos(video_max_pixels=700)
