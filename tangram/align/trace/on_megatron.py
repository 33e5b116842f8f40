"""The trace of an assembled model on megatron-core: its modules by the tensor table, its rows by how activations are divided."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tangram.align.trace.parameters import write_parameters
from tangram.align.trace.record import Pass, Recorder
from tangram.align.trace.rows import Medium, RowTable, VisionRows, media_keys, take_parts, token_keys, whole
from tangram.align.trace.seen import ALL, Chosen, Features, Port, Region, Seen, composite_name, projector_regions
from tangram.align.trace.store import Facts, TraceWriter
from tangram.backends.engine import Batch, ForwardResult
from tangram.backends.megatron.chunks import LocalChunk
from tangram.backends.megatron.engine import MegatronEngine
from tangram.models.media_balance import BalancedMedia
from tangram.models.media_share import MediaShare
from tangram.models.regions import split_of
from tangram.models.sequence import SequenceSplit
from tangram.placement.blocks import Block, LocalTensor

HEAD = "text_decoder.output_layer"
EMBEDDING = "text_decoder.embedding.word_embeddings"
HEAD_NORMS = {"q_layernorm": 0, "k_layernorm": 1}
"""Norms over a head, and which source of ``linear_qkv`` their heads are."""


class MegatronTrace:
    """Records one ``forward_backward`` of an engine.

    Args:
        writer: of this rank.
        run: what the facts say the run is.
        chosen: the modules to record.
    """

    def __init__(self, engine: MegatronEngine, writer: TraceWriter, run: str, chosen: Chosen) -> None:
        self.engine, self.writer, self.chosen = engine, writer, chosen
        self.facts = Facts(run, engine.run.training.dtype, torch.distributed.get_world_size(), only=[pattern.text for pattern in chosen.patterns])
        found = [list(_watched(chunk, root, engine, self.facts.skipped, chosen)) for chunk, root in zip(engine.chunks, _roots(engine), strict=True)]
        self.recorder = Recorder(writer, itertools.chain(*found))
        self._batches: Sequence[Batch] = ()

    def begin(self, micro_batches: Sequence[Batch]) -> None:
        """The next ``forward_backward`` is of these micro-batches."""
        self._batches = micro_batches
        data = self.engine.data_parallel_rank
        keys = [token_keys(batch, data + number * self.engine.data_parallel_size) for number, batch in enumerate(micro_batches)]
        self.facts.media = [(data, number, media_keys(batch, keys[number], self.engine.model)) for number, batch in enumerate(micro_batches)]
        for chunk, root in zip(self.engine.chunks, _roots(self.engine), strict=True):
            stage = _Stage(self.recorder, chunk, root, keys, micro_batches, data)
            self.recorder.before(root, stage.enter)
            if root.image_encoder is not None:
                self.recorder.before(root.image_encoder, stage.enter_vision)

    def finish(self, result: ForwardResult) -> None:
        """Write parameters and their gradients, and end the trace. Collective."""
        skipped = self.recorder.skipped
        self.recorder.close()
        scale = self.engine.loss_scale * max(result.weight, 1)
        self.facts.gradient_scale = 1 / scale
        self.facts.skipped = {**skipped, **self.facts.skipped}
        self.facts.frozen = sorted(_frozen(self.engine))
        write_parameters(self.writer, self.engine, self.chosen)
        self.writer.close(self.facts)


def _frozen(engine: MegatronEngine) -> set[str]:
    """Canonical names of this rank's parameters that are not trained, and have no gradient, not even zeros."""
    return {
        source.name
        for chunk in engine.chunks
        for name, tensor in chunk.placement.tensors.items()
        for source in tensor.sources
        if not (chunk.parameters[name].requires_grad or getattr(chunk.parameters[name], "idle", False))
    }


def _roots(engine: MegatronEngine) -> list[Any]:
    """The chunks without their wrappers."""
    found = []
    for model in engine.models:
        while hasattr(model, "module"):
            model = model.module
        found.append(model)
    return found


