"""Ulysses: ranks that share the tokens of a sample.

Every rank of a group has the whole micro-batch. Embeddings are looked up and image features are merged into them whole; what enters the first
decoder layer is this rank's run of columns. Between layers a rank has its columns and all heads; in attention it has all columns and its
share of the heads, which an all-to-all brings and takes away. So masks, positions and packing are the model's own, of the whole sequence, and
attention is the implementation that the run file names. The patches of a Qwen tower are shared in the same way, in whole merged cells, and
gathered after its mergers.

Nothing is patched: layers get forward hooks, and attention is registered with transformers under a name of its own. Gradients are sums over
ranks anyway, and a rank's are those of its columns.
Source: DeepSpeed-Ulysses (arXiv 2309.14509).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tangram.config.fsdp2 import LossConfig
from tangram.errors import ConfigError, DataError
from tangram.platform.exchange import exchange, gather

PREFIX = "ulysses_"
"""Before the name of the attention that it wraps: the name of ours in transformers' registers."""


def shares(length: int, ranks: int) -> list[int]:
    """Consecutive parts of ``length`` columns, the first ``length % ranks`` of them one longer."""
    each, rest = divmod(length, ranks)
    return [each + (rank < rest) for rank in range(ranks)]


@dataclass(frozen=True)
class Share:
    """How one sequence lies on the ranks of a group.

    Args:
        sizes: columns of each rank.
        cu_seqlens: ends of the segments that attend to themselves alone, of the whole sequence; None: the mask says.
    """

    group: dist.ProcessGroup
    sizes: Sequence[int]
    cu_seqlens: Tensor | None = None

    @property
    def start(self) -> int:
        return sum(self.sizes[: self.rank])

    @property
    def size(self) -> int:
        return self.sizes[self.rank]

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def own(self, whole: Tensor, axis: int) -> Tensor:
        """This rank's columns."""
        return whole.narrow(axis, self.start, self.size)

    def whole(self, own: Tensor) -> Tensor:
        """The columns of all ranks of ``[b, columns, ...]``."""
        return gather(own.transpose(0, 1), self.group, self.sizes).transpose(0, 1)


def share_of(length: int, group: dist.ProcessGroup) -> Share:
    """The share of a text sequence.

    Raises:
        DataError: it has fewer columns than the group has ranks.
    """
    ranks = dist.get_world_size(group)
    if length < ranks:
        raise DataError(f"a micro-batch of {length} tokens cannot be shared by parallel.ulysses_parallel_size {ranks} ranks; make it smaller")
    return Share(group, shares(length, ranks))


def share_tokens(model: nn.Module, group: dist.ProcessGroup, loss: LossConfig) -> None:
    """Make a Hugging Face model share tokens over ``group``, before it is sharded.

    Raises:
        ConfigError: as ``check_sharing``.
    """
    ranks = dist.get_world_size(group)
    text = check_sharing(model, ranks, loss)
    _use_own_attention(text.config)
    text.register_forward_pre_hook(_TextModel(group), with_kwargs=True)
    for number, layer in enumerate(text.layers):
        layer.register_forward_pre_hook(_TextLayer(group, first=number == 0), with_kwargs=True)
    for tower in [module for module in model.modules() if is_shared_tower(module, ranks)]:
        _share_tower(tower, group)


