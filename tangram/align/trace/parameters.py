"""The parameters of a trace, and their gradients."""

from __future__ import annotations

from collections.abc import Iterable

from tangram.align.trace.seen import Chosen
from tangram.align.trace.store import TraceWriter
from tangram.backends.engine import CanonicalTensor, Engine


def write_parameters(writer: TraceWriter, engine: Engine, chosen: Chosen) -> None:
    """Write this rank's rectangles of all that belong to chosen modules, between ``forward_backward`` and ``step``. Collective."""
    write_rectangles(writer, "weight", engine.canonical_parameters(), chosen)
    write_rectangles(writer, "gradient", engine.canonical_gradients(), chosen)


def write_rectangles(writer: TraceWriter, what: str, tensors: Iterable[CanonicalTensor], chosen: Chosen) -> None:
    """Write those of chosen modules."""
    for tensor in tensors:
        if tensor.name.rpartition(".")[0] in chosen:
            writer.rectangle(tensor.name, what, tensor.local, tensor.start, tensor.full_shape)  # type: ignore[arg-type]
