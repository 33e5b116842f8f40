"""The assembled model with each library of attention gives the loss and the gradients that it gives with torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tangram.models.vlm import VLMModel, build_model_chunk
from tests.models.conftest import make_hf
from tests.models.test_against_hf import assemble
from tests.models.test_packing_and_videos import all_relative, collate, gradients_of, mixed
from tests.platform.attention_libraries import CALLS, DEVICES, forget, install


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as context:
        yield context
    forget()


def with_backend(built: VLMModel, backend: str) -> VLMModel:
    """The same model, built of sections that name the library."""
    model, keys = built.model, {"attention_backend": backend}
    encoder = model.image_encoder
    assert encoder is not None
    vision = encoder.model_copy(update={"vision_encoder": encoder.vision_encoder.model_copy(update=keys)})
    changed = model.model_copy(update={"text_decoder": model.text_decoder.model_copy(update=keys), "image_encoder": vision})
    again = build_model_chunk(changed, built.chunk, built.topology, torch.float32, model.text_decoder.vocab_size)
    again.load_state_dict(built.state_dict())
    return again.train()


def test_windows_frames_packed_rows_and_causal_text(one_process: None, patch: pytest.MonkeyPatch) -> None:
    """Four vision layers, two of windows and two of frames; three text layers with two key/value heads of four."""
    built, _ = assemble(make_hf("qwen2_5_vl"), "qwen2_5_vl")
    batches = {"packed": collate(built.model, mixed(), packing=True, multiple=8), "rows": collate(built.model, mixed(), packing=False)}
    built = with_backend(built, "torch")
    wanted = {name: gradients_of(built, batch, "per_token_loss") for name, batch in batches.items()}
    for backend in DEVICES:
        install(patch, backend)
        model = with_backend(built, backend)
        for name, batch in batches.items():
            CALLS.clear()
            loss, _, gradients = gradients_of(model, batch, "per_token_loss")
            assert abs(loss - wanted[name][0]) < 1e-6 * loss, (backend, name)
            assert all_relative(gradients, wanted[name][2]) < 1e-5, (backend, name)
            assert _kinds(batch) == _expected(backend, name), (backend, name)


def _kinds(batch: dict[str, Any]) -> Counter[tuple[str, bool, int]]:
    """How often each library attended, causally or not, over how many tokens."""
    assert all(library in ("npu rows", "torch") or ends[-1] in (batch["input_ids"].numel(), _patches(batch)) for library, ends, _ in CALLS)
    return Counter((library, causal, len(ends) - 1) for library, ends, causal in CALLS)


def _patches(batch: dict[str, Any]) -> int:
    return sum(len(batch[name]) for name in ("pixel_values", "pixel_values_videos"))


def _expected(backend: str, name: str) -> Counter[tuple[str, bool, int]]:
    """By hand: the media of ``mixed`` have 11 frames, and windows of 4 x 4 patches; five samples, and 27 tokens of padding in the packed row."""
    frames, windows = 11, WINDOWS
    seen = Counter({(backend, False, frames): 2, (backend, False, windows): 2})
    if name == "packed":
        seen[backend, True, 5 + 27] = 3
    elif backend in ("flash", "transformer_engine"):
        seen[backend, True, 5] = 3
    elif backend == "npu":
        seen["npu rows", True, 1] = 3
    return seen


# Grids of mixed() in patches (t, h, w): (1,4,6) (5,4,4) (2,6,8) (1,8,4) (1,4,4) (1,6,4), each frame in ceil(h / 4) * ceil(w / 4) windows.
WINDOWS = 2 + 5 + 2 * 4 + 2 + 1 + 2
