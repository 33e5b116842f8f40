"""A Hugging Face directory of a model that is of no family: the model's own class says what the keys of its files mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tangram.checkpoints.hf_directory import HFDirectory
from tangram.checkpoints.reader import same_bits
from tangram.config.parsing import read_mapping
from tangram.errors import CheckpointError
from tangram.families.unknown import unknown_family
from tangram.placement.table import Rule

FileNames = Callable[[Iterable[str]], Mapping[str, str]]
"""Keys of a directory's files -> name of the tensor that each holds, for all of them. Two keys may hold the same tensor, where the model ties it."""


class OwnDirectory(HFDirectory):
    """Weights by the names of ``state_dict()``.

    Raises:
        CheckpointError: as ``HFDirectory``; two keys that the model ties hold different values.
    """

    def __init__(self, path: str | Path, names: FileNames) -> None:
        super().__init__(path, unknown_family(str(read_mapping(Path(path) / "config.json").get("model_type"))))
        places = {key: (file, key) for file, keys in self.shards.items() for key in keys}
        found = names(list(places))
        self._places = {}
        for key, place in places.items():
            name = found[key]
            if name in self._places:
                self._compare(name, self._places[name], place)
            else:
                self._places[name] = place

    @property
    def table(self) -> list[Rule]:
        """There is none."""
        return []

    def _compare(self, name: str, first: tuple[str, str], second: tuple[str, str]) -> None:
        one, other = (self._files[file] for file, _ in (first, second))
        shape = one.infos[first[1]].shape
        if other.infos[second[1]].shape != shape:
            equal = False
        else:
            start = (0,) * len(shape)
            equal = same_bits(one.read(first[1], start, shape), other.read(second[1], start, shape))
        if not equal:
            raise CheckpointError(
                f"{self.path}: {first[1]} and {second[1]} differ, and the model ties both to {name}; set tie_word_embeddings to false, "
                "or remove one of them"
            )