def check_sharing(model: nn.Module, ranks: int, loss: LossConfig) -> Any:
    """The text model, whose layers can be shared over ``ranks``.

    Raises:
        ConfigError: heads that cannot be shared, a loss that needs the whole sequence, or a model whose layers are not as transformers' are.
    """
    if loss.loss_type == "raw":
        raise ConfigError(
            f"features.loss_cfg.loss_type raw: the model's own loss needs whole samples, which parallel.ulysses_parallel_size {ranks} cuts; "
            "use default, which is the same mean of each micro-batch"
        )
    if loss.router_aux_loss_coef > 0:
        raise ConfigError(
            f"features.loss_cfg.router_aux_loss_coef {loss.router_aux_loss_coef}: the routers' loss is one of whole micro-batches, which "
            f"parallel.ulysses_parallel_size {ranks} cuts; set the first to 0 or the second to 1"
        )
    get_decoder: Callable[[], nn.Module] | None = getattr(model, "get_decoder", None)
    text: Any = get_decoder() if get_decoder is not None else None
    layers: Any = getattr(text, "layers", None)
    attention = getattr(layers[0], "self_attn", None) if layers else None
    if attention is None or not hasattr(attention, "config"):
        raise ConfigError(
            f"parallel.ulysses_parallel_size: {type(model).__name__} has no decoder with layers[i].self_attn, as transformers' models have; "
            "set it to 1"
        )
    check_heads(text.config.num_attention_heads, text.config.num_key_value_heads, ranks)
    return text


def check_heads(query: int, key_value: int, ranks: int) -> None:
    """Check that the heads of the text model can be shared.

    Raises:
        ConfigError: they cannot.
    """
    if query % ranks:
        raise ConfigError(f"parallel.ulysses_parallel_size {ranks} must divide the {query} attention heads of the text model; choose another")
    if key_value % ranks and ranks % key_value:
        raise ConfigError(
            f"parallel.ulysses_parallel_size {ranks} must divide the {key_value} key/value heads of the text model, or be a multiple of them; "
            "choose another"
        )


def is_shared_tower(module: nn.Module, ranks: int) -> bool:
    """Whether a module is a vision tower whose patches are shared: one of Qwen's, with heads that can be dealt out. Others run whole on
    every rank, which is as exact and costs what a single rank costs."""
    blocks: Any = getattr(module, "blocks", None)
    if not isinstance(blocks, nn.ModuleList) or not hasattr(module, "merger") or not hasattr(module, "spatial_merge_size"):
        return False
    heads: int = blocks[0].attn.num_heads  # type: ignore[union-attr,assignment]
    return heads % ranks == 0


class _TextModel:
    """DeepStack adds image features between layers, so it needs those of our columns."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        mask, features = kwargs.get("visual_pos_masks"), kwargs.get("deepstack_visual_embeds")
        if mask is None or features is None:
            return args, kwargs
        share = share_of(mask.shape[1], self.group)
        columns = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)[mask]
        ours = (columns >= share.start) & (columns < share.start + share.size)
        return args, {**kwargs, "visual_pos_masks": share.own(mask, 1), "deepstack_visual_embeds": [rows[ours] for rows in features]}


class _TextLayer:
    """Before a decoder layer: rotary positions of our columns; before the first, the columns themselves."""

    def __init__(self, group: dist.ProcessGroup, first: bool) -> None:
        self.group, self.first = group, first

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if "position_embeddings" not in kwargs:
            raise ConfigError(f"parallel.ulysses_parallel_size: {type(module).__name__} is not given position_embeddings by its model; set it to 1")
        rotary: tuple[Tensor, Tensor] = kwargs["position_embeddings"]
        share = share_of(rotary[0].shape[-2], self.group)
        if self.first:
            args = (share.own(args[0], 1), *args[1:])
        return args, {**kwargs, "position_embeddings": tuple(share.own(part, -2) for part in rotary), "ulysses": share}


class _Tower:
    """Hooks of a vision tower. Its mergers must know how the pass that they are in was shared, which the first block sees."""

    def __init__(self, group: dist.ProcessGroup, cell: int) -> None:
        self.group, self.cell = group, cell
        self.cells: list[int] | None = None
        """Merged cells of each rank; None: too few for all, so that every rank has the whole."""

    def enter_block(self, first: bool) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            rotary: tuple[Tensor, Tensor] = kwargs["position_embeddings"]
            cells, ranks = rotary[0].shape[0] // self.cell, dist.get_world_size(self.group)
            if first:
                self.cells = shares(cells, ranks) if cells >= ranks else None
            if self.cells is None:
                return args, kwargs
            ends: Tensor = kwargs["cu_seqlens"]
            share = Share(self.group, [self.cell * count for count in self.cells], ends)
            if first:
                args = (share.own(args[0], 0), *args[1:])
            ours = {"position_embeddings": tuple(share.own(part, 0) for part in rotary), "cu_seqlens": ends.new_tensor([0, share.size])}
            return args, {**kwargs, **ours, "ulysses": share}

        return hook

    def leave_merger(self, module: nn.Module, args: tuple[Any, ...], merged: Tensor) -> Tensor:
        return merged if self.cells is None else gather(merged, self.group, self.cells)


def _share_tower(tower: Any, group: dist.ProcessGroup) -> None:
    _use_own_attention(tower.config)
    hooks = _Tower(group, tower.spatial_merge_size**2)
    for number, block in enumerate(tower.blocks):
        block.register_forward_pre_hook(hooks.enter_block(first=number == 0), with_kwargs=True)
    for merger in (tower.merger, *getattr(tower, "deepstack_merger_list", ())):
        merger.register_forward_hook(hooks.leave_merger)


def _use_own_attention(config: Any) -> None:
    """Register ours around the implementation that ``config`` names, and name it there. Masks are made as for the wrapped one."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    inner: str = config._attn_implementation
    name = PREFIX + inner
    ALL_ATTENTION_FUNCTIONS.register(name, _Attention(inner))
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[inner])
    config._attn_implementation = name


