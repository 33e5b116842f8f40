"""Hooks that write what modules compute, forward and backward, while a model trains on its micro-batches."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tangram.align.trace.rows import RowTable, find
from tangram.align.trace.seen import ALL, Features, Port, Region, Seen, first_tensor
from tangram.align.trace.store import TraceWriter, What, real_rows


class Pass:
    """One micro-batch on its way through one stage: forward and backward count their events by themselves.

    Args:
        position: of the stage in the pipeline.
    """

    def __init__(self, position: int) -> None:
        self.position = position
        self.tables: dict[Region, Sequence[RowTable]] = {}
        self._events = {"forward": 0, "backward": 0}

    def order(self, backward: bool) -> tuple[int, int]:
        """Of the next event; stages come backward in the other order."""
        way = "backward" if backward else "forward"
        self._events[way] += 1
        return (-self.position if backward else self.position), self._events[way]


@dataclass
class _Watched:
    """A tensor of which something is recorded: several modules may get the same one, and it is written once."""

    tensor: Tensor
    version: int
    stage: Pass
    table: RowTable
    written: dict[Features, Any] = field(default_factory=dict)
    gradients: list[tuple[Seen, bool, tuple[int, ...]]] = field(default_factory=list)


class Recorder:
    """Records the first forward pass of each micro-batch and its backward pass; what is computed again is not recorded again.

    ``current`` is the pass whose forward is running; who makes the recorder sets it, and the pass's tables.
    """

    def __init__(self, writer: TraceWriter, watched: Iterable[Seen]) -> None:
        self.writer = writer
        self.current: Pass | None = None
        self.skipped: dict[str, str] = {}
        self._handles: list[Any] = []
        self._waiting: dict[int, deque[Pass]] = defaultdict(deque)
        self._last: _Watched | None = None
        for seen in watched:
            self._handles += [
                seen.module.register_forward_pre_hook(self._enter(seen), with_kwargs=True),
                seen.module.register_forward_hook(self._leave(seen)),
            ]

    def before(self, module: nn.Module, call: Any) -> None:
        """Run ``call(args, kwargs)`` before each forward of a module."""
        self._handles.append(module.register_forward_pre_hook(lambda _, args, kwargs: call(args, kwargs), with_kwargs=True))

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._waiting.clear()
        self.current = self._last = None

    def _enter(self, seen: Seen) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = first_tensor(args)
            self._see(seen, given if given is not None else first_tensor(kwargs.get("hidden_states", list(kwargs.values()))), output=False)

        return hook

    def _leave(self, seen: Seen) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            self._see(seen, first_tensor(output), output=True, bias=_bias(output))

        return hook

    def _see(self, seen: Seen, tensor: Tensor | None, output: bool, bias: Tensor | None = None) -> None:
        ports = [port for port in seen.ports if (port.out if output else port.into) is not None]
        if not ports:
            return
        again = torch._C._current_graph_task_id() >= 0
        stage = self._recomputed(seen, output) if again else self.current
        if stage is None:
            return
        if tensor is None or not tensor.is_floating_point():
            self._skip(ports, f"its {'output' if output else 'input'} is no tensor of numbers")
            return
        flat = tensor if seen.rows_of is None else seen.rows_of(tensor, output)
        table = find(stage.tables.get(seen.region, ()), flat.shape[:-1].numel())
        if table is None:
            self._skip(ports, f"its {'output' if output else 'input'} {list(tensor.shape)} has other rows than the batch's")
            return
        watched = self._watched(tensor, stage, table)
        if not again:
            # With a bias that is added later the output is another tensor than the one that is watched.
            written = watched if bias is None else _Watched(flat, 0, stage, table)
            self._write(written, seen, ports, flat if bias is None else flat + bias, output, "output" if output else "input")
            if not torch.is_grad_enabled():
                self._waiting[_way(seen, output)].append(stage)
        if tensor.requires_grad and torch.is_grad_enabled():
            self._follow(watched, seen, output)

    def _recomputed(self, seen: Seen, output: bool) -> Pass | None:
        """The pass that is computed again; None: its first forward had a graph. Micro-batches go back in the order in which they came."""
        waiting = self._waiting.get(_way(seen, output))
        return waiting.popleft() if waiting else None

    def _watched(self, tensor: Tensor, stage: Pass, table: RowTable) -> _Watched:
        last = self._last
        if last is None or last.tensor is not tensor or last.version != tensor._version or last.stage is not stage or last.table is not table:
            self._last = last = _Watched(tensor, tensor._version, stage, table)
        return last

    def _follow(self, watched: _Watched, seen: Seen, output: bool) -> None:
        """Record the gradient of the tensor, which is that of all its uses."""
        if not watched.gradients:
            stage, table, waiting = watched.stage, watched.table, watched.gradients

            def hook(gradient: Tensor) -> None:
                found = _Watched(gradient, gradient._version, stage, table)
                for module, out, shape in waiting:
                    rows = gradient.reshape(shape) if module.rows_of is None else module.rows_of(gradient, out)
                    ports = [port for port in module.ports if (port.out if out else port.into) is not None]
                    self._write(found, module, ports, rows, out, "grad_output" if out else "grad_input")

            watched.tensor.register_hook(hook)
        watched.gradients.append((seen, output, tuple(watched.tensor.shape)))

    @torch.no_grad()
    def _write(self, watched: _Watched, seen: Seen, ports: Iterable[Port], tensor: Tensor, output: bool, what: What) -> None:
        rows, order = real_rows(tensor, watched.table), watched.stage.order(what.startswith("grad"))
        for port in ports:
            features = port.out if output else port.into
            assert features is not None
            if features is ALL:
                features = Features(((0, rows.shape[1]),), ((0, rows.shape[1]),), rows.shape[1])
            if features not in watched.written:
                watched.written[features] = self.writer.keep(features.take(rows))
            self.writer.activation(port.name, what, watched.written[features], watched.table, features.columns, features.width, order)

    def _skip(self, ports: Iterable[Port], why: str) -> None:
        for port in ports:
            self.skipped.setdefault(port.name, why)


def _way(seen: Seen, output: bool) -> int:
    return 2 * id(seen) + output


def _bias(output: Any) -> Tensor | None:
    """A bias that megatron-core's linears give beside their output, to be added later."""
    if isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], Tensor) and output[1].dim() == 1:
        return output[1]
    return None
