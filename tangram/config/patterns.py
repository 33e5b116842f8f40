"""The one pattern language for module paths: sharding plans, freezing, recomputation, offload, learning-rate scales.

| written | matches |
|---|---|
| ``{*}`` | a whole number |
| ``{3-7}`` | a whole number of the range, ends included |
| ``*`` | anything, dots included |
| ``?`` | any one character |
| all else | itself |

A pattern covers the whole path: ``model.visual`` is the tower, not what lies in it. Source: ``module_name_match`` of MindSpeed, whose forms
these are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from tangram.errors import ConfigError, suggest

_PART = re.compile(r"\{[^{}]*\}?|\*|\?|[^{*?]+|.")
_NUMBER = "([0-9]+)"


class Pattern:
    """A compiled pattern.

    Raises:
        ConfigError: empty, a brace that is not closed, or what stands between braces is neither ``*`` nor a range.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        if not text:
            raise ConfigError("a pattern is empty; give the path of a module, such as model.language_model.layers.{*}")
        self._ranges: list[range | None] = []
        self._regex = re.compile("".join(map(self._translate, _PART.findall(text))), re.DOTALL)

    def _translate(self, part: str) -> str:
        if part == "*":
            return ".*"
        if part == "?":
            return "."
        if not part.startswith("{"):
            if "}" in part:
                raise ConfigError(f"pattern {self.text!r}: a '}}' without its '{{'; write {{*}} or {{first-last}}")
            return re.escape(part)
        inside = part[1:-1] if part.endswith("}") else None
        if inside == "*":
            self._ranges.append(None)
            return _NUMBER
        ends = re.fullmatch(r"([0-9]{1,9})-([0-9]{1,9})", inside or "")
        if ends is None:
            raise ConfigError(f"pattern {self.text!r}: {part!r} is neither {{*}} nor a range such as {{0-11}}; correct it")
        first, last = map(int, ends.groups())
        if first > last:
            raise ConfigError(f"pattern {self.text!r}: the range {part} ends before it begins; write {{{last}-{first}}}")
        self._ranges.append(range(first, last + 1))
        return _NUMBER

    def matches(self, path: str) -> bool:
        """Whether the pattern covers the whole of ``path``."""
        found = self._regex.fullmatch(path)
        return found is not None and all(span is None or int(number) in span for number, span in zip(found.groups(), self._ranges, strict=True))


def match_each(patterns: Sequence[str], paths: Iterable[str], key: str) -> Mapping[str, list[str]]:
    """The paths that each pattern matches, in the order of ``paths``.

    Args:
        key: of the config, for messages.

    Raises:
        ConfigError: a pattern that matches nothing, the same pattern twice, or a path that two patterns match.
    """
    known = list(paths)
    found: dict[str, list[str]] = {}
    owner: dict[str, str] = {}
    for text in patterns:
        if text in found:
            raise ConfigError(f"{key}: {text!r} stands there twice; remove one")
        pattern = Pattern(text)
        found[text] = [path for path in known if pattern.matches(path)]
        if not found[text]:
            raise ConfigError(f"{key}: {text!r} matches no module of the model{suggest(text, known)}; correct or remove it")
        for path in found[text]:
            if path in owner:
                raise ConfigError(f"{key}: {path} is matched by {owner[path]!r} and by {text!r}; let one of them match it")
            owner[path] = text
    return found
