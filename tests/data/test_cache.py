"""The cache of tokenised samples: what its key covers, damage, processes that build it together, and sizes taken from it."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tangram.config.run import RunConfig
from tangram.data.build import build_loader, build_source, forget_caches
from tangram.data.cache import TokenCache, open_cache
from tangram.data.encode import IGNORE, EncodedSample
from tangram.data.encode_all import Chunk, encode_all
from tangram.data.media import Medium
from tangram.data.packed_sample import pack, pack_fault, unpack
from tangram.data.sizes import SampleSizes, compute_sizes
from tangram.errors import DataError
from tangram.families.base import get_family

FAMILY = get_family("qwen2_5_vl")
MakeRun = Callable[..., RunConfig]


@pytest.fixture
def picture(tmp_path: Path) -> str:
    Image.new("RGB", (640, 480), "teal").save(tmp_path / "teal.png")
    return "teal.png"


@pytest.fixture
def cached(make_run: MakeRun, tmp_path: Path) -> Callable[..., RunConfig]:
    """A run that keeps its tokens."""

    def make(dataset: str, *, basic: dict[str, Any] | None = None, **others: Any) -> RunConfig:
        return make_run(dataset, basic={"cache_dir": str(tmp_path / "cache"), **(basic or {})}, **others)

    return make


def image_tokens(run: RunConfig, sample: int = 0) -> int:
    source = build_source(run, FAMILY, needs_pixels=False)
    assert source.cache is not None
    return source[[((0, sample),)]]["input_ids"].tolist()[0].count(151655)


def folders(tmp_path: Path) -> list[Path]:
    return sorted(path for path in (tmp_path / "cache").iterdir() if path.is_dir())


def test_other_pixel_limits_and_edited_answers_are_other_samples(
    cached: MakeRun, picture: str, tmp_path: Path, record: Any, write_json: Any, tokenizer: Any
) -> None:
    """hiyouga/LlamaFactory's cache that goes on with stale tokens: 480 x 640 gives 315 tokens at 262144 pixels and 391 at 1003520 (transformers)."""
    path = write_json([record("<image>?", "It is blue.", images=[picture])])
    assert image_tokens(cached(path, seq_length=512, preprocess={"image_max_pixels": 262144})) == 315
    large = cached(path, seq_length=512, preprocess={"image_max_pixels": 1003520})
    assert image_tokens(large) == 391
    assert len(folders(tmp_path)) == 2
    status = Path(path).stat()
    write_json([record("<image>?", "It is grey.", images=[picture])])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert Path(path).stat().st_size == status.st_size
    labels = build_source(large, FAMILY)[[((0, 0),)]]["labels"][0].tolist()
    assert tokenizer.decode([label for label in labels if label != -100]) == "It is grey.<|im_end|>"
    assert len(folders(tmp_path)) == 3


def test_the_key_covers_what_samples_depend_on(cached: MakeRun, tmp_path: Path, record: Any, write_json: Any, hf_dir: Path) -> None:
    path = write_json([record("q", "a", "b", "c"), record("q", "a")])
    plain = cached(path)
    changed = [
        cached(path, seq_length=200),
        cached(path, basic={"cutoff_len": 100}),
        cached(path, basic={"mask_history": True}),
        cached(path, basic={"train_on_prompt": True}),
        cached(path, basic={"truncation": "sample"}),
        cached(path, basic={"template": "qwen3_vl"}),
        cached(path, basic={"max_samples": 1}),
        cached(path, preprocess={"video_maxlen": 4}),
        cached(path, preprocess={"image_min_pixels": 784}),
    ]
    other = tmp_path / "hf"
    other.mkdir()
    (other / "preprocessor_config.json").symlink_to(hf_dir / "preprocessor_config.json")
    (other / "tokenizer.json").write_text((hf_dir / "tokenizer.json").read_text() + "\n")
    changed.append(cached(path, preprocess={"model_name_or_path": str(other)}))
    for number, run in enumerate([plain, *changed]):
        build_source(run, FAMILY)
        assert len(folders(tmp_path)) == number + 1, run
    build_source(cached(path, seed=7, micro_batch_size=2, loading={"shuffle": True, "prefetch_factor": 2}), FAMILY, needs_pixels=False)
    assert len(folders(tmp_path)) == len(changed) + 1, "the order of the run is no matter of the tokens"
    content = json.loads((folders(tmp_path)[0] / "key.json").read_text())
    assert content["key"]["template"]["default_system"] in ("You are a helpful assistant.", None) and content["samples"] in (1, 2)


