"""The bench of splits times splits that exist."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tangram.align.run import open_subject
from tangram.families.base import get_family
from tangram.families.tiny import TinySpec


def test_every_split_of_the_bench_fits_its_model(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("bench_parallel", Path(__file__).parents[2] / "bench" / "parallel.py")
    assert spec is not None and spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    get_family("qwen2_5_vl").tiny(tmp_path / "hf", 0, True, TinySpec(hidden=32, text_layers=bench.LAYERS, vocab=512))
    model = open_subject(tmp_path / "hf", tmp_path).model
    splits = {**bench.splits(), **bench.skewed()}
    assert len(splits) == 17
    for name, split in splits.items():
        assert split.topology(model).process_unit <= split.processes <= bench.PROCESSES, name
