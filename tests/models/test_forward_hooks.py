"""Weights are read in calls of their modules alone, since ``overlap_param_gather`` makes them whole in a module's forward hook."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests.models.conftest import hf_positions, make_batch, make_hf
from tests.models.test_against_hf import GRIDS, ROWS, assemble


@pytest.mark.parametrize("chunk", [None, 3], ids=["logits", "losses in chunks"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_every_module_with_weights_is_called(one_process: None, family: str, chunk: int | None) -> None:
    hf, called = make_hf(family), set()
    built, _ = assemble(hf, family, loss_chunk_size=chunk)

    def see(module: nn.Module, *_: Any) -> None:
        called.add(module)

    holders = {name: module for name, module in built.named_modules() if list(module.parameters(recurse=False))}
    for module in holders.values():
        module.register_forward_pre_hook(see)
    batch = make_batch(GRIDS, ROWS, False)
    built(position_ids=hf_positions(hf, batch), **batch)
    assert [name for name, module in holders.items() if module not in called] == []
