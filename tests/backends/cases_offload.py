"""What ranks do in ``test_offload``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tangram.platform.offload.transfer import HostTransfer
from tests.backends.cases_sequence import FULL, SELECTIVE, _digest, opened, tasks_of


def offload(file: str) -> dict[str, Any]:
    """By split: loss, digest of this rank's gradients and bytes that went to the host, with and without offload and recomputation."""
    sent: list[int] = []
    copy = HostTransfer.to_host

    def counted(self: HostTransfer, flat: Tensor) -> tuple[Tensor, None]:
        sent.append(flat.nbytes)
        return copy(self, flat)

    HostTransfer.to_host = counted  # type: ignore[method-assign]
    found: dict[str, Any] = {}
    for task in tasks_of(file):
        on = {"enable_activation_offload": True}
        for name, features in {"plain": {}, "offload": on, "selective": on | SELECTIVE, "full": on | FULL}.items():
            with opened(task, **features) as (engine, batch):
                sent.clear()
                loss = engine.forward_backward(batch[: len(batch) // 2 * 2]).loss
                gradients = {tensor.name: tensor.local.clone() for tensor in engine.canonical_gradients()}
                digest = _digest(*(gradients[key] for key in sorted(gradients)))
                found.setdefault(str(task.split), {})[name] = {"loss": loss, "digest": digest, "sent": sum(sent)}
    return found