def test_a_run_from_the_cache_is_the_run_without_it(make_run: MakeRun, cached: MakeRun, mixed_dataset: str) -> None:
    from tests.data.test_loader import same, take

    settings: dict[str, Any] = {"loading": {"shuffle": True}, "micro_batch_size": 2, "global_batch_size": 4}
    plain = take(build_loader(make_run(mixed_dataset, **settings), FAMILY, 0, 1), 3)
    for workers in (0, 1):
        kept = take(build_loader(cached(mixed_dataset, num_workers=workers, **settings), FAMILY, 0, 1), 3)
        assert all(same(a, b) for x, y in zip(plain, kept, strict=True) for a, b in zip(x, y, strict=True))


def test_the_encoder_is_not_asked_again(cached: MakeRun, mixed_dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tangram.data.encode import SampleEncoder

    run = cached(mixed_dataset)
    build_source(run, FAMILY)
    monkeypatch.setattr(SampleEncoder, "tokens", lambda *_: pytest.fail("tokenised again"))
    assert build_source(run, FAMILY)[[((0, 0),)]]["pixel_values"].shape[1] == 1176


def test_processes_make_the_same_bytes(make_run: MakeRun, mixed_dataset: str, tmp_path: Path) -> None:
    for name, workers in (("one", 0), ("three", 3)):
        build_source(make_run(mixed_dataset, basic={"cache_dir": str(tmp_path / name), "preprocessing_num_workers": workers}), FAMILY)
    one, three = (next(path for path in (tmp_path / name).iterdir() if path.is_dir()) for name in ("one", "three"))
    assert one.name == three.name
    for file in ("samples.bin", "index.npy", "key.json"):
        assert (one / file).read_bytes() == (three / file).read_bytes()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: cut(folder / "samples.bin"), r"samples.bin has \d+ bytes, not \d+; built anew"),
        (lambda folder: flip(folder / "samples.bin"), "samples.bin has another checksum than key.json says; built anew"),
        (lambda folder: flip(folder / "index.npy"), "index.npy has another checksum"),
        (lambda folder: (folder / "index.npy").unlink(), "index.npy is missing; built anew"),
        (lambda folder: cut(folder / "key.json"), "key.json is damaged; built anew"),
    ],
    ids=["short", "one bit", "index", "missing", "key"],
)
def test_a_damaged_cache_is_built_anew(
    damage: Callable[[Path], object], said: str, cached: MakeRun, tmp_path: Path, record: Any, write_json: Any, caplog: pytest.LogCaptureFixture
) -> None:
    import re

    run = cached(write_json([record("q", f"answer {i}") for i in range(5)]))
    build_source(run, FAMILY)
    (folder,) = folders(tmp_path)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    damage(folder)
    build_source(run, FAMILY)
    assert re.search(said, caplog.text), caplog.text
    assert folders(tmp_path) == [folder] and {path.name: path.read_bytes() for path in folder.iterdir()} == whole


def test_unusable_samples_are_kept_with_their_fault(cached: MakeRun, record: Any, write_json: Any, tmp_path: Path) -> None:
    path = write_json([record("q", "a"), record("long " * 400, "b"), record("<image>", "c")])
    with pytest.raises(DataError, match=r"record 1: the first turn takes \d+ tokens .* \(the first of 2 of 3 samples that cannot be used\)"):
        build_source(cached(path), FAMILY)
    source = build_source(cached(path, basic={"bad_samples": "skip"}), FAMILY)
    assert len(folders(tmp_path)) == 1 and source.cache is not None
    assert [fault.sample for fault in source.cache.faults] == [1, 2]
    assert source.cache.columns[:, 0].tolist()[1:] == [0, 0]
    reading = source.read([((0, sample),) for sample in range(3)])
    assert reading.batch.entries["sample_ids"] == [0, -1, -1] and [skip.sample for skip in reading.skips] == [1, 2]
    assert "1 <image> placeholders but 0 images" in reading.skips[1].reason