class _Stage:
    """Follows the micro-batches through one chunk, which takes them in order."""

    def __init__(self, recorder: Recorder, chunk: LocalChunk, root: Any, keys: list[Tensor], batches: Sequence[Batch], data: int) -> None:
        self.recorder, self.chunk, self.root, self.data = recorder, chunk, root, data
        self._next = iter(enumerate(zip(keys, batches, strict=True)))
        self._number = 0

    def enter(self, args: Any, kwargs: Any) -> None:
        """The chunk's forward begins."""
        self._number, (keys, batch) = next(self._next)
        stage = Pass(self.chunk.chunk.position)
        if self.root.text_decoder is not None:
            stage.tables |= self._text(keys, batch)
        self.recorder.current = stage

    def _text(self, keys: Tensor, batch: Batch) -> dict[Region, Sequence[RowTable]]:
        root = self.root
        split = split_of(keys.shape[1], root.config, root.tp_group, context=root.context)
        ours = keys.transpose(0, 1)
        rows, columns = (batch["labels"][:, 1:] != -100).nonzero(as_tuple=True)
        here, local = split.context_local_of(columns)
        learnt = take_parts(ours, [split.context_positions()])[0].keys.unflatten(0, (split.context_length, -1))[local, rows[here]]
        own = torch.isin(torch.arange(keys.shape[1]), split.context_positions())
        return {
            "text": take_parts(ours, [split.positions(), split.context_positions()]),
            # Context ranks all have the embedding whole, and each needs its own tokens.
            "tokens": [RowTable(keys.flatten(0, 1), led_to=None if root.context is None else own.expand(len(keys), -1).flatten())],
            "head": [RowTable(learnt.reshape(-1, 3), partial=True)],
        }

    def enter_vision(self, args: Any, kwargs: Any) -> None:
        """The vision encoder's forward begins."""
        encoder, share = self.root.image_encoder, self.root.media_share
        assert self.recorder.current is not None and share is not None
        media = [Medium(owner, grid) for owner, grid in zip(_owners(share, self.data, self._number), share.own_grids, strict=True)]

        def parts(rows: int, unit: int) -> list[Tensor]:
            split: SequenceSplit = split_of(rows, encoder.config, encoder.tp_group, unit=unit)
            return [split.positions(), split.context_positions()] if split.tensor > 1 else whole(rows, unit)

        rows = VisionRows(media, encoder.section.vision_encoder, parts)
        self.recorder.current.tables |= {
            "patches": [*rows.raster, *rows.places],
            "layer": rows.places,
            "norm": [rows.places[0], rows.cells[0]],
            "merged": rows.cells,
        }


def _owners(share: MediaShare | BalancedMedia, data: int, number: int) -> list[tuple[int, int, int] | None]:
    """Of each medium that this rank encodes."""
    if isinstance(share, BalancedMedia):
        found: list[tuple[int, int, int] | None] = [(owner, number, medium) for owner, medium in share.dealt[share.group.rank()]]
    else:
        found = [(data, number, medium) for medium in share.own]
    return found or [None]


def _watched(chunk: LocalChunk, root: Any, engine: MegatronEngine, skipped: dict[str, str], chosen: Chosen) -> Iterator[Seen]:
    """The modules of a chunk that are modules of transformers too, or parts of some; what of them is left out goes to ``skipped``."""
    tensors, every = chunk.placement.tensors, list(engine.canonical_shapes)
    for path, module in root.named_modules():
        own = [name for name, parameter in module._parameters.items() if parameter is not None]
        ports: Sequence[Port] = ()
        if path == HEAD:
            ports = _head(tensors)
        elif own:
            ports = _leaf(path, own, tensors, chunk, skipped)
        elif path and not any(isinstance(inner, nn.ModuleList) for inner in module.modules()):
            ports = _composite(path, tensors, every)
        kept = tuple(port for port in ports if port.name in chosen)
        if kept:
            yield Seen(module, kept, *_regions(path, module))


