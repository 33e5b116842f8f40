"""Model families: Hugging Face config, tensor table, positions, template and tiny model of each."""

from tangram.families.base import Family, get_family, has_family, register_family

__all__ = ["Family", "get_family", "has_family", "register_family"]
