"""The switches of chunk loss on the megatron backend."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from tangram.config.run import FeaturesConfig


def test_a_chunk_size_without_chunk_loss_is_refused() -> None:
    with pytest.raises(ValidationError, match="chunk_size 7 has no effect while enable_chunk_loss is off"):
        FeaturesConfig(chunk_size=7)
    assert FeaturesConfig(enable_chunk_loss=True, chunk_size=7).chunk_size == 7
