"""What the keys of a Hugging Face directory's files mean to a model: names of its ``state_dict()``, or what transformers renames to them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

Rename = Callable[[str], str]


class ModelFileNames:
    """``tangram.checkpoints.own_directory.FileNames`` of one model. Made before it is sharded, for transformers goes by the names of classes.

    Keys are tried as they are, then as the class's ``_checkpoint_conversion_mapping`` says (transformers 4, and classes written for it), then by
    the renames of transformers 5 for the class and for its ``model_type``; the first of these under which the keys are exactly the model's counts.
    Where none is, the nearest does, so that whoever holds them against the model's names can say what is missing and what is left over.

    What transformers converts beyond names, such as experts that it stacks, is not converted here and shows as such.
    """

    def __init__(self, model: nn.Module) -> None:
        self._first = _tied_names(model)
        self._renames = [_as_they_are, *_renames(model)]
        self._prefix = str(getattr(model, "base_model_prefix", "") or "")

    def __call__(self, keys: Iterable[str]) -> Mapping[str, str]:
        given, wanted = list(keys), set(self._first.values())
        candidates = [{key: self._name(rename(key)) for key in given} for rename in self._renames]
        return min(candidates, key=lambda names: len(wanted ^ set(names.values())))

    def _name(self, key: str) -> str:
        """The tensor's own name; of a base model's key, that of the whole model, and the reverse."""
        for name in (key, f"{self._prefix}.{key}", key.removeprefix(f"{self._prefix}.")):
            if name in self._first:
                return self._first[name]
        return key


def _as_they_are(key: str) -> str:
    return key


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter or persistent buffer -> the first name of the same tensor."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    state: Mapping[str, Tensor] = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        names[name] = first.setdefault(id(tensor), name)
    return names


def _renames(model: nn.Module) -> list[Rename]:
    mapping = getattr(model, "_checkpoint_conversion_mapping", None)
    found: list[Rename] = [_first_match(mapping)] if mapping else []
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key
    except ImportError:
        return found

    def by(conversions: Any) -> Rename:
        renamings = [one for one in conversions or () if isinstance(one, WeightRenaming)]
        return lambda key: rename_source_key(key, renamings, [])[0]

    found.append(by(get_model_conversion_mapping(model)))
    # A subclass of a plug-in counts as foreign there, though its files may be those of the class it extends.
    names = [base.__name__ for base in type(model).__mro__ if base.__module__.startswith("transformers.models.")]
    return [*found, *(by(get_checkpoint_conversion_mapping(name)) for name in [*names, getattr(model.config, "model_type", "")] if name)]


def _first_match(mapping: Mapping[str, str]) -> Rename:
    def rename(key: str) -> str:
        for pattern, replacement in mapping.items():
            renamed, count = re.subn(pattern, replacement, key)
            if count:
                return renamed
        return key

    return rename
