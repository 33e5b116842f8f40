"""The trace of a model of transformers: the reference of an alignment, and what the fsdp2 backend runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tangram.align.trace.parameters import write_parameters, write_rectangles
from tangram.align.trace.record import Pass, Recorder
from tangram.align.trace.rows import Medium, RowTable, VisionRows, grids_of, media_keys, token_keys, whole
from tangram.align.trace.seen import ALL, Chosen, Port, Region, Seen, convolved_rows, first_tensor, projector_regions
from tangram.align.trace.store import Facts, TraceWriter
from tangram.backends.engine import Batch, CanonicalTensor, ForwardResult
from tangram.backends.fsdp2.engine import Fsdp2Engine
from tangram.backends.fsdp2.inputs import Supervised
from tangram.backends.fsdp2.placement import canonical_name
from tangram.backends.fsdp2.ulysses import share_of, shares
from tangram.config.model import ModelConfig

TOWERS = ("model.visual", "model.vision_tower")
PROJECTOR = "model.multi_modal_projector"
VISION: tuple[Region, ...] = ("patches", "layer", "norm", "merged")


class Fsdp2Trace:
    """Records one ``forward_backward`` of an engine; as ``tangram.align.trace.on_megatron.MegatronTrace``."""

    def __init__(self, engine: Fsdp2Engine, writer: TraceWriter, run: str, chosen: Chosen) -> None:
        self.engine, self.writer, self.chosen = engine, writer, chosen
        model = engine.run.model.config
        name: Callable[[str], str] = lambda key: canonical_name(key, model)  # noqa: E731
        self.facts = Facts(run, engine.run.training.dtype, dist.get_world_size(), only=[pattern.text for pattern in chosen.patterns])
        self.modules = HFModules(engine.module, model, name, writer, chosen, self.facts, engine.meshes.ulysses)

    def begin(self, micro_batches: Sequence[Batch]) -> None:
        """The next ``forward_backward`` is of these micro-batches."""
        self.modules.begin(micro_batches, self.engine.data_parallel_rank, self.engine.data_parallel_size)

    def finish(self, result: ForwardResult) -> None:
        """Write parameters and their gradients, and end the trace. Collective."""
        self.modules.close()
        self.facts.frozen = sorted(
            self.modules.name(key) for key, parameter in self.engine.parameters.items() if not parameter.requires_grad
        )
        write_parameters(self.writer, self.engine, self.chosen)
        self.writer.close(self.facts)


class ReferenceTrace:
    """Records one forward and backward pass of transformers' own model on a whole batch, in one process."""

    def __init__(
        self, module: nn.Module, model: ModelConfig, name: Callable[[str], str], writer: TraceWriter, run: str, chosen: Chosen, dtype: str
    ) -> None:
        self.writer, self.chosen = writer, chosen
        self.facts = Facts(run, dtype, only=[pattern.text for pattern in chosen.patterns])
        self.modules = HFModules(module, model, name, writer, chosen, self.facts, None)

    def begin(self, batch: Mapping[str, Tensor]) -> None:
        """The next forward pass is of this batch."""
        self.modules.begin([{**batch, "sample_ids": list(range(len(batch["input_ids"])))}], 0, 1)

    def finish(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
        """Write parameters and their gradients, by canonical name, and end the trace."""
        self.modules.close()
        for what, tensors in (("weight", weights), ("gradient", gradients)):
            wholes = (CanonicalTensor(name, (0,) * tensor.dim(), tuple(tensor.shape), tensor) for name, tensor in tensors.items())
            write_rectangles(self.writer, what, wholes, self.chosen)
        self.writer.close(self.facts)


class HFModules:
    """Hooks on a model of transformers.

    Args:
        model: of its family; None: nothing is known of its pictures, so that only text is recorded.
        name: canonical name of a parameter.
        ulysses: ranks that share the tokens of a sample.
    """

    def __init__(
        self,
        module: nn.Module,
        model: ModelConfig | None,
        name: Callable[[str], str],
        writer: TraceWriter,
        chosen: Chosen,
        facts: Facts,
        ulysses: dist.ProcessGroup | None,
    ) -> None:
        self.module, self.model, self.name, self.chosen, self.facts, self.ulysses = module, model, name, chosen, facts, ulysses
        self.names: list[str] = []
        """Of all modules that can be recorded, chosen or not."""
        self.tower = next((path for path in TOWERS if _has(module, path)), None)
        self.recorder = Recorder(writer, self._watched())
        self._batches: list[tuple[Tensor, Batch]] = []
        self._data = self._number = 0
        self._passes: list[list[Medium]] = []
        self.recorder.before(module, self._enter)
        if self.tower is not None and model is not None and model.image_encoder is not None:
            self.recorder.before(module.get_submodule(self.tower), self._enter_tower)

    def begin(self, micro_batches: Sequence[Batch], data: int, ranks: int) -> None:
        """The next forward passes are of these micro-batches, of data-parallel rank ``data`` of ``ranks``."""
        self._data, self._number = data, -1
        self._batches = [(token_keys(batch, data + number * ranks), batch) for number, batch in enumerate(micro_batches)]
        if self.model is not None:
            self.facts.media = [(data, number, media_keys(batch, keys, self.model)) for number, (keys, batch) in enumerate(self._batches)]

    def close(self) -> None:
        """Take the hooks away."""
        self.facts.skipped = {**self.recorder.skipped, **self.facts.skipped}
        self.recorder.close()

    def _watched(self) -> Iterator[Seen]:
        for path, module in self.module.named_modules():
            own = [key for key, parameter in module._parameters.items() if parameter is not None]
            below = next((key for key, _ in module.named_parameters()), own[0] if own else None)
            if not path or below is None or any(isinstance(inner, nn.ModuleList) for inner in module.modules()):
                continue
            full = self.name(f"{path}.{below}")
            if not full.endswith(f".{below}"):
                continue
            name = full.removesuffix(f".{below}")
            self.names.append(name)
            if name not in self.chosen:
                continue
            if any(parameter is not None and parameter.dim() == 3 for parameter in module._parameters.values()):
                self.facts.skipped[name] = "its tokens are dispatched to experts"
                continue
            word = module is self.module.get_input_embeddings()  # type: ignore[operator]
            if isinstance(module, nn.Embedding) and not word:
                self.facts.skipped[name] = "it looks up positions, not rows of the batch"
                continue
            rows_of = convolved_rows(module) if isinstance(module, nn.modules.conv._ConvNd) else None
            yield Seen(module, (Port(name, None if word else ALL, ALL),), *self._regions(path, module), rows_of)

    def _regions(self, path: str, module: nn.Module) -> tuple[Region, Region | None]:
        if self.module.get_output_embeddings() is module:  # type: ignore[operator]
            return "head", None
        if path.startswith(PROJECTOR) or "merger" in path:
            return projector_regions(module)
        if self.tower is not None and path.startswith(f"{self.tower}."):
            return ("patches" if "embed" in path.removeprefix(self.tower) else "layer"), None
        return "text", None

    def _enter(self, args: Any, kwargs: Any) -> None:
        self._number += 1
        keys, batch = self._batches[self._number]
        stage = Pass(0)
        every = [torch.arange(keys.shape[1])]
        learnt = Supervised.of(batch, "per_token_loss", torch.device("cpu"))
        if self.ulysses is not None:
            share = share_of(keys.shape[1], self.ulysses)
            every.insert(0, torch.arange(share.start, share.start + share.size))
            learnt = learnt.columns_of(share.start, share.size, counts=False)
        tables = [RowTable(keys[:, part].flatten(0, 1)) for part in every]
        if self.ulysses is not None:
            # The embedding is whole on every rank, and leads to its own columns.
            own = torch.isin(torch.arange(keys.shape[1]), every[0]).expand(len(keys), -1).flatten()
            tables[-1] = RowTable(tables[-1].keys, led_to=own)
        # A head that gives learnt columns alone counts them from this rank's first.
        columns = learnt.head_columns() + int(every[0][0])
        stage.tables |= {"text": tables, "head": [*tables, RowTable(keys[:, columns].flatten(0, 1), partial=True)]}
        self._passes = []
        if self.model is not None:
            images, videos = grids_of(batch)
            owners = [Medium((self._data, self._number, medium), grid) for medium, grid in enumerate(images + videos)]
            self._passes = [media for media in (owners[: len(images)], owners[len(images) :]) if media]
        self.recorder.current = stage

    def _enter_tower(self, args: Any, kwargs: Any) -> None:
        """A pass over the images, over the videos, or over what only fills up."""
        stage, model = self.recorder.current, self.model
        if stage is None or torch._C._current_graph_task_id() >= 0:
            return
        assert model is not None and model.image_encoder is not None
        given = first_tensor(args)
        pixels = given if given is not None else first_tensor(list(kwargs.values()))
        assert pixels is not None
        if not self._passes or not bool(pixels.any()):
            stage.tables |= dict.fromkeys(VISION)
            return
        media = self._passes.pop(0)
        rows = VisionRows(media, model.image_encoder.vision_encoder, whole if self.ulysses is None else self._parts, led_by_parts=True)
        stage.tables |= {
            "patches": [*rows.raster, *rows.places],
            "layer": rows.places,
            "norm": [rows.places[0], rows.cells[0]],
            "merged": rows.cells,
        }

    def _parts(self, rows: int, unit: int) -> list[Tensor]:
        """A tower's rows of this rank, in whole cells, where there are enough for all."""
        assert self.ulysses is not None
        cells, ranks = rows // unit, dist.get_world_size(self.ulysses)
        if cells < ranks:
            return whole(rows, unit)
        sizes, rank = [unit * size for size in shares(cells, ranks)], dist.get_rank(self.ulysses)
        first = sum(sizes[:rank])
        return [torch.arange(first, first + sizes[rank]), torch.arange(rows)]


def _has(module: nn.Module, path: str) -> bool:
    try:
        module.get_submodule(path)
    except AttributeError:
        return False
    return True
