"""Hooks that write what modules compute, forward and backward, while a model trains on its micro-batches."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tangram.align.trace.rows import RowTable, by_rows, find
from tangram.align.trace.seen import ALL, Features, Port, Region, Seen, first_tensor
from tangram.align.trace.store import Stored, TraceWriter, What, real_rows


class Pass:
    """One micro-batch on its way through one stage: forward and backward count their events by themselves.

    Args:
        position: of the stage in the pipeline.
    """

    def __init__(self, position: int) -> None:
        self.position = position
        self.tables: dict[Region, Sequence[RowTable] | None] = {}
        """By what rows are counted in; None: what passes now is not of the batch."""
        self._events = {"forward": 0, "backward": 0}

    def order(self, backward: bool) -> tuple[int, int]:
        """Of the next event; stages come backward in the other order."""
        way = "backward" if backward else "forward"
        self._events[way] += 1
        return (-self.position if backward else self.position), self._events[way]


@dataclass
class _Watched:
    """A tensor that is written once, whatever modules get it.

    Args:
        tensors: it and its aliases.
    """

    tensors: list[Tensor]
    version: int
    stage: Pass
    table: RowTable
    written: dict[Features, Stored] = field(default_factory=dict)


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
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            place, tensor = _first(args, kwargs)
            alias = self._see(seen, tensor, output=False)
            if alias is None:
                return None
            if isinstance(place, int):
                return (*args[:place], alias, *args[place + 1 :]), kwargs
            return args, {**kwargs, place: alias}

        return hook

    def _leave(self, seen: Seen) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            self._see(seen, first_tensor(output), output=True, bias=_bias(output))

        return hook

    def _see(self, seen: Seen, tensor: Tensor | None, output: bool, bias: Tensor | None = None) -> Tensor | None:
        """Record a tensor, and its gradient once that is known.

        Returns:
            Of an input an alias, to be used instead, so that its gradient is that by this module, whatever else gets the tensor; None: there is
            nothing to follow.
        """
        ports = [port for port in seen.ports if (port.out if output else port.into) is not None]
        again = torch._C._current_graph_task_id() >= 0
        stage = self._recomputed(seen, output) if again else self.current
        region = seen.out_region if output and seen.out_region is not None else seen.region
        tables = stage.tables.get(region, ()) if stage is not None else None
        if not ports or stage is None or tables is None:
            return None
        what = "output" if output else "input"
        if tensor is None or not tensor.is_floating_point() or tensor.dim() < 2:
            self._skip(ports, f"its {what} is no tensor of rows")
            return None
        flat = tensor if seen.rows_of is None else seen.rows_of(tensor, output)
        table = find(tables, len(by_rows(flat)))
        if table is None:
            self._skip(ports, f"its {what} {list(tensor.shape)} has other rows than the batch's")
            return None
        if not again:
            # With a bias that is added later the output is another tensor than the one that is at hand.
            watched = self._watched(tensor, stage, table) if bias is None else _Watched([flat], 0, stage, table)
            self._write(watched, ports, flat if bias is None else flat + bias, output, "output" if output else "input")
            if not torch.is_grad_enabled():
                self._waiting[_way(seen, output)].append(stage)
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return None
        followed = tensor if output else tensor.view_as(tensor)
        if not output:
            if self._last is not None and not again:
                self._last.tensors.append(followed)
            # One local module that is several of transformers has one gradient for all: that of the module around them.
            ports = ports if len(seen.ports) == 1 else []
        if ports and table.leads:
            followed.register_hook(self._follow(seen, ports, stage, table.backward, output))
        return None if output else followed

    def _recomputed(self, seen: Seen, output: bool) -> Pass | None:
        """The pass that is computed again; None: its first forward had a graph. Micro-batches go back in the order in which they came."""
        waiting = self._waiting.get(_way(seen, output))
        return waiting.popleft() if waiting else None

    def _watched(self, tensor: Tensor, stage: Pass, table: RowTable) -> _Watched:
        last = self._last
        known = last is not None and any(tensor is one for one in last.tensors) and (last.version, last.stage) == (tensor._version, stage)
        if last is None or not known or last.table is not table:
            self._last = last = _Watched([tensor], tensor._version, stage, table)
        return last

    def _follow(self, seen: Seen, ports: Sequence[Port], stage: Pass, table: RowTable, output: bool) -> Any:
        def hook(gradient: Tensor) -> None:
            rows = gradient if seen.rows_of is None else seen.rows_of(gradient, output)
            self._write(_Watched([gradient], 0, stage, table), ports, rows, output, "grad_output" if output else "grad_input")

        return hook

    @torch.no_grad()
    def _write(self, watched: _Watched, ports: Iterable[Port], tensor: Tensor, output: bool, what: What) -> None:
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


def _first(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int | str, Tensor | None]:
    """The tensor that a module works on, and where it stands among its arguments."""
    for number, value in enumerate(args):
        if isinstance(value, Tensor):
            return number, value
    for name in ("hidden_states", *kwargs):
        if isinstance(kwargs.get(name), Tensor):
            return name, kwargs[name]
    return 0, None
