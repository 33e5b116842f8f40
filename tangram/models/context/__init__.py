"""Attention over a sequence that context-parallel ranks share."""

from tangram.models.context.groups import ContextGroups, install, installed, make_groups
from tangram.models.context.tiles import Tile, ring_tiles

__all__ = ["ContextGroups", "Tile", "install", "installed", "make_groups", "ring_tiles"]