@pytest.mark.parametrize("bad_samples", ["fail", "skip"])
def test_a_picture_of_another_size_is_stale_and_never_skipped(
    bad_samples: str, cached: MakeRun, picture: str, tmp_path: Path, record: Any, write_json: Any
) -> None:
    run = cached(write_json([record("<image>?", "a", images=[picture])]), basic={"bad_samples": bad_samples})
    build_source(run, FAMILY)[[((0, 0),)]]
    Image.new("RGB", (480, 640), "teal").save(tmp_path / picture)
    with pytest.raises(
        DataError, match=r"teal.png: the image has the grid \(1, 6, 4\) but \(1, 4, 6\) in the cache .*set basic_parameters.overwrite_cache"
    ):
        build_source(run, FAMILY)[[((0, 0),)]]
    again = run.model_copy(deep=True)
    basic = again.data.dataset_param.basic_parameters.model_copy(update={"overwrite_cache": True})
    parameters = again.data.dataset_param.model_copy(update={"basic_parameters": basic})
    again = again.model_copy(update={"data": again.data.model_copy(update={"dataset_param": parameters})})
    forget_caches(run, FAMILY)
    assert len(folders(tmp_path)) == 1, "overwrite_cache is false"
    forget_caches(again, FAMILY)
    assert folders(tmp_path) == []
    assert build_source(again, FAMILY)[[((0, 0),)]]["image_grid_thw"].tolist() == [[1, 6, 4]]


def chunks_of(texts: list[str], pause: float = 0.0, marks: Path | None = None) -> Callable[[Any], Iterator[Chunk]]:
    """A builder without an encoder: sample i has len(texts[i]) tokens."""

    def chunks(progress: Callable[[int, int], object]) -> Iterator[Chunk]:
        if marks is not None:
            with marks.open("a") as file:
                file.write(f"{os.getpid()}\n")
        for number, text in enumerate(texts):
            time.sleep(pause)
            ids = [ord(letter) for letter in text]
            progress(number + 1, len(texts))
            yield Chunk([pack(EncodedSample(number, ids, ids))], np.array([[len(ids), 0, 0]]), [])

    return chunks


def build_together(folder: Path, marks: Path, pause: float, out: Any) -> None:
    cache = open_cache(folder, {"a": 1}, chunks_of(["ab", "c"], pause, marks), patience=200)
    out.put(cache[1].input_ids)


def test_processes_that_want_the_same_cache_build_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    processes = [context.Process(target=build_together, args=(tmp_path / "cache", tmp_path / "marks", 0.2, out)) for _ in range(4)]
    for process in processes:
        process.start()
    assert [out.get(timeout=200) for _ in processes] == [[ord("c")]] * 4
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert len((tmp_path / "marks").read_text().split()) == 1
    assert len(list((tmp_path / "cache").glob("*.tmp-*"))) == 0, "nothing temporary stays"


