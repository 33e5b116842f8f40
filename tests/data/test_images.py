from __future__ import annotations

import json
import os
import pickle
import random
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from tangram.config.data import PreprocessParameters
from tangram.config.model import ModelConfig
from tangram.data.images import ImageProcessor
from tangram.data.patches import smart_resize
from tangram.errors import ConfigError, DataError

Photo = Callable[[str], str]


@pytest.fixture
def processor(hf_dir: Path, model: ModelConfig) -> Callable[[int, int], ImageProcessor]:
    def make(low: int, high: int) -> ImageProcessor:
        assert model.image_encoder is not None
        preprocess = PreprocessParameters(model_name_or_path=str(hf_dir), image_min_pixels=low, image_max_pixels=high)
        return ImageProcessor.from_config(preprocess, model.image_encoder.vision_encoder)

    return make


Make = Callable[[int, int], ImageProcessor]


def hf_processor(low: int, high: int) -> Any:
    try:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil as Processor
    except ImportError:
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor as Processor
    return Processor(min_pixels=low, max_pixels=high)


@pytest.mark.compat
@pytest.mark.parametrize(("low", "high"), [(3136, 200704), (1024, 84 * 84), (500000, 1003520)])
@pytest.mark.parametrize("name", ["astronaut.png", "camera.png", "chelsea.png", "coffee.png", "rocket.jpg", "microaneurysms.png", "text.png"])
def test_patches_are_those_of_transformers_bit_for_bit(processor: Make, photo: Photo, name: str, low: int, high: int) -> None:
    ours, grid = processor(low, high).patches(photo(name))
    theirs = hf_processor(low, high)(images=[Image.open(photo(name)).convert("RGB")], return_tensors="np")
    assert list(grid) == theirs["image_grid_thw"][0].tolist()
    assert ours.expand().dtype == np.float32 and ours.shape == theirs["pixel_values"].shape
    assert np.array_equal(ours, theirs["pixel_values"])


def test_drawn_pictures_of_a_published_set(processor: Make) -> None:
    import easy_vqa

    path = easy_vqa.get_test_image_paths()[0]
    ours, grid = processor(3136, 7056).patches(path)
    theirs = hf_processor(3136, 7056)(images=[Image.open(path).convert("RGB")], return_tensors="np")
    assert np.array_equal(ours, theirs["pixel_values"]) and grid == (1, 4, 4)


