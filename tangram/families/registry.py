"""What plug-ins register: model classes and datasets, under the ids that run files name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from tangram.errors import ConfigError, suggest

T = TypeVar("T")


class Register(Generic[T]):
    """Ids and what they stand for.

    Args:
        what: for messages, such as "model".
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._known: dict[str, T] = {}

    def register(self, name: str, value: T | None = None) -> Callable[[T], T]:
        """Make ``name`` stand for ``value``; without one, decorate what it shall stand for.

        Raises:
            ConfigError: the name is taken.
        """

        def add(added: T) -> T:
            if name in self._known:
                raise ConfigError(f"{self.what} {name!r} is registered already, as {self._known[name]!r}; choose another id")
            self._known[name] = added
            return added

        if value is not None:
            add(value)
        return add

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def get(self, name: str) -> T:
        """What ``name`` stands for.

        Raises:
            ConfigError: nothing.
        """
        if name not in self._known:
            known = sorted(self._known)
            raise ConfigError(
                f"{self.what} id {name!r} is not registered{suggest(name, known)}; known: {', '.join(known)}; "
                "a plug-in that registers it is named in training.plugin"
            )
        return self._known[name]


model_register: Register[type] = Register("model")
"""Classes of models, subclasses of transformers' PreTrainedModel or alike."""
data_register: Register[Callable[..., object]] = Register("dataset")
"""``build(basic_parameters, preprocess_parameters, dataset_param)``, by ``dataset_type``."""