def test_a_builder_that_is_killed_is_followed_by_another(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    first = context.Process(target=build_together, args=(tmp_path / "cache", tmp_path / "marks", 3600, out))
    first.start()
    while not (tmp_path / "marks").exists():
        time.sleep(0.02)
    second = context.Process(target=build_together, args=(tmp_path / "cache", tmp_path / "marks2", 0, out))
    second.start()
    time.sleep(0.5)
    assert not (tmp_path / "marks2").exists(), "it waits"
    os.kill(first.pid or 0, signal.SIGKILL)
    assert out.get(timeout=200) == [ord("c")]
    second.join()
    assert (tmp_path / "marks2").exists() and len(list((tmp_path / "cache").glob("*.tmp-*"))) == 0


def test_without_locks_builders_leave_each_other_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that has none: another begins and ends in the midst of the first."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("tangram.data.cache.fcntl.flock", no_locks)

    def interrupted(progress: Callable[[int, int], object]) -> Iterator[Chunk]:
        for chunk in chunks_of(["ab", "c"])(progress):
            assert len(open_cache(tmp_path, {"a": 1}, chunks_of(["ab", "c"]), patience=1)) == 2
            yield chunk

    assert open_cache(tmp_path, {"a": 1}, interrupted, patience=1)[1].input_ids == [ord("c")]
    assert not list(tmp_path.glob("*.tmp-*"))


def test_a_builder_that_does_not_get_on_is_named_and_not_waited_for(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    process = context.Process(target=build_together, args=(tmp_path, tmp_path / "marks", 3600, context.Queue()))
    process.start()
    while not (tmp_path / "marks").exists():
        time.sleep(0.02)
    try:
        with pytest.raises(DataError, match="another process builds this cache .* and has not got on for 1 s; end it, or give another cache_dir"):
            open_cache(tmp_path, {"a": 1}, chunks_of(["a"]), patience=1)
    finally:
        process.kill()
        process.join()


def test_a_process_that_is_killed_while_it_tokenises_is_told_with_its_samples(
    make_run: MakeRun, record: Any, write_json: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tangram.data.encode import SampleEncoder

    tokens = SampleEncoder.tokens

    def deadly(self: SampleEncoder, sample: Any) -> EncodedSample:
        if sample.id == 40:
            os.kill(os.getpid(), signal.SIGKILL)
        return tokens(self, sample)

    monkeypatch.setattr(SampleEncoder, "tokens", deadly)
    source = build_source(make_run(write_json([record("q", "a")] * 70)), FAMILY)
    with pytest.raises(DataError, match=r"killed while samples \d+ to \d+ were in work; out of memory\? lower preprocessing_num_workers") as caught:
        list(encode_all(source.dataset, source.encoder, 2, wants_bytes=False))
    first, last = (int(word) for word in str(caught.value).split() if word.isdigit())
    assert first <= 40 <= last


def test_sizes_by_hand_from_the_cache_and_without(make_run: MakeRun, cached: MakeRun, mixed_dataset: str) -> None:
    """astronaut.png is 512 x 512: at most 84 x 84 pixels make 6 x 6 patches and 9 tokens; text samples have no patches."""
    source = build_source(make_run(mixed_dataset), FAMILY)
    sizes, faults = compute_sizes(source.dataset, source.encoder, 2)
    assert not faults and sizes.tokens.dtype == sizes.patches.dtype == np.int32 and sizes.shapes.dtype == np.int64
    assert sizes.patches[0] == 36 and sizes.shapes[0] == 6 * 65536 + 6
    assert sizes.patches[7:10].tolist() == [0, 0, 0] == sizes.shapes[7:10].tolist()
    assert sizes.patches[6] == sizes.patches[0] + sizes.patches[1] and sizes.shapes[6] == sizes.shapes[0], "the pair, and its larger picture"
    assert sizes.tokens.tolist() == [source[[((0, i),)]]["input_ids"].shape[1] for i in range(11)]
    cache = build_source(cached(mixed_dataset), FAMILY).cache
    assert cache is not None
    kept = SampleSizes.of_columns(cache.columns)
    assert all((getattr(kept, name) == getattr(sizes, name)).all() for name in ("tokens", "patches", "shapes"))


grids = st.tuples(st.integers(1, 9), st.integers(2, 500), st.integers(2, 500))
media = st.lists(st.builds(Medium, grids, st.none() | st.floats(0.1, 9), st.lists(st.floats(0, 1e4), max_size=4).map(tuple)), max_size=3)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), max_size=40), media, media, st.integers(0, 9), st.booleans())
def test_a_sample_survives_its_bytes(tokens: Any, images: Any, videos: Any, dropped: int, strange: bool) -> None:
    ids = [token for token, _ in tokens]
    labels = [(token ^ strange) if learnt else IGNORE for token, learnt in tokens]
    sample = EncodedSample(3, ids, labels, images, videos, turns_dropped=dropped)
    assert unpack(pack(sample), 3) == sample


@settings(max_examples=30, deadline=None)
@given(st.text())
def test_a_fault_survives_its_bytes(text: str) -> None:
    with pytest.raises(DataError) as caught:
        unpack(pack_fault(text), 0)
    assert str(caught.value) == text


def test_labels_are_a_bit_each() -> None:
    ids = list(range(1000))
    assert len(pack(EncodedSample(0, ids, [IGNORE] * 500 + ids[500:]))) == 17 + 4000 + 125


def test_a_cache_travels_to_other_processes_by_its_path(tmp_path: Path) -> None:
    cache = open_cache(tmp_path, {}, chunks_of(["abc", "", "d"]), patience=1)
    other: TokenCache = pickle.loads(pickle.dumps(cache))
    assert len(other) == 3
    assert [other[i].input_ids for i in range(3)] == [[97, 98, 99], [], [100]] and len(pickle.dumps(cache)) < 500


def test_a_file_in_place_of_the_folder_is_named(cached: MakeRun, mixed_dataset: str, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    for folder in ("cache", "cache/inner"):
        with pytest.raises(DataError, match=rf"basic_parameters.cache_dir {tmp_path}/{folder}: a file stands where the folder should be"):
            build_source(cached(mixed_dataset, basic={"cache_dir": str(tmp_path / folder)}), FAMILY)
