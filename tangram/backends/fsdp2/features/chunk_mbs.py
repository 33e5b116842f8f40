"""Chunks of micro-batches: a module runs on a few rows at a time, under one gathering of its weights.

What a module needs for its own computation then grows with the chunk and not with the micro-batch. Outputs are joined, so what is around the
module sees no difference; random draws, such as dropout's, are other ones than those of a whole micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from tangram.backends.fsdp2.features.wrapped import Wrapped
from tangram.backends.fsdp2.inputs import has_mrope
from tangram.config.fsdp2 import ChunkMbsPlan
from tangram.errors import ConfigError

_PLAN = "features.chunkmbs_plan"


class Chunked(Wrapped):
    """A forward that is called on slices of the named arguments; the others are the same for all slices.

    The first tensor among the named arguments says how many rows there are. A named tensor of one row is given to all slices, as torch would
    broadcast it, and None stays None. Tensors in tuples, lists and dicts count, too.
    """

    def __init__(self, path: str, module: nn.Module, plan: ChunkMbsPlan) -> None:
        super().__init__(path, module)
        self.plan = plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises: ConfigError, where an argument of the plan is not passed, has another number of rows, or an output cannot be joined."""
        plan, rows = self.plan, self._rows(args, kwargs)
        if rows <= plan.chunk_mbs:
            return self.inner(*args, **kwargs)
        outputs = []
        for start in range(0, rows, plan.chunk_mbs):
            length = min(plan.chunk_mbs, rows - start)

            def part(value: Any, start: int = start, length: int = length) -> Any:
                whole = not isinstance(value, Tensor) or value.shape[plan.batch_dim] == 1
                return value if whole else value.narrow(plan.batch_dim, start, length)

            some = [tree_map(part, value) if index in plan.chunk_arg_indexs else value for index, value in enumerate(args)]
            named = {name: tree_map(part, value) if name in plan.chunk_kwarg_names else value for name, value in kwargs.items()}
            outputs.append((length, self.inner(*some, **named)))
        return self._join(outputs)

    def _rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        plan, named = self.plan, {}
        for index in plan.chunk_arg_indexs:
            if index >= len(args):
                raise ConfigError(
                    f"{_PLAN}.chunk_arg_indexs: {self.path} is called with {len(args)} arguments by position, none is number {index}; "
                    f"it gets by name: {', '.join(kwargs)}, which go into chunk_kwarg_names"
                )
            named[f"argument {index}"] = args[index]
        for name in plan.chunk_kwarg_names:
            if name not in kwargs:
                raise ConfigError(
                    f"{_PLAN}.chunk_kwarg_names: {self.path} is not given {name} by name, but {', '.join(kwargs) or 'nothing'}; correct it"
                )
            named[name] = kwargs[name]
        rows = None
        for name, value in named.items():
            for tensor in tree_leaves(value):
                if not isinstance(tensor, Tensor):
                    continue
                if not -tensor.dim() <= plan.batch_dim < tensor.dim():
                    raise ConfigError(f"{_PLAN}.batch_dim {plan.batch_dim}: {name} of {self.path} has the shape {list(tensor.shape)}; leave it out")
                size = tensor.shape[plan.batch_dim]
                rows = size if rows is None else rows
                if size not in (1, rows):
                    raise ConfigError(
                        f"{_PLAN}: {name} of {self.path} has the shape {list(tensor.shape)}, {size} rows at dim {plan.batch_dim}, but the arguments "
                        f"before it have {rows}; leave it out, or correct batch_dim"
                    )
        if rows is None:
            raise ConfigError(f"{_PLAN} names no tensor among the arguments of {self.path}; correct chunk_arg_indexs and chunk_kwarg_names")
        return rows

    def _join(self, outputs: list[tuple[int, Any]]) -> Any:
        dim = self.plan.batch_dim
        flat = [tree_flatten(output) for _, output in outputs]
        joined: list[Tensor | None] = []
        for number, values in enumerate(zip(*(leaves for leaves, _ in flat), strict=True)):
            if all(value is None for value in values):
                joined.append(None)
                continue
            for (length, _), value in zip(outputs, values, strict=True):
                if not isinstance(value, Tensor) or not -value.dim() <= dim < value.dim() or value.shape[dim] != length:
                    is_ = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                    raise ConfigError(
                        f"{_PLAN}: output {number} of {self.path} for {length} rows is {is_}, so outputs cannot be joined at dim {dim}; name every "
                        "argument that has rows in chunk_arg_indexs or chunk_kwarg_names, or leave the module out"
                    )
            joined.append(torch.cat(values, dim))
        return tree_unflatten(joined, flat[0][1])


def refuse_3d_positions(model: nn.Module) -> None:
    """Raises: ConfigError, for a model with 3-D positions ``[3, b, s]``: their rows lie at dim 1, those of all else at dim 0."""
    if has_mrope(getattr(model, "config", None)):
        raise ConfigError(
            f"features.enable_chunk_mbs: {type(model).__name__} has 3-D positions (mrope_section), whose rows are not at dim 0 as those of the "
            "hidden states are; switch it off, and take a smaller training.micro_batch_size with more gradient_accumulation_steps"
        )
