"""Ranks of a vision encoder whose tensor-parallel size is smaller than the text decoder's.

Tensor-parallel rank r holds part r modulo the encoder's size (``tangram.placement.topology``), so neighbours make up one copy of the encoder, and
each copy encodes pictures of its own.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from tangram.models.context.groups import own_group
from tangram.placement.topology import Topology


@dataclass(frozen=True)
class VisionGroups:
    """Groups of one rank.

    Args:
        tensor: ranks that divide a copy of the encoder.
        copies: ranks that hold the same part of it, copy after copy.
    """

    tensor: dist.ProcessGroup
    copies: dist.ProcessGroup


def make_vision_groups(whole: dist.ProcessGroup, topology: Topology, timeout: timedelta) -> VisionGroups | None:
    """Groups within each tensor-parallel group; None where the encoder is divided like the text decoder. Every process must call it.

    Args:
        whole: this rank's tensor-parallel group; all such groups are runs of consecutive ranks.
    """
    size, world = topology.tensor_of("vision"), dist.get_world_size()
    if topology.vision_copies == 1:
        return None
    runs = [list(range(first, first + topology.tensor)) for first in range(0, world, topology.tensor)]
    tensor = own_group([run[first : first + size] for run in runs for first in range(0, topology.tensor, size)], timeout)
    copies = whole if size == 1 else own_group([run[part::size] for run in runs for part in range(size)], timeout)
    assert tensor is not None and copies is not None
    return VisionGroups(tensor, copies)


_installed: VisionGroups | None = None


def install_vision(groups: VisionGroups | None) -> None:
    """Make these the groups of this process; None: the encoder is divided like the text decoder."""
    global _installed
    _installed = groups


def held_groups() -> list[dist.ProcessGroup]:
    """The groups of this process, if it has any."""
    return [] if _installed is None else [_installed.tensor, _installed.copies]


def installed_copies(topology: Topology) -> dist.ProcessGroup | None:
    """Ranks with the same part of the encoder as this one; None: there is one copy."""
    found = _installed.copies.size() if _installed is not None else 1
    assert found == topology.vision_copies, f"groups of {found} copies of the vision encoder, {topology.vision_copies} wanted"
    return _installed.copies if _installed is not None else None


def encoder_groups(groups: ProcessGroupCollection, topology: Topology) -> ProcessGroupCollection:
    """The groups that the encoder's layers are built with, of those that the text decoder's are."""
    if installed_copies(topology) is None:
        return groups
    assert _installed is not None
    own = copy.copy(groups)
    own.tp = _installed.tensor
    return own
