"""hf -> mm -> resplit -> resplit -> hf gives every bit back, whatever the splits and forms in between."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tangram.checkpoints.convert import convert_hf_to_mm, convert_mm_to_hf
from tangram.checkpoints.options import ResplitOptions, ToHFOptions, ToMMOptions
from tangram.checkpoints.resplit import prepare_resplit
from tangram.families import get_family
from tangram.families.tiny import TinySpec

VISION, TEXT = 2, 3
"""Layers."""
SIZES = {"hidden": 32, "heads": 4, "kv_heads": 4, "ffn": 64, "text_layers": TEXT, "vision_layers": VISION, "vision_heads": 4, "vocab": 160}


@dataclass(frozen=True)
class Case:
    """A family and what its splits are drawn from."""

    family: str
    tied: tuple[bool, ...] = (False, True)
    experts: tuple[int, ...] = (1,)
    """Expert-parallel sizes."""
    sizes: dict[str, Any] = field(default_factory=dict)


CASES = [
    Case("qwen2_vl"),
    Case("qwen2_5_vl"),
    Case("qwen3_vl"),
    Case("qwen3_vl_moe", experts=(1, 2, 4)),
    Case("llava"),
]
"""One line per family."""
PAIRS = 5
"""Pairs of splits of each family: as many again would take as long again, and the families share all but a few rows of their tables."""


@pytest.fixture(scope="module")
def scratch() -> Any:
    """In memory where there is such a place: a conversion flushes every file."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def models(scratch: Path) -> Any:
    """Directory of a family's small model, tied or not."""

    def write(case: Case, tied: bool) -> Path:
        path = scratch / f"{case.family}_{tied}"
        if not path.exists():
            get_family(case.family).tiny(path, 0, tied, TinySpec(**{**SIZES, **case.sizes}))
        return path

    return write


@st.composite
def splits(draw: st.DrawFn, experts: tuple[int, ...]) -> dict[str, Any]:
    """A split of all layers, cut anywhere, so that stages are uneven and some hold layers of both components."""
    virtual, stages = draw(st.sampled_from([(1, 1), (1, 2), (1, 3), (1, 5), (2, 1), (2, 2)]))
    cuts = sorted(draw(st.sets(st.integers(1, VISION + TEXT - 1), min_size=virtual * stages - 1, max_size=virtual * stages - 1)))
    ends = list(zip([0, *cuts], [*cuts, VISION + TEXT], strict=True))
    vision = [max(0, min(end, VISION) - start) for start, end in ends]
    text = [end - start - held for (start, end), held in zip(ends, vision, strict=True)]
    return {
        "tp_size": draw(st.sampled_from([1, 2, 4])),
        "vit_tp_size": draw(st.sampled_from([0, 0, 1, 2, 4])),
        "ep_size": draw(st.sampled_from(experts)),
        "make_vocab_size_divisible_by": draw(st.sampled_from([1, 1, 3, 64])),
        "vit_pp_layers": [vision[i * stages : (i + 1) * stages] for i in range(virtual)],
        "llm_pp_layers": [text[i * stages : (i + 1) * stages] for i in range(virtual)],
    }


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.mark.parametrize("case", CASES, ids=[case.family for case in CASES])
def test_every_bit_comes_back(case: Case, scratch: Path, models: Any) -> None:
    @settings(max_examples=PAIRS, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(case.tied), splits(case.experts), splits(case.experts), st.booleans(), st.booleans())
    def run(tied: bool, one: dict[str, Any], other: dict[str, Any], one_form: bool, other_form: bool) -> None:
        hf = models(case, tied)
        with tempfile.TemporaryDirectory(dir=scratch) as name:
            folder = Path(name)
            forms = [{"enable_canonical_hf_struct": form} for form in (one_form, other_form)]
            source = {"hf_dir": str(hf)}
            there = {"mm_dir": str(folder / "a"), "hf_config": source, "parallel_config": one, "common_model_config": forms[0]}
            convert_hf_to_mm(ToMMOptions.model_validate(there), case.family)
            for before, after, split, form in (("a", "b", other, forms[1]), ("b", "c", one, forms[0])):
                options = {"source_dir": str(folder / before), "target_dir": str(folder / after), "target_parallel_config": split}
                prepare_resplit(ResplitOptions.model_validate({**options, "common_model_config": form}), (case.family,)).write()
            assert content(folder / "a") == content(folder / "c")
            back = {"mm_dir": str(folder / "c"), "save_hf_dir": str(folder / "hf"), "hf_config": source}
            convert_mm_to_hf(ToHFOptions.model_validate(back), case.family)
            assert content(folder / "hf") == content(hf)

    run()