@pytest.mark.parametrize("name", ["rocket.jpg", "chelsea.png"])
def test_a_picture_is_decoded_and_resized_once_and_kept_as_bytes(
    processor: Make, photo: Photo, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What makes it quicker than in transformers; ``bench/data.py`` has the times."""
    done: list[str] = []

    def counted(owner: Any, function: str) -> None:
        own = getattr(owner, function)

        def call(*arguments: Any, **more: Any) -> Any:
            done.append(function)
            return own(*arguments, **more)

        monkeypatch.setattr(owner, function, call)

    for owner, function in ((Image, "_getdecoder"), (Image.Image, "resize"), (Image.Image, "convert")):
        counted(owner, function)
    ours = processor(3136, 262144)
    assert ours.grid(photo(name)) and done == [], "the header is enough"
    patches, (_, rows, columns) = ours.patches(photo(name))
    assert done == ["_getdecoder", "resize"]
    assert len(pickle.dumps(patches)) < 1.1 * 3 * (14 * rows) * (14 * columns), "one byte a channel and pixel, and no frame twice"


MODES = {
    "1": ("tiff", "png", "bmp"),
    "L": ("tiff", "png", "jpg", "jp2"),
    "LA": ("tiff", "png"),
    "P": ("tiff", "png", "gif"),
    "PA": ("tiff",),
    "RGB": ("tiff", "png", "jpg", "webp", "bmp", "jp2"),
    "RGBA": ("tiff", "png", "webp"),
    "RGBX": ("tiff",),
    "CMYK": ("tiff", "jpg"),
    "YCbCr": ("tiff", "jpg"),
    "LAB": ("tiff",),
}
"""Pillow's modes and files that hold them. Of the rest, HSV, La and RGBa, none does."""


@pytest.mark.parametrize(("mode", "kind"), [(mode, kind) for mode, kinds in MODES.items() for kind in kinds])
def test_every_mode_becomes_rgb_as_in_transformers(processor: Make, photo: Photo, tmp_path: Path, mode: str, kind: str) -> None:
    path = tmp_path / f"picture.{kind}"
    small = Image.open(photo("chelsea.png")).resize((90, 70))
    # Pillow converts no picture to Lab without a profile, so these are the bytes of another.
    (small.convert(mode) if mode != "LAB" else Image.frombytes("LAB", small.size, small.tobytes())).save(path)
    with Image.open(path) as image:
        theirs = hf_processor(3136, 50176)(images=[image], return_tensors="np")
    assert np.array_equal(processor(3136, 50176).patches(str(path))[0], theirs["pixel_values"])


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I", "F"])
def test_modes_that_pillow_would_clip_are_refused(processor: Make, tmp_path: Path, mode: str) -> None:
    path = tmp_path / "picture.tiff"
    Image.new(mode, (60, 60)).save(path)
    message = rf"picture\.tiff: a picture of mode '{mode}' \(one channel, more than 8 bits\), in data, record 7; save it with 8 bits"
    for call in (processor(0, 784).grid, processor(0, 784).patches):
        with pytest.raises(DataError, match=message):
            call(str(path), "data, record 7")


def png(width: int, height: int, bits: int, colour: int, data: bytes) -> bytes:
    """A PNG file of given header and raw rows."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def test_of_colours_with_sixteen_bits_the_upper_eight_count(processor: Make, tmp_path: Path) -> None:
    row = b"\0" + struct.pack(">3H", 0x12FF, 0x8000, 0xFE7F) * 28
    (tmp_path / "deep.png").write_bytes(png(28, 28, 16, 2, row * 28))
    Image.new("RGB", (28, 28), (0x12, 0x80, 0xFE)).save(tmp_path / "plain.png")
    make = processor(0, 784)
    assert np.array_equal(make.patches(str(tmp_path / "deep.png"))[0], make.patches(str(tmp_path / "plain.png"))[0])


def test_a_picture_of_a_palette_with_a_transparent_colour_keeps_that_colour(processor: Make, tmp_path: Path) -> None:
    red = Image.new("RGB", (28, 28), (255, 0, 0))
    red.save(tmp_path / "rgb.png")
    palette = red.convert("P")
    palette.save(tmp_path / "transparent.png", transparency=palette.getpixel((0, 0)))
    with Image.open(tmp_path / "transparent.png") as image:
        assert image.mode == "P" and "transparency" in image.info
    make = processor(0, 784)
    assert np.array_equal(make.patches(str(tmp_path / "transparent.png"))[0], make.patches(str(tmp_path / "rgb.png"))[0])


def test_of_an_mpo_the_first_picture_counts(processor: Make, photo: Photo, tmp_path: Path) -> None:
    first, second = (Image.open(photo(name)).convert("RGB").resize((64, 48)) for name in ("chelsea.png", "coffee.png"))
    first.save(tmp_path / "both.mpo", save_all=True, append_images=[second], quality=90)
    first.save(tmp_path / "first.jpg", quality=90)
    with Image.open(tmp_path / "both.mpo") as image:
        assert image.format == "MPO" and getattr(image, "n_frames", 1) == 2
    make = processor(0, 3136)
    assert np.array_equal(make.patches(str(tmp_path / "both.mpo"))[0], make.patches(str(tmp_path / "first.jpg"))[0])


@pytest.mark.parametrize(("width", "height"), [(1, 1), (5600, 28), (1, 200), (3, 2)])
def test_pictures_of_strange_sizes_are_those_of_transformers(processor: Make, tmp_path: Path, width: int, height: int) -> None:
    path = tmp_path / "strange.png"
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    ours, grid = processor(3136, 1003520).patches(str(path))
    # Told where the channels are: of a picture three pixels wide transformers cannot tell.
    theirs = hf_processor(3136, 1003520)(images=[Image.fromarray(pixels)], return_tensors="np")
    assert list(grid) == theirs["image_grid_thw"][0].tolist()
    assert np.array_equal(ours, theirs["pixel_values"])


def test_a_picture_without_pixels_is_refused() -> None:
    """Pillow opens no such file of the usual kinds; a video's header may claim it."""
    with pytest.raises(ValueError, match="its sides are 0 x 5, so it has no pixels"):
        smart_resize(5, 0, 28, 0, 784)


def test_a_header_that_claims_too_many_pixels_is_refused(processor: Make, tmp_path: Path) -> None:
    path = tmp_path / "bomb.png"
    path.write_bytes(png(20000, 20000, 8, 2, b""))
    with pytest.raises(DataError, match=r"bomb\.png: Image size \(400000000 pixels\) exceeds limit of 178956970 pixels.*, in data, record 7; shrink"):
        processor(0, 784).grid(str(path), "data, record 7")


def test_faults_that_pillow_does_not_call_faults_of_the_file(processor: Make, tmp_path: Path) -> None:
    """A broken chunk is a SyntaxError there, a path that cannot be one a ValueError."""
    chance = random.Random(0)
    whole = png(28, 28, 8, 2, b"".join(b"\0" + chance.randbytes(84) for _ in range(28)))
    middle, end = whole.find(b"IDAT") + 200, whole.find(b"IEND") - 4
    broken = whole[:33] + struct.pack(">I", 196) + whole[37:middle] + bytes(4) + struct.pack(">I", 4) + b"\1\2\3\4" + whole[end:]
    (tmp_path / "broken.png").write_bytes(broken)
    with pytest.raises(DataError, match=r"broken\.png: cannot decode this image \(broken PNG file .*\), in data, record 7; replace the file"):
        processor(0, 784).patches(str(tmp_path / "broken.png"), "data, record 7")
    with pytest.raises(DataError, match=r"cannot open this image \(.*null .*\), in data, record 7"):
        processor(0, 784).grid("a\0b.png", "data, record 7")


def test_a_pipe_or_a_device_is_not_waited_for(processor: Make, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    for path in (str(tmp_path / "pipe.png"), "/dev/zero"):
        with pytest.raises(DataError, match=f"{path}: a pipe or a device, no image file, in data, record 7; give the path of a file"):
            processor(0, 784).grid(path, "data, record 7")


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_damaged_files_of_every_kind_give_a_named_error_or_a_picture(processor: Make, photo: Photo, tmp_path: Path) -> None:
    """Pillow's readers raise almost anything; a user sees the path."""
    make, chance = processor(0, 784), random.Random(0)
    refused = 0
    for kind in ("png", "jpg", "gif", "webp", "tiff", "bmp", "jp2"):
        path = tmp_path / f"whole.{kind}"
        Image.fromarray(np.asarray(Image.open(photo("chelsea.png")).resize((40, 30)))).save(path)
        whole = path.read_bytes()
        for _ in range(40):
            data = bytearray(whole[: chance.randrange(1, len(whole) + 1)])
            for _ in range(chance.randrange(4)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            (tmp_path / f"damaged.{kind}").write_bytes(data)
            try:
                make.patches(str(tmp_path / f"damaged.{kind}"), "data, record 7")
            except DataError as fault:
                assert f"damaged.{kind}: " in str(fault) and ", in data, record 7" in str(fault) and "\n" not in str(fault)
                refused += 1
    assert refused > 140


def test_the_header_alone_gives_the_grid(processor: Make, photo: Photo, tmp_path: Path) -> None:
    assert processor(4 * 784, 256 * 784).grid(photo("rocket.jpg")) == (1, 26, 38)
    half = tmp_path / "half.jpg"
    half.write_bytes(Path(photo("rocket.jpg")).read_bytes()[:40000])
    assert processor(4 * 784, 256 * 784).grid(str(half)) == (1, 26, 38)


@pytest.mark.parametrize(("kind", "header"), [("png", 41), ("jpg", 177), ("gif", 792), ("bmp", 54), ("tiff", 140)])
def test_a_file_that_ends_after_its_header_has_a_grid_and_no_pixels(processor: Make, photo: Photo, tmp_path: Path, kind: str, header: int) -> None:
    path = tmp_path / f"cut.{kind}"
    with Image.open(photo("chelsea.png")) as image:
        Image.fromarray(np.asarray(image)).save(path)
    path.write_bytes(path.read_bytes()[:header])
    make = processor(3136, 1003520)
    assert make.grid(str(path)) == make.grid(photo("chelsea.png")) == (1, 22, 32)
    with pytest.raises(DataError, match=rf"cut\.{kind}: cannot decode this image"):
        make.patches(str(path))


@pytest.mark.parametrize(
    ("height", "width", "low", "high", "want"),
    [
        (28, 5600, 3136, 1003520, (28, 5600)),
        (1, 200, 3136, 1003520, (28, 812)),
        (639, 31, 3136, 15680, (560, 28)),
        (31, 639, 3136, 15680, (28, 560)),
        (28, 28, 0, 262144, (28, 28)),
        (480, 640, 0, 262144, (420, 588)),
        (427, 640, 0, 262144, (392, 616)),
        (1080, 1920, 0, 262144, (364, 672)),
        (1080, 1920, 3136, 156800, (280, 504)),
        (480, 640, 3136, 1003520, (476, 644)),
        (1, 1, 0, 262144, (28, 28)),
        (13, 13, 0, 262144, (28, 28)),
        (32, 64, 3136, 12845056, (56, 84)),
    ],
)
def test_sizes_of_public_reports(height: int, width: int, low: int, high: int, want: tuple[int, int]) -> None:
    assert smart_resize(height, width, 28, low, high) == want


def test_sizes_equal_transformers_and_no_side_is_zero() -> None:
    theirs = sys.modules[type(hf_processor(3136, 7056)).__module__].smart_resize
    for height in range(1, 701, 3):
        for width in range(1, 701, 7):
            if max(height, width) / min(height, width) > 200:
                continue
            for low, high in ((3136, 1003520), (3136, 15680), (0, 262144)):
                rows, columns = smart_resize(height, width, 28, low, high)
                assert rows >= 28 and columns >= 28 and rows % 28 == 0 and columns % 28 == 0
                reference = theirs(height, width, 28, low, high)
                if min(reference) > 0:
                    assert (rows, columns) == reference


@pytest.mark.parametrize(("width", "height", "ratio"), [(5601, 28, "200.04"), (1, 201, "201.00")])
def test_a_picture_too_thin_is_named(processor: Make, tmp_path: Path, width: int, height: int, ratio: str) -> None:
    path = tmp_path / "thin.png"
    Image.new("L", (width, height)).save(path)
    message = rf"thin\.png: its sides {width} x {height} are to each other as {ratio} to 1; at most 200, in file, record 3"
    with pytest.raises(DataError, match=message):
        processor(3136, 1003520).grid(str(path), "file, record 3")


def test_the_limits_of_the_run_are_in_force_not_those_of_the_folder(processor: Make, tmp_path: Path) -> None:
    path = tmp_path / "hd.png"
    Image.new("RGB", (1920, 1080)).save(path)
    assert processor(3136, 156800).grid(str(path)) == (1, 20, 36)


@pytest.mark.parametrize(("patch_size", "high"), [(14, 156800), (16, 204800)])
def test_a_large_picture_has_as_many_patches_as_in_transformers(hf_dir: Path, model: ModelConfig, tmp_path: Path, patch_size: int, high: int) -> None:
    assert model.image_encoder is not None
    path = tmp_path / "hd.png"
    Image.new("RGB", (1920, 1080)).save(path)
    raw = json.loads((hf_dir / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**raw, "patch_size": patch_size}))
    vision = model.image_encoder.vision_encoder.model_copy(update={"patch_size": patch_size})
    make = ImageProcessor.from_config(PreprocessParameters(model_name_or_path=str(tmp_path), image_max_pixels=high), vision)
    size = {"shortest_edge": 1024, "longest_edge": high}
    theirs = type(hf_processor(3136, 7056))(size=size, patch_size=patch_size)(images=[Image.open(path)], return_tensors="np")
    assert list(make.grid(str(path))) == theirs["image_grid_thw"][0].tolist()
    assert str(make) == f"images: min_pixels 1024, max_pixels {high}, patch_size {patch_size}, merge_size 2"


def test_exif_orientation_is_not_applied(processor: Make, tmp_path: Path) -> None:
    sideways, plain = tmp_path / "sideways.jpg", tmp_path / "plain.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6
    picture = Image.linear_gradient("L").resize((64, 32))
    picture.save(sideways, exif=exif)
    picture.save(plain)
    make = processor(3136, 1003520)
    patches, grid = make.patches(str(sideways))
    assert make.grid(str(sideways)) == grid == (1, 4, 6)
    assert np.array_equal(patches, make.patches(str(plain))[0])


def test_truncated_and_empty_files_name_path_and_sample(processor: Make, photo: Photo, tmp_path: Path) -> None:
    half, empty, gone = tmp_path / "half.jpg", tmp_path / "empty.png", tmp_path / "gone.png"
    data = Path(photo("rocket.jpg")).read_bytes()
    half.write_bytes(data[: len(data) // 2])
    empty.write_bytes(b"")
    make = processor(3136, 1003520)
    with pytest.raises(DataError, match=r"half\.jpg: cannot decode this image \(image file is truncated.*in data, record 7"):
        make.patches(str(half), "data, record 7")
    with pytest.raises(DataError, match=r"empty\.png: cannot open this image \(not an image, or an empty file\), in data, record 7"):
        make.grid(str(empty), "data, record 7")
    with pytest.raises(DataError, match=r"gone\.png: no such image file"):
        make.grid(str(gone))
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


def test_palettes_alpha_and_animations_become_rgb(processor: Make, tmp_path: Path) -> None:
    make = processor(0, 784)
    red = Image.new("RGB", (28, 28), (255, 0, 0))
    blue = Image.new("RGB", (28, 28), (0, 0, 255))
    transparent = red.copy()
    transparent.putalpha(0)
    red.save(tmp_path / "rgb.png")
    red.convert("P").save(tmp_path / "palette.png")
    transparent.save(tmp_path / "alpha.png")
    red.save(tmp_path / "moving.gif", save_all=True, append_images=[blue])
    want = make.patches(str(tmp_path / "rgb.png"))[0]
    for name in ("palette.png", "alpha.png", "moving.gif"):
        assert np.array_equal(make.patches(str(tmp_path / name))[0], want), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch_size": 16}, "patch_size is 16 but model.json's vision encoder has 14"),
        ({"merge_size": 4}, "merge_size is 4 but model.json's vision encoder has 2"),
        ({"image_mean": None}, "a value of the wrong type"),
        ({"do_normalize": False}, "do_normalize is False"),
        ({"image_std": [1.0]}, "hold 3 and 1 numbers"),
    ],
)
def test_a_processor_file_that_does_not_fit_is_refused(
    hf_dir: Path, model: ModelConfig, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    assert model.image_encoder is not None
    raw = json.loads((hf_dir / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**raw, **change}))
    with pytest.raises(ConfigError, match=message):
        ImageProcessor.from_config(PreprocessParameters(model_name_or_path=str(tmp_path)), model.image_encoder.vision_encoder)


def test_the_processor_inside_the_file_of_a_whole_processor_comes_first_as_in_transformers(hf_dir: Path, model: ModelConfig, tmp_path: Path) -> None:
    assert model.image_encoder is not None
    raw = json.loads((hf_dir / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(raw))
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen2_5_VLProcessor"}))
    preprocess, vision = PreprocessParameters(model_name_or_path=str(tmp_path)), model.image_encoder.vision_encoder
    assert ImageProcessor.from_config(preprocess, vision).values.mean == tuple(raw["image_mean"])
    inside = {**raw, "image_mean": [0.5, 0.25, 0.125]}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": inside, "processor_class": "Qwen2_5_VLProcessor"}))
    assert ImageProcessor.from_config(preprocess, vision).values.mean == (0.5, 0.25, 0.125)
    (tmp_path / "preprocessor_config.json").unlink()
    assert ImageProcessor.from_config(preprocess, vision).values.mean == (0.5, 0.25, 0.125)
    (tmp_path / "processor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json: no such file.*or with a processor_config\.json that holds an image_processor"):
        ImageProcessor.from_config(preprocess, vision)


def test_limits_that_leave_no_size_are_refused(processor: Make) -> None:
    for low, high in ((0, 700), (5000, 4000)):
        with pytest.raises(ConfigError, match=f"image_min_pixels {low}, image_max_pixels {high}: the maximum must be at least 784"):
            processor(low, high)
