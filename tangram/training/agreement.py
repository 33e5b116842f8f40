"""What ranks tell each other after each step: sums that all must have alike, and what each has found by itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from tangram.backends.engine import Batch, Copies, ForwardResult, StepResult
from tangram.data.sampler import PADDING
from tangram.data.source import SKIPPED
from tangram.errors import DataError
from tangram.platform import current
from tangram.training.rank_records import MIB, WORD, CopiesRecord, RankRecord, digest, from_words, to_words

CONTENTS = 2**20 - 3
"""A prime: numbers of contents are those modulo it."""


@dataclass
class Totals:
    """What ranks must agree on after a step."""

    stop: bool
    tokens: int
    padded_tokens: int
    samples: int
    skipped_samples: int
    kiloflops: int
    samples_digest: str | None
    """None: some rank's data have no ids."""


class Share(NamedTuple):
    """What one rank tells, as whole numbers, so that one gather carries it on any device."""

    asked: int
    """To stop."""
    tokens: int
    padded_tokens: int
    samples: int
    skipped_samples: int
    kiloflops: int
    data_rank: int
    named: int
    """Whether its samples have ids."""
    digest: int
    content: int
    """Of token ids and labels."""
    peak_memory: int
    """Bytes."""
    group: int
    has_loss: int
    loss: int
    has_norm: int
    norm: int
    has_shared: int
    shared: int
    copied: int
    """-1: None."""
    copies: tuple[int, ...] = ()
    """Group, whether there is a digest, and the digest, for each kind; the same kinds on all ranks."""

    @classmethod
    def of(
        cls,
        micro_batches: Sequence[Batch],
        asked: bool,
        data_rank: int,
        flops: Callable[[Batch], int] | None,
        peak_memory: int,
        forward: ForwardResult | None = None,
        result: StepResult | None = None,
        copies: Mapping[str, Copies] | None = None,
    ) -> Share:
        """This rank's."""
        # Data of a plug-in may leave the mask out where all tokens are real.
        masks = [batch["attention_mask"] if "attention_mask" in batch else torch.ones_like(batch["labels"]) for batch in micro_batches]
        ids = [sample for batch, mask in zip(micro_batches, masks, strict=True) for sample in batch.get("sample_ids", range(len(mask)))]
        real = [int(sample) for sample in ids if sample != PADDING]
        named = all("sample_ids" in batch for batch in micro_batches)
        tokens, padded = (sum(int(measure(mask)) for mask in masks) for measure in (torch.sum, torch.numel))
        norms = result.rank if result is not None else None
        return cls(
            int(asked),
            # A place without a sample is a row of one token, which says nothing.
            tokens - (len(ids) - len(real)),
            padded,
            len(real),
            sum(len(batch.get(SKIPPED, ())) for batch in micro_batches),
            # Thousands, since single operations of a large step on many ranks are more than an int64 holds.
            0 if flops is None else sum(flops(batch) for batch in micro_batches) // 1000,
            data_rank,
            int(named),
            digest(real) if named else 0,
            sum(map(_content, micro_batches)) % CONTENTS,
            peak_memory,
            norms.group if norms is not None else 0,
            *to_words(forward.own_loss if forward is not None else None),
            *to_words(norms.own if norms is not None else None),
            *to_words(norms.shared if norms is not None else None),
            -1 if norms is None or norms.copied is None else norms.copied,
            tuple(number for held in (copies or {}).values() for number in (held.group, int(held.digest is not None), held.digest or 0)),
        )


def _content(batch: Batch) -> int:
    """A number of token ids and labels and their places, small enough to be added up."""
    total = 0
    for values in (batch[name].flatten().long() for name in ("input_ids", "labels") if name in batch):
        total += int(((values % CONTENTS) * (1 + torch.arange(len(values), device=values.device) % CONTENTS)).sum())
    return total % CONTENTS


def gather(mine: Share) -> list[Share]:
    """Every rank's; all call it together."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    row = torch.tensor([*mine[:-1], *mine.copies], device=collective_device())
    every = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(every, row)
    single = len(Share._fields) - 1
    return [Share(*values[:single])._replace(copies=tuple(values[single:])) for values in torch.stack(every).tolist()]


def collective_device() -> torch.device:
    """Where tensors of collectives lie."""
    return torch.device("cpu") if dist.get_backend() == "gloo" else current().device(int(os.environ.get("LOCAL_RANK", "0")))


def totals_of(shares: Sequence[Share], copies: int, step: int) -> Totals:
    """Sums over the global batch. All ranks of one copy of the model hold the same micro-batches, so copies count once.

    Args:
        copies: ranks of one copy.

    Raises:
        DataError: ranks of one copy were given different samples, or other tokens in them; on every rank.
    """
    tokens, padded, samples, skipped, kiloflops = (
        sum(getattr(share, name) for share in shares) // copies for name in ("tokens", "padded_tokens", "samples", "skipped_samples", "kiloflops")
    )
    return Totals(any(share.asked for share in shares), tokens, padded, samples, skipped, kiloflops, _digest(shares, step))


def _digest(shares: Sequence[Share], step: int) -> str | None:
    _compare(shares, "content", f"step {step}", "tokens; give every node the same files")
    if not all(share.named for share in shares):
        return None
    found = _compare(shares, "digest", f"step {step}", "samples; let data depend on data_rank alone")
    return f"{sum(found.values()) % WORD:016x}"


def _compare(shares: Sequence[Share], name: str, where: str, what: str) -> dict[int, int]:
    """What each data-parallel rank's copies of the model have alike.

    Raises:
        DataError: they have not.
    """
    found: dict[int, tuple[int, int]] = {}
    for rank, share in enumerate(shares):
        first, value = found.setdefault(share.data_rank, (rank, getattr(share, name)))
        if value != getattr(share, name):
            raise DataError(f"{where}: ranks {first} and {rank} are of one copy of the model and were given different {what}")
    return {data_rank: value for data_rank, (_, value) in found.items()}


def rank_record(shares: Sequence[Share], step: int, loss: float | None = None, kinds: Sequence[str] = ()) -> RankRecord:
    """What each rank has found.

    Args:
        loss: of all.
        kinds: of the copies in ``shares``.
    """
    groups, told, digests = ([share.copies[part::3] for share in shares] for part in range(3))
    return RankRecord(
        step=step,
        loss=[from_words(share.has_loss, share.loss) for share in shares],
        grad_norm=[from_words(share.has_norm, share.norm) for share in shares],
        shared_grad_norm=[from_words(share.has_shared, share.shared) for share in shares],
        shared_with=[share.group for share in shares],
        peak_memory_mb=[round(share.peak_memory / MIB, 2) for share in shares],
        grad_norm_with=[None if share.copied < 0 else share.copied for share in shares] if any(share.copied >= 0 for share in shares) else (),
        loss_of_all=loss,
        copies={
            kind: CopiesRecord(
                [group[at] for group in groups],
                [f"{digest[at] % WORD:016x}" if there[at] else None for there, digest in zip(told, digests, strict=True)],
            )
            for at, kind in enumerate(kinds)
            if any(there[at] for there in told)
        },
    )
