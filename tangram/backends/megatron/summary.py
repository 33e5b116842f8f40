"""What a run says of itself before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from rich.console import Console
from rich.table import Table

from tangram.config.model import ModelConfig
from tangram.config.run import RunConfig
from tangram.placement.blocks import place_all
from tangram.placement.table import Rule
from tangram.placement.topology import Topology


@dataclass(frozen=True)
class ComponentSize:
    """Parameters of one component of the whole model, each counted once."""

    name: str
    parameters: int
    frozen: bool
    why: str


def component_sizes(model: ModelConfig, table: list[Rule], topology: Topology) -> list[ComponentSize]:
    """Vision encoder, projector and text decoder with their sizes, in the order of execution."""
    seen: dict[str, int] = {}
    owners: dict[str, str] = {}
    for placement in place_all(table, topology):
        for tensor in placement.tensors.values():
            for block in tensor.blocks:
                if block.canonical is None or tensor.rule.tied:
                    continue
                owners[block.canonical] = _component(tensor.name)
    for rule in table:
        layers = topology.vision_layers if rule.component == "vision" else topology.text_layers
        numbers = layers if rule.layers is None else len(rule.layers)
        for i in range(numbers if rule.place in ("layer", "expert") else 1):
            for source in rule.sources:
                seen[source.name.format(i=i)] = prod(source.shape)
    frozen = _frozen(model)
    sizes: dict[str, int] = {}
    for name, owner in owners.items():
        sizes[owner] = sizes.get(owner, 0) + seen[name]
    return [ComponentSize(name, sizes[name], *frozen[name]) for name in frozen if name in sizes]


def _component(local: str) -> str:
    if local.startswith("text_decoder."):
        return "text_decoder"
    return "vision_projector" if local.startswith("image_encoder.projector.") else "vision_encoder"


def _frozen(model: ModelConfig) -> Mapping[str, tuple[bool, str]]:
    parts = {"text_decoder": model.text_decoder}
    if model.image_encoder is not None:
        parts = {"vision_encoder": model.image_encoder.vision_encoder, "vision_projector": model.image_encoder.vision_projector, **parts}  # type: ignore[dict-item]
    return {name: (part.freeze, "given" if "freeze" in part.model_fields_set else "default") for name, part in parts.items()}


def summary_table(run: RunConfig, model: ModelConfig, table: list[Rule], topology: Topology, data_size: int, batch: int) -> str:
    """The tables at the start of a log: components, split, batch sizes."""
    components = Table(title="components", title_justify="left")
    for column in ("component", "parameters", "trainable", "freeze", "dtype"):
        components.add_column(column, justify="right" if column == "parameters" else "left")
    sizes = component_sizes(model, table, topology)
    for size in sizes:
        freeze = f"{str(size.frozen).lower()} ({size.why})"
        components.add_row(size.name, f"{size.parameters:,}", "no" if size.frozen else "yes", freeze, run.training.dtype)
    total, trainable = sum(s.parameters for s in sizes), sum(s.parameters for s in sizes if not s.frozen)
    components.add_row("all", f"{total:,}", f"{trainable:,}", "", "")
    console = Console(width=110, color_system=None)
    with console.capture() as capture:
        console.print(components)
    micro = batch // (run.training.micro_batch_size * data_size)
    sequence = " with sequence parallelism" if topology.sequence_parallel else ""
    copies = topology.vision_copies
    vision = f" (vision {topology.tensor_of('vision')}, {copies} copies that encode pictures of their own)" if copies > 1 else ""
    context = f" x context {topology.context} ({_context(topology)})" if topology.context > 1 else ""
    lines = [
        capture.get().rstrip(),
        f"split: tensor {topology.tensor}{vision}{sequence}{context} x pipeline {topology.pipeline} x virtual {topology.virtual} x data {data_size}"
        + (f", of which {topology.expert} divide the experts" if topology.expert > 1 else ""),
        *(
            f"  stage {chunk.position} (pipeline rank {chunk.pp_rank}, virtual {chunk.vp_rank}):"
            f"{_show('vision', chunk.vision)}{_show('text', chunk.text)}"
            for chunk in topology.order
        ),
        f"batch: {batch} samples a step = {run.training.micro_batch_size} a micro-batch x {micro} micro-batches x {data_size} data-parallel ranks",
    ]
    if not model.text_decoder.untie_embeddings_and_output_weights:
        lines.append("lm_head: tied to embed_tokens")
    return "\n".join(lines)


def _context(topology: Topology) -> str:
    ulysses = topology.context // topology.ring
    parts = [f"Ulysses {ulysses}"] if ulysses > 1 else []
    return " in ".join(parts + ([f"ring {topology.ring}"] if topology.ring > 1 else []))


def _show(name: str, layers: range) -> str:
    return f" {name} {layers.start}..{layers.stop - 1}" if len(layers) else ""
