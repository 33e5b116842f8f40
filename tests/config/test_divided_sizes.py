"""The sizes that ``tangram check`` wants tensor parallelism to divide are those that the tensor table divides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tangram.align.run import make_task, open_subject
from tangram.align.task import Split
from tangram.config.model import ModelConfig
from tangram.config.preflight_rules import Subject, tensor_parallel
from tangram.errors import ConfigError, PlacementError
from tangram.families.base import get_family
from tangram.placement.proof import prove_table
from tangram.placement.table import padded_vocabulary

SIZES = (("text_decoder", "ffn_hidden_size"), ("text_decoder", "moe_intermediate_size"), ("vision_encoder", "ffn_hidden_size"))


def odd(model: ModelConfig, section: str, key: str) -> ModelConfig | None:
    """The model with a size that 2 does not divide; None: it has no such size."""
    assert model.image_encoder is not None
    part = model.text_decoder if section == "text_decoder" else model.image_encoder.vision_encoder
    if not hasattr(part, key):
        return None
    changed = part.model_copy(update={key: getattr(part, key) + 1})
    encoder = model.image_encoder if section == "text_decoder" else model.image_encoder.model_copy(update={section: changed})
    return model.model_copy(update={"text_decoder": changed} if section == "text_decoder" else {"image_encoder": encoder})


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "llava"])
def test_a_size_is_refused_where_the_table_cannot_divide_it_and_nowhere_else(family: str, tiny_hf: Callable[..., Path], tmp_path: Path) -> None:
    subject = open_subject(tiny_hf(family), tmp_path)
    split = Split(tensor=2, sequence_parallel=True)
    for section, key in SIZES:
        model = odd(subject.model, section, key)
        if model is None:
            continue
        task = make_task(replace(subject, model=model), split, tmp_path / "batch", tmp_path, micro_batch_size=1)
        table = get_family(family).tensor_table(model, padded_vocabulary(model.text_decoder.vocab_size, 2))
        try:
            prove_table(table, split.topology(model))
        except PlacementError:
            with pytest.raises(ConfigError, match=f"tensor_model_parallel_size 2 does not divide {section}.{key} "):
                tensor_parallel(Subject(task.run_config(), 2))
        else:
            assert "divide by 2" in tensor_parallel(Subject(task.run_config(), 2)), (section, key)
