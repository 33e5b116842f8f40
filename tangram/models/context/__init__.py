"""Attention over a sequence that context-parallel ranks share."""

from tangram.models.context.groups import ContextGroups
from tangram.models.context.tiles import Tile, ring_tiles

__all__ = ["ContextGroups", "Tile", "ring_tiles"]