def _head(tensors: Mapping[str, LocalTensor]) -> Sequence[Port]:
    weight = tensors.get(f"{HEAD}.weight", tensors.get(f"{EMBEDDING}.weight"))
    assert weight is not None
    real = [block for block in weight.blocks if block.canonical is not None]
    return [Port("lm_head", ALL, _along(real, 0, weight.sources[0].shape[0]) if real else None)]


def _leaf(path: str, own: Sequence[str], tensors: Mapping[str, LocalTensor], chunk: LocalChunk, skipped: dict[str, str]) -> Sequence[Port]:
    names = {source.name.rpartition(".")[0] for name in own for source in tensors[f"{path}.{name}"].sources}
    weight = tensors.get(f"{path}.weight")
    if weight is None:
        return ()
    if weight.rule.place == "expert":
        skipped.update(dict.fromkeys(names, "its tokens are dispatched to experts"))
        return ()
    if getattr(chunk.parameters[f"{path}.weight"], "idle", False):
        skipped.update(dict.fromkeys(names, "it takes no part"))
        return ()
    if any(not source.name.endswith(".weight") for source in weight.sources):
        return ()
    if path.endswith(".router"):
        skipped.update(dict.fromkeys(names, "the router's output has another form"))
        return [Port(name, ALL, None) for name in names]
    if path == EMBEDDING:
        return [Port(name, None, ALL) for name in names]
    kind = path.rpartition(".")[2]
    if kind in HEAD_NORMS:
        queries = tensors[f"{path.rpartition('.')[0]}.linear_qkv.weight"]
        source = queries.sources[HEAD_NORMS[kind]]
        heads = _along([block for block in queries.blocks if block.canonical == source.name], 0, source.shape[0])
        # The norm has its heads alone, one after the other.
        own_heads = Features(((0, sum(count for _, count in heads.columns)),), heads.columns, heads.width)
        return [Port(name, own_heads, own_heads) for name in names]
    ports = []
    for source in weight.sources:
        blocks = [block for block in weight.blocks if block.canonical == source.name]
        out = _along(blocks, 0, source.shape[0])
        into = _along(blocks, 1, source.shape[1]) if len(source.shape) == 2 else ALL if len(source.shape) > 2 else out
        ports.append(Port(source.name.removesuffix(".weight"), into, out))
    return ports


def _along(blocks: Sequence[Block], axis: int, width: int) -> Features:
    """Which of a module's features the rows (axis 0: outputs) or columns (1: inputs) of its weight's blocks are."""
    runs: dict[int, tuple[int, int]] = {}
    for block in blocks:
        runs[block.local_start[axis]] = (block.canonical_start[axis], block.shape[axis])
    local = tuple((start, count) for start, (_, count) in sorted(runs.items()))
    return Features(local, tuple(run for _, run in sorted(runs.items())), width)


def _composite(path: str, tensors: Mapping[str, LocalTensor], every: Sequence[str]) -> Sequence[Port]:
    inside = [tensor for name, tensor in tensors.items() if name.startswith(f"{path}.")]
    if any(tensor.rule.place == "expert" for tensor in inside) and path.endswith("experts"):
        return ()
    # What only some layers have beside their own is no part of the layer there.
    shared = [tensor for tensor in inside if tensor.rule.layers is None] or inside
    name = composite_name(dict.fromkeys((source.name for tensor in shared for source in tensor.sources), ""), every)
    return [Port(name, ALL, ALL)] if name is not None and not _is_leaf(name, every) else ()


def _is_leaf(name: str, every: Sequence[str]) -> bool:
    return all("." not in full.removeprefix(f"{name}.") for full in every if full.startswith(f"{name}."))


def _regions(path: str, module: nn.Module) -> tuple[Region, Region | None]:
    if path == HEAD:
        return "head", None
    if path == EMBEDDING:
        return "tokens", None
    if path.startswith("text_decoder."):
        return "text", None
    if ".layers." in path and ".deepstack_layer" not in path:
        return "layer", None
    if path.startswith("image_encoder.projector") or ".deepstack_layer" in path:
        return projector_regions(module)
    return "patches", None
