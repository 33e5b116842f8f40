"""Sizes of the parallel axes and which layers each pipeline stage holds.

A pipeline of ``pp`` ranks with ``vpp`` model chunks on each runs its chunks in the order row 0 over all ranks, then row 1, and so on;
``Topology.order`` is that order. Each chunk holds a run of vision layers and a run of text layers, all of the former before any of
the latter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Literal

from tangram.errors import ConfigError

LayerGrid = tuple[tuple[int, ...], ...]
"""Layers per stage, ``[vpp][pp]``."""


@dataclass(frozen=True)
class Chunk:
    """One model chunk: what a rank holds of the pipeline at one virtual stage.

    ``vision`` and ``text`` are ranges of global 0-based layer numbers. ``*_first`` and ``*_last`` say that the chunk also holds what comes
    before the component's first layer (patch embedding, word embedding) or after its last (projector, final norm and head).
    """

    pp_rank: int
    vp_rank: int
    position: int
    """Place in the order of execution."""
    vision: range
    text: range
    vision_first: bool
    vision_last: bool
    text_first: bool
    text_last: bool

    @property
    def has_vision(self) -> bool:
        return len(self.vision) > 0

    @property
    def has_text(self) -> bool:
        return len(self.text) > 0


def layer_grid(layers: Sequence[int] | Sequence[Sequence[int]], what: str) -> LayerGrid:
    """Read a layer list, flat (``[12, 16]``) or nested (``[[12, 16]]``), as rows of virtual stages.

    Raises:
        ConfigError: empty, mixed, ragged, not integers, or negative.
    """
    if not isinstance(layers, (list, tuple)) or not layers:
        raise ConfigError(f"{what}: expected a list of layers per pipeline stage such as [12, 16], got {layers!r}")
    nested = [isinstance(row, (list, tuple)) for row in layers]
    if any(nested) != all(nested):
        raise ConfigError(f"{what}: {layers!r} mixes numbers and lists; write [12, 16] or [[12, 16], [4, 4]]")
    rows = [tuple(row) for row in layers] if all(nested) else [tuple(layers)]
    for row in rows:
        for number in row:
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise ConfigError(f"{what}: {number!r} in {layers!r} is not a number of layers; use integers >= 0")
    lengths = sorted({len(row) for row in rows})
    if len(lengths) != 1 or lengths == [0]:
        raise ConfigError(f"{what}: rows of {layers!r} have lengths {lengths}; every virtual stage needs one number per pipeline rank")
    return tuple(rows)


@dataclass(frozen=True)
class Topology:
    """A split of a model over devices.

    Args:
        tensor: tensor-parallel size.
        vision: layers of the vision encoder per stage, ``[vpp][pp]``; all zero for a model without one.
        text: layers of the text decoder per stage, ``[vpp][pp]``.
        expert: expert-parallel size.
        vision_tensor: tensor-parallel size of the vision encoder and the projector where it is another; None: ``tensor``. The component
            with the smaller size repeats its parts: rank r holds part r modulo the size.
        sequence_parallel: tensor-parallel ranks divide activations along the sequence between their layers' linears. It moves no weight.
        context: context-parallel size: ranks that hold the same weights and share the tokens of a micro-batch.
        ring: how many of them attend in a ring; see ``tangram.models.sequence.SequenceSplit``.
        vision_balance: data-parallel ranks deal out their pictures and videos among them; see ``tangram.models.media_balance``.

    Raises:
        ConfigError: sizes below 1, a tensor-parallel size that is no multiple of the other, sequence parallelism without tensor
            parallelism, grids of different shape, the text decoder empty, a stage of vision layers after the first text layer, a gap inside
            a component, a pipeline rank that holds no layer at all, or balance of a vision encoder that is cut over stages.
    """

    tensor: int = 1
    vision: LayerGrid = ((0,),)
    text: LayerGrid = ((1,),)
    expert: int = 1
    vision_tensor: int | None = None
    sequence_parallel: bool = False
    context: int = 1
    ring: int = 1
    vision_balance: bool = False
    _chunks: tuple[Chunk, ...] = field(default=(), init=False, repr=False, compare=False)

    @property
    def pipeline(self) -> int:
        return len(self.text[0])

    @property
    def virtual(self) -> int:
        return len(self.text)

    @property
    def vision_layers(self) -> int:
        return sum(map(sum, self.vision))

    @property
    def text_layers(self) -> int:
        return sum(map(sum, self.text))

    @property
    def order(self) -> tuple[Chunk, ...]:
        """All chunks in the order in which a micro-batch passes them."""
        return self._chunks

    @property
    def tensor_ranks(self) -> int:
        """Ranks of one stage that hold different parts of the model, experts aside."""
        return max(self.tensor, self.tensor_of("vision"))

    def tensor_of(self, component: Literal["vision", "text"]) -> int:
        """Tensor-parallel size of a component."""
        return self.vision_tensor or self.tensor if component == "vision" else self.tensor

    @property
    def vision_copies(self) -> int:
        """Times that the tensor-parallel ranks of one stage hold the vision encoder; each copy encodes pictures of its own."""
        return self.tensor_ranks // self.tensor_of("vision")

    def divides_sequence(self, component: Literal["vision", "text"]) -> bool:
        """Whether sequence parallelism divides a component's activations."""
        return self.sequence_parallel and self.tensor_of(component) > 1

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold the model once, experts aside."""
        return self.tensor_ranks * self.pipeline

    @property
    def ranks_of_a_batch(self) -> int:
        """Ranks that work on the same micro-batch: they hold the model once, or as often as context-parallel ranks share its tokens."""
        return self.model_parallel_size * self.context

    @property
    def process_unit(self) -> int:
        """What the number of processes is a multiple of: whole micro-batches, and whole sets of experts over context- and data-parallel ranks."""
        return self.ranks_of_a_batch * self.expert // gcd(self.context, self.expert)

    @classmethod
    def build(
        cls,
        *,
        vision_layers: int,
        text_layers: int,
        tensor: int = 1,
        vit_pp_layers: Sequence[int] | Sequence[Sequence[int]] | None = None,
        llm_pp_layers: Sequence[int] | Sequence[Sequence[int]] | None = None,
        expert: int = 1,
        vision_tensor: int | None = None,
        sequence_parallel: bool = False,
        context: int = 1,
        ring: int = 1,
        vision_balance: bool = False,
    ) -> Topology:
        """Build a topology from layer lists as users write them, and check them against the model.

        With both lists absent the pipeline size is 1. With one absent, the vision encoder goes to the first stage.

        Raises:
            ConfigError: as the class, and where a list does not sum to the component's number of layers.
        """
        text = layer_grid(llm_pp_layers, "llm_pp_layers") if llm_pp_layers is not None else ((text_layers,),)
        if vit_pp_layers is not None:
            vision = layer_grid(vit_pp_layers, "vit_pp_layers")
        else:
            flat = [vision_layers] + [0] * (len(text) * len(text[0]) - 1)
            vision = tuple(tuple(flat[i * len(text[0]) : (i + 1) * len(text[0])]) for i in range(len(text)))
        if (len(vision), len(vision[0])) != (len(text), len(text[0])):
            raise ConfigError(
                f"vit_pp_layers {_show(vision)} holds {len(vision)} x {len(vision[0])} stages (virtual x pipeline) but llm_pp_layers "
                f"{_show(text)} holds {len(text)} x {len(text[0])}; give both one number per stage, 0 where a stage holds none"
            )
        for what, grid, layers in (("vit_pp_layers", vision, vision_layers), ("llm_pp_layers", text, text_layers)):
            total = sum(map(sum, grid))
            if total != layers:
                raise ConfigError(f"{what} {_show(grid)} sums to {total}, but the model has {layers} layers; correct the list")
        return cls(
            tensor=tensor,
            vision=vision,
            text=text,
            expert=expert,
            vision_tensor=vision_tensor,
            sequence_parallel=sequence_parallel,
            context=context,
            ring=ring,
            vision_balance=vision_balance,
        )

    def __post_init__(self) -> None:
        sizes = ("tensor", self.tensor), ("expert", self.expert), ("vision tensor", self.tensor_of("vision")), ("context", self.context)
        for what, size in sizes:
            if size < 1:
                raise ConfigError(f"{what}-parallel size {size} must be at least 1")
        if self.sequence_parallel and self.tensor == 1:
            raise ConfigError("sequence_parallel divides activations over tensor-parallel ranks, and there is one; raise the tensor-parallel size")
        if self.ring < 1 or self.context % self.ring:
            raise ConfigError(f"a ring of {self.ring} ranks does not divide context-parallel size {self.context}; choose another")
        small, large = sorted((self.tensor, self.tensor_of("vision")))
        if large % small:
            raise ConfigError(
                f"tensor-parallel size {self.tensor_of('vision')} of the vision encoder and {self.tensor} of the text decoder: {large} is no "
                f"multiple of {small}, so ranks cannot share them; choose sizes of which one divides the other"
            )
        if self.text_layers == 0:
            raise ConfigError(f"llm_pp_layers {_show(self.text)} holds no layer")
        object.__setattr__(self, "_chunks", tuple(self._lay_out()))
        self._check_order()
        if self.vision_balance:
            self._check_balance()

    def _lay_out(self) -> Iterator[Chunk]:
        vision_done = text_done = 0
        for vp_rank, (vision_row, text_row) in enumerate(zip(self.vision, self.text, strict=True)):
            for pp_rank, (vision, text) in enumerate(zip(vision_row, text_row, strict=True)):
                yield Chunk(
                    pp_rank=pp_rank,
                    vp_rank=vp_rank,
                    position=vp_rank * self.pipeline + pp_rank,
                    vision=range(vision_done, vision_done + vision),
                    text=range(text_done, text_done + text),
                    vision_first=vision > 0 and vision_done == 0,
                    vision_last=vision > 0 and vision_done + vision == self.vision_layers,
                    text_first=text > 0 and text_done == 0,
                    text_last=text > 0 and text_done + text == self.text_layers,
                )
                vision_done += vision
                text_done += text

    def _check_order(self) -> None:
        lists = f"vit_pp_layers {_show(self.vision)}, llm_pp_layers {_show(self.text)}"
        filled = [chunk for chunk in self.order if chunk.has_vision or chunk.has_text]
        if len(filled) != len(self.order):
            empty = next(chunk for chunk in self.order if chunk not in filled)
            raise ConfigError(f"{lists}: pipeline rank {empty.pp_rank}, virtual stage {empty.vp_rank} holds no layer; give every stage at least one")
        last_vision = max((c.position for c in self.order if c.has_vision), default=-1)
        first_text = min(c.position for c in self.order if c.has_text)
        if first_text < last_vision:
            raise ConfigError(
                f"{lists}: the text decoder starts on stage {first_text} but the vision encoder ends on stage {last_vision} (stages counted "
                "in order of execution); the vision encoder must end no later than where the text decoder starts"
            )

    def _check_balance(self) -> None:
        held = [chunk.position for chunk in self.order if chunk.has_vision]
        if len(held) != 1:
            raise ConfigError(
                f"encoder_dp_balance needs the whole vision encoder on one stage, and {len(held)} hold some of it (vit_pp_layers "
                f"{_show(self.vision)}); put all its layers on one, or leave encoder_dp_balance out"
            )

    def chunk(self, pp_rank: int, vp_rank: int = 0) -> Chunk:
        """The chunk that pipeline rank ``pp_rank`` holds at virtual stage ``vp_rank``."""
        return self._chunks[vp_rank * self.pipeline + pp_rank]

    @property
    def text_first_chunk(self) -> Chunk:
        """The chunk with the word embedding."""
        return next(chunk for chunk in self.order if chunk.text_first)

    @property
    def text_last_chunk(self) -> Chunk:
        """The chunk with the final norm, the head and the loss."""
        return next(chunk for chunk in self.order if chunk.text_last)


def _show(grid: LayerGrid) -> str:
    rows = [list(row) for row in grid]
    return str(rows[0] if len(rows) == 1 else rows)
