from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tangram.config.data import PreprocessParameters
from tangram.data.clip_images import ClipImageProcessor
from tangram.data.conversation import Video
from tangram.data.media import Media
from tangram.errors import ConfigError, DataError
from tangram.families.base import get_family
from tangram.families.llava.config import ClipEncoderConfig
from tangram.families.llava.tiny import image_processor as tiny_image_processor

Photo = Callable[[str], str]

PROCESSOR = {  # as in the hub's llava-1.5 folders
    "image_processor_type": "CLIPImageProcessor",
    "do_resize": True,
    "size": {"shortest_edge": 336},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": 336, "width": 336},
    "do_rescale": True,
    "rescale_factor": 0.00392156862745098,
    "do_normalize": True,
    "do_convert_rgb": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def encoder(side: int = 336, patch: int = 14) -> ClipEncoderConfig:
    """LLaVA-1.5's tower with the sides given."""
    vision = {"model_type": "clip_vision_model", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    hf = {"model_type": "llava", "vision_config": {**vision, "intermediate_size": 128, "image_size": side, "patch_size": patch}}
    model = get_family("llava").from_hf_config(hf)
    assert model.image_encoder is not None and isinstance(model.image_encoder.vision_encoder, ClipEncoderConfig)
    return model.image_encoder.vision_encoder


def preprocess(folder: Path, settings: dict[str, Any] = PROCESSOR, **limits: int) -> PreprocessParameters:
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return PreprocessParameters(model_name_or_path=str(folder), **limits)


@pytest.fixture
def media(tmp_path: Path) -> Media:
    return Media.from_config(preprocess(tmp_path), encoder())


def hf_pixels(picture: Image.Image, **settings: Any) -> np.ndarray:
    """[3, side, side] of transformers."""
    try:
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil as Processor
    except ImportError:
        from transformers.models.clip.image_processing_clip import CLIPImageProcessor as Processor
    known = {key: value for key, value in {**PROCESSOR, **settings}.items() if key != "image_processor_type"}
    pixels: np.ndarray = Processor(**known)(images=[picture], return_tensors="np")["pixel_values"][0]
    return pixels


def in_raster_order(pixels: np.ndarray, patch: int) -> np.ndarray:
    """[3, side, side] -> [patches, 3 * patch * patch], patch by patch, as a convolution of that stride sees them."""
    rows = pixels.shape[1] // patch
    squares = [pixels[:, y * patch : (y + 1) * patch, x * patch : (x + 1) * patch].reshape(-1) for y in range(rows) for x in range(rows)]
    return np.stack(squares)


@pytest.mark.compat
@pytest.mark.parametrize("name", ["astronaut.png", "camera.png", "chelsea.png", "coffee.png", "rocket.jpg", "microaneurysms.png", "text.png"])
def test_patches_are_those_of_transformers_bit_for_bit(media: Media, photo: Photo, name: str) -> None:
    medium, patches = media.image(photo(name), "data"), media.image_pixels(photo(name), "data")
    theirs = hf_pixels(Image.open(photo(name)).convert("RGB"))
    assert medium.grid == (1, 24, 24) and media.tokens(medium) == 576
    assert patches.expand().dtype == np.float32 and patches.shape == (576, 588)
    assert np.array_equal(patches, in_raster_order(theirs, 14))


@pytest.mark.parametrize("size", [(1, 1), (200, 1), (1, 200), (336, 337), (337, 336), (335, 501), (336, 336)])
def test_strange_sizes_are_those_of_transformers(media: Media, tmp_path: Path, size: tuple[int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    path = tmp_path / "picture.png"
    Image.fromarray(pixels).save(path)
    theirs = hf_pixels(Image.fromarray(pixels))
    assert np.array_equal(media.image_pixels(str(path), "data"), in_raster_order(theirs, 14))


def test_another_side_patch_and_filter(tmp_path: Path, photo: Photo) -> None:
    settings = {**PROCESSOR, "size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}, "resample": 2}
    processor = ClipImageProcessor.from_config(preprocess(tmp_path, settings), encoder(64, 16))
    patches, grid = processor.patches(photo("coffee.png"))
    theirs = hf_pixels(Image.open(photo("coffee.png")), **{key: settings[key] for key in ("size", "crop_size", "resample")})
    assert grid == (1, 4, 4)
    assert np.array_equal(patches, in_raster_order(theirs, 16))


def test_the_file_of_a_tiny_model_and_sizes_as_numbers_are_read(tmp_path: Path) -> None:
    media = Media.from_config(preprocess(tmp_path, tiny_image_processor()), encoder(56))
    assert str(media) == "images: 56 x 56, patch_size 14"
    plain = {**PROCESSOR, "size": 336, "crop_size": 336}
    assert ClipImageProcessor.from_config(preprocess(tmp_path, plain), encoder()).image_size == 336


def test_the_header_alone_gives_the_grid(media: Media, photo: Photo, tmp_path: Path) -> None:
    half = tmp_path / "half.jpg"
    half.write_bytes(Path(photo("rocket.jpg")).read_bytes()[:40000])
    assert media.image(str(half), "data").grid == (1, 24, 24)
    with pytest.raises(DataError, match=r"half\.jpg: cannot decode this image \(image file is truncated.*in data, record 7"):
        media.image_pixels(str(half), "data, record 7")


def test_a_picture_too_thin_is_named(media: Media, tmp_path: Path) -> None:
    path = tmp_path / "thin.png"
    Image.new("L", (201, 1)).save(path)
    with pytest.raises(DataError, match=r"thin\.png: its sides 201 x 1 are to each other as 201.00 to 1; at most 200, in data, record 7"):
        media.image(str(path), "data, record 7")


def test_videos_are_refused(media: Media) -> None:
    for call in (media.video, media.video_pixels):
        with pytest.raises(DataError, match=r"a\.mp4: a video, in data, record 7, but this model takes images alone"):
            call(Video(("a.mp4",)), "data, record 7")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": {"shortest_edge": 224}}, r"size is \{'shortest_edge': 224\} and crop_size .* but model.json's vision encoder has image_size 336"),
        ({"size": {"height": 336, "width": 336}}, "size is .* must be"),
        ({"crop_size": {"height": 336, "width": 224}}, "crop_size .* must be"),
        ({"do_center_crop": False}, "do_center_crop is False; the vision encoder needs all of resize, center_crop, rescale, normalize, convert_rgb"),
        ({"do_pad": True}, "do_pad is True; pictures are cropped to a square here, not padded"),
        ({"image_std": [1.0]}, "hold 3 and 1 numbers"),
        ({"image_std": [1.0, 0.0, 1.0]}, r"image_std holds 0\.0; every number must be above 0"),
        ({"resample": 9}, "resample is 9"),
        ({"size": None}, "size is None"),
    ],
)
def test_a_processor_file_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClipImageProcessor.from_config(preprocess(tmp_path, {**PROCESSOR, **change}), encoder())


@pytest.mark.parametrize("limits", [{"image_max_pixels": 262144 // 4}, {"image_min_pixels": 336 * 336 + 1}])
def test_pixel_limits_that_the_square_breaks_are_refused(tmp_path: Path, limits: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="takes pictures of one size, 336 x 336 = 112896 pixels, which lies outside; leave the limits out"):
        ClipImageProcessor.from_config(preprocess(tmp_path, **limits), encoder())
    assert ClipImageProcessor.from_config(preprocess(tmp_path, image_min_pixels=336 * 336, image_max_pixels=336 * 336), encoder())
