"""What ranks do in the tests of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.fsdp2.kit import engine_of, read, real_batch, write_run


def forward_backward(hf: Path, folder: Path, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Run the batch of ``real_batch``, dealt out over ranks; write this rank's gradients, and rank 0 the batch."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    engine = engine_of(read(write_run(folder / f"rank_{rank}", hf, changes)))
    batch, parts = real_batch(hf)
    result = engine.forward_backward(parts[engine.data_parallel_rank :: engine.data_parallel_size])
    held = {tensor.name: (tensor.start, tensor.local.clone()) for tensor in engine.canonical_gradients()}
    torch.save(held, folder / f"gradients_{dist.get_rank()}.pt")
    if dist.get_rank() == 0:
        torch.save(batch, folder / "batch.pt")
    return {"loss": result.loss, "tokens": result.tokens, "names": sorted(held)}