class _Attention:
    """An attention function of transformers around another, ``inner``: columns for heads, attend, heads for columns."""

    def __init__(self, inner: str) -> None:
        self.inner = inner

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        ulysses: Share | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Args: ``query`` [b, heads, columns, d]; ``key`` and ``value`` may have fewer heads. Returns [b, columns, heads, d]."""
        if ulysses is None:
            return self._attend(_With(module, config=self._config(module)), (query, key, value), attention_mask, None, kwargs), None
        group, ranks = ulysses.group, len(ulysses.sizes)
        if key.shape[1] < ranks:
            key, value = (part.repeat_interleave(ranks // part.shape[1], 1) for part in (key, value))
        held = [exchange(part, group, 1, [part.shape[1] // ranks] * ranks, 2, ulysses.sizes) for part in (query, key, value)]
        heads = held[0].shape[1]
        proxy = _With(module, config=self._config(module), num_key_value_groups=heads // held[1].shape[1])
        attended = self._attend(proxy, held, attention_mask, ulysses.cu_seqlens, kwargs)
        return exchange(attended, group, 1, ulysses.sizes, 2, [heads] * ranks), None

    def _attend(self, module: Any, held: Sequence[Tensor], mask: Tensor | None, ends: Tensor | None, kwargs: dict[str, Any]) -> Tensor:
        function = _attention_function(self.inner, module)
        if ends is None:
            return function(module, *held, mask, **kwargs)[0]
        lengths = ends[1:] - ends[:-1]
        kwargs = {name: value for name, value in kwargs.items() if name not in _SEGMENTS}
        if "flash" in self.inner:
            longest = int(lengths.max())
            return function(module, *held, mask, **kwargs, **dict(zip(_SEGMENTS, (ends, ends, longest, longest), strict=True)))[0]
        segments = zip(*(part.split(lengths.tolist(), 2) for part in held), strict=True)
        return torch.cat([function(module, *segment, mask, **kwargs)[0] for segment in segments], 1)

    def _config(self, module: Any) -> Any:
        return _With(module.config, _attn_implementation=self.inner)


_SEGMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""What flash attention in transformers is told of segments."""


def _attention_function(name: str, module: Any) -> Callable[..., tuple[Tensor, Any]]:
    """transformers' attention function; eager is each modeling file's own."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if name == "eager":
        function: Callable[..., tuple[Tensor, Any]] = sys.modules[type(module.original).__module__].eager_attention_forward
        return function
    return ALL_ATTENTION_FUNCTIONS[name]


class _With:
    """An object as attention functions shall see it: with some attributes of its own."""

    def __init__(self, original: Any, **attributes: Any) -> None:
        self.original = original
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)
