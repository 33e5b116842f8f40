"""The Hugging Face side: transformers' own model on the same batch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tangram.align.batch import IGNORE
from tangram.align.observation import Observation
from tangram.data.pictures import pictures
from tangram.errors import CheckpointError

Tensors = Mapping[str, torch.Tensor]
MEDIA = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """transformers' bars are off while the block runs."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load_reference(hf_dir: Path, dtype: torch.dtype = torch.float32, attention: str = "sdpa") -> torch.nn.Module:
    """The model of ``hf_dir``, with weights rounded to ``dtype`` and computing in fp32.

    Rounding first makes the reference start from the weights that a split model of that type holds.

    Raises:
        CheckpointError: transformers cannot load it, or leaves a weight of the model unset or of the file unused.
    """
    from transformers import AutoModelForImageTextToText

    try:
        with no_progress_bars():
            model, info = AutoModelForImageTextToText.from_pretrained(
                hf_dir, dtype=dtype, attn_implementation=attention, local_files_only=True, output_loading_info=True
            )
    except Exception as error:  # whatever transformers raises, the model cannot serve as reference
        raise CheckpointError(f"{hf_dir}: transformers cannot load it: {_one_line(error)}") from error
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(what):
            names = sorted(map(str, info[what]))
            raise CheckpointError(f"{hf_dir}: transformers reports {len(names)} {what.replace('_', ' ')}, such as {names[0]}")
    return model.to(torch.float32).eval()


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def token_types(input_ids: torch.Tensor, image_token_id: int, video_token_id: int) -> torch.Tensor:
    """``mm_token_type_ids`` of transformers 5: 1 at image placeholders, 2 at video placeholders, 0 elsewhere; ``[B, S]``."""
    return (input_ids == image_token_id).int() + 2 * (input_ids == video_token_id).int()


def forward_arguments(model: torch.nn.Module, batch: Tensors) -> dict[str, Any]:
    """Arguments of ``model.forward`` for a batch. Positions are always ours: from 5.3 on, transformers falls back to plain 1-D positions
    where it gets no ``mm_token_type_ids``. A model that knows no grids takes whole pictures and positions ``[B, S]``."""
    config: Any = model.config
    arguments: dict[str, Any] = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    known = inspect.signature(model.forward).parameters
    arguments.update({name: batch[name] for name in MEDIA if name in batch and name in known})
    if "image_grid_thw" not in known:
        arguments["position_ids"] = batch["position_ids"][0]
        if "image_grid_thw" in batch:
            arguments["pixel_values"] = pictures(batch["pixel_values"], batch["image_grid_thw"], config.vision_config.patch_size)
    if "second_per_grid_ts" in batch and "second_per_grid_ts" in known:
        arguments["second_per_grid_ts"] = batch["second_per_grid_ts"]
    if "mm_token_type_ids" in known:
        arguments["mm_token_type_ids"] = token_types(batch["input_ids"], config.image_token_id, config.video_token_id)
    return {**arguments, "use_cache": False}


class PositionWitness:
    """Context in which the positions that reach the text model's rotary embedding are held against the batch's.

    Raises:
        AssertionError: on leaving, where the model used other positions.
    """

    def __init__(self, model: torch.nn.Module, expected: torch.Tensor) -> None:
        self.expected = expected
        self.used: list[torch.Tensor] = []
        self.module = model.get_submodule("model.language_model.rotary_emb")

    def __enter__(self) -> PositionWitness:
        self.handle = self.module.register_forward_pre_hook(self._see, with_kwargs=True)
        return self

    def _see(self, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.used.append(kwargs["position_ids"] if "position_ids" in kwargs else args[1])

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.handle.remove()
        if kind is None:
            assert self.used, "the reference ran without its rotary embedding"
            assert all(torch.equal(used, self.expected) for used in self.used), "the reference did not use the 3-D positions it was given"


def observe(model: torch.nn.Module, batch: Tensors) -> Observation:
    """Run a batch forward and backward.

    Args:
        batch: ``input_ids``, ``labels``, ``attention_mask`` ``[B, S]``, ``position_ids`` ``[3, B, S]``, and, where there are images or videos,
            those of ``MEDIA``.

    Returns:
        Loss (``token_loss``), logits, and gradients by ``state_dict`` name. A parameter that the batch does not reach has a gradient of
        zeros.

    Raises:
        CheckpointError: transformers' own forward fails on the model, as it does on sizes that its config allows and its code does not.
    """
    model.zero_grad(set_to_none=True)
    try:
        arguments = forward_arguments(model, batch)
        with PositionWitness(model, arguments["position_ids"]):
            logits = model(**arguments).logits
    except (RuntimeError, ValueError, IndexError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{model.name_or_path}: transformers cannot run it, so there is nothing to compare with: {_one_line(error)}; correct its config.json"
        ) from error
    loss = token_loss(logits, batch["labels"])
    loss.backward()
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach() for name, parameter in model.named_parameters()
    }
    return Observation(loss=float(loss.detach()), logits=logits.detach(), gradients=gradients)


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of ``logits`` ``[B, S, V]`` at the supervised positions of ``labels`` ``[B, S]``, shifted; fp64.

    The formula is that of transformers' ``ForCausalLMLoss``, which computes it in fp32. There torch adds up the exponentials of a row one
    after another, and most of 151,936 small ones are lost beside a large one: on a trained model that costs 1e-5 of the loss and 2e-4 of
    every gradient.
    """
    rows, places = (labels[:, 1:] != IGNORE).nonzero(as_tuple=True)
    return torch.nn.functional.cross_entropy(logits[rows, places].double(), labels[rows, places + 1])


def loss_curve(model: torch.nn.Module, batches: Sequence[Tensors], lr: float, betas: tuple[float, float], eps: float, clip: float) -> list[float]:
    """Losses of a plain AdamW loop without weight decay, one step per batch, each loss before its step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=betas, eps=eps, weight_decay=0.0)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = token_loss(model(**forward_arguments(model, batch)).logits, batch["labels"])
        loss.backward()
        if clip > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses
