"""What one side of the comparison computed for a batch, and the files that hold it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tangram.errors import CheckpointError

LOGITS_FILE = "logits.safetensors"
GRADIENTS_FILE = "grads.safetensors"


@dataclass(frozen=True)
class Observation:
    """Loss, logits and gradients of a model on one batch.

    Args:
        loss: mean cross entropy over the supervised tokens.
        logits: ``[B, S, V]``, fp32, V without padding of the vocabulary. Positions that ``attention_mask`` leaves out mean nothing.
        gradients: canonical name -> full fp32 gradient of ``loss``.
    """

    loss: float
    logits: torch.Tensor
    gradients: dict[str, torch.Tensor]


def write_observation(observed: Observation, folder: Path) -> None:
    """Write ``logits.safetensors`` (``logits``) and ``grads.safetensors`` (one tensor per canonical name)."""
    folder.mkdir(parents=True, exist_ok=True)
    loss = {"loss": repr(observed.loss)}
    save_file({"logits": observed.logits.contiguous()}, folder / LOGITS_FILE, metadata=loss)
    save_file({name: tensor.contiguous() for name, tensor in observed.gradients.items()}, folder / GRADIENTS_FILE, metadata=loss)


def read_observation(folder: Path) -> Observation:
    """Read what ``write_observation`` wrote.

    Raises:
        CheckpointError: a file or the tensor ``logits`` is missing.
    """
    for name in (LOGITS_FILE, GRADIENTS_FILE):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: no such file; write it with 'tangram align --dump {folder}'")
    with safe_open(folder / LOGITS_FILE, framework="pt") as file:
        if "logits" not in file.keys():  # noqa: SIM118  safe_open is no mapping
            raise CheckpointError(f"{folder / LOGITS_FILE}: holds {list(file.keys())} but no tensor 'logits'")
        logits = file.get_tensor("logits")
        loss = float((file.metadata() or {}).get("loss", "nan"))
    with safe_open(folder / GRADIENTS_FILE, framework="pt") as file:
        gradients = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return Observation(loss=loss, logits=logits, gradients=gradients)
