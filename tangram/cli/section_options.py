"""Command-line options made of a typed section: ``--cfg.parallel_config.tp_size 2`` sets one key of one nested section.

Every key of the section is an option. Keys at the top are written with hyphens (``--dry-run``) or underscores, a key that holds
yes or no may stand without a value, a list may be given as ``[1,2]`` or by repeating the option. ``--config FILE`` reads the same keys from
YAML, ``--print_config`` prints them; what stands later on the command line wins.

Why no library: ``hf_to_mm --help`` takes 0.33 to 0.41 s of CPU here, 0.43 to 0.55 s with jsonargparse 4.53 and 0.51 to 0.53 s with
pydantic-settings 2.16 (two busy cores). Neither takes ``--dry-run`` without a value beside ``--dry_run true`` or names the nearest option,
jsonargparse passes over the bounds of pydantic's fields and pydantic-settings reports in four lines, so most of this file would stay.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

from tangram.config.parsing import Section, leaf_keys, merge, parse_section, read_mapping, section_at
from tangram.errors import ConfigError, suggest

S = TypeVar("S", bound=Section)
Path = tuple[str, ...]


class UsageError(ConfigError):
    """A command line that cannot be understood."""


@dataclass(frozen=True)
class Parsed(Generic[S]):
    """What a command line asks for: ``print`` a text and stop, or run with ``options``."""

    options: S | None = None
    print: str | None = None


class SectionOptions(Generic[S]):
    """Reads the options of one command.

    Args:
        prog: the words before the options.
        description: of the command.
        section: its options.
    """

    def __init__(self, prog: str, description: str, section: type[S]) -> None:
        self.prog, self.description, self.section = prog, description, section
        self._paths: dict[str, Path] = {}
        for path in leaf_keys(section):
            self._paths[_spelling(path)] = path
        tops = [path for path in self._paths.values() if len(path) == 1]
        self._other_spellings = {f"--{name}": path for path in tops for name in (path[0], path[0].replace("_", "-"))}

    def parse(self, words: Sequence[str]) -> Parsed[S]:
        """Read the words after the command.

        Raises:
            UsageError: an unknown option, a value missing or of the wrong kind, a required option missing, or a config file with such faults.
        """
        given: dict[str, Any] = {}
        shown = False
        rest = list(words)
        while rest:
            word, equals, value = rest.pop(0).partition("=")
            if word in ("-h", "--help"):
                return Parsed(print=self.help())
            if word == "--print_config":
                shown = True
                continue
            path = self._paths.get(word) or self._other_spellings.get(word)
            if path is None and word != "--config":
                what = "unknown option" if word.startswith("-") else "unexpected word"
                raise UsageError(f"{what} {word}{suggest(word, (*self._paths, '--config', '--print_config'))}; see {self.prog} --help")
            if not equals:
                value = self._value_after(word, path, rest)
            given = merge(given, self._read_file(value) if path is None else _nest(path, self._read_value(word, path, value, given)))
        if shown:
            return Parsed(print=yaml.safe_dump(merge(_defaults(self.section), given), sort_keys=False, width=1000).rstrip())
        return Parsed(self._validate(given))

    def _value_after(self, word: str, path: Path | None, rest: list[str]) -> str:
        alone = not rest or rest[0].lower() not in ("true", "false")
        if alone and path is not None and _kinds(_field(self.section, path).annotation) - {type(None)} == {bool}:
            return "true"
        if not rest or rest[0].startswith("--"):
            raise UsageError(f"{word} needs a value; see {self.prog} --help")
        return rest.pop(0)

    @staticmethod
    def _read_file(name: str) -> dict[str, Any]:
        try:
            return read_mapping(name)
        except ConfigError as error:
            raise UsageError(f"--config: {error}") from None

    def _read_value(self, word: str, path: Path, text: str, given: dict[str, Any]) -> Any:
        kinds = _kinds(_field(self.section, path).annotation)
        if list[str] in kinds and not text.startswith("["):
            before = given.get(path[0], [])
            return [*before, text] if isinstance(before, list) else [text]
        if str in kinds:
            return text
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError:
            hint = "write [12,16] or [[12,16]]" if "[" in text else f"see {self.prog} --help"
            raise UsageError(f"{word}: {text} cannot be read; {hint}") from None

    def _validate(self, given: dict[str, Any]) -> S:
        names = {".".join(path): option for option, path in self._paths.items()}
        missing = [option for option, path in self._paths.items() if _required(self.section, path) and not _present(given, path)]
        if missing:
            raise UsageError(f"required: {', '.join(missing)}; see {self.prog} --help")
        try:
            return parse_section(self.section, given, "", names=names)
        except ConfigError as error:
            raise UsageError(str(error).removeprefix(": ").removeprefix(f"{self.section.__name__}: ")) from None

    def help(self) -> str:
        """Every option with its meaning and default."""
        width = min(shutil.get_terminal_size().columns, 120)
        lines = [f"usage: {self.prog} OPTIONS", "", *textwrap.wrap(self.description, width), "", "options:"]
        texts = {f"{option} VALUE": _describe(self.section, path) for option, path in self._paths.items()}
        texts["--config FILE"] = "YAML file with these options, as --print_config prints it"
        texts["--print_config"] = "print all options as YAML and stop"
        texts["-h, --help"] = "print this and stop"
        for option, text in texts.items():
            lines += [f"  {option}", *textwrap.wrap(text, width, initial_indent=" " * 8, subsequent_indent=" " * 8)]
        return "\n".join(lines)


def _spelling(path: Path) -> str:
    return "--" + (path[0].rstrip("_").replace("_", "-") if len(path) == 1 and path[0] not in _PUBLIC else ".".join(path))


_PUBLIC = frozenset({"hf_dir", "dcp_dir", "load_dir", "save_dir", "model_assets_dir", "to_bf16"})
"""Top-level keys that MindSpeed-MM's converters spell with underscores."""


def _field(section: type[BaseModel], path: Path) -> Any:
    parent = section_at(section, path[:-1])
    assert parent is not None
    return parent.model_fields[path[-1]]


def _kinds(annotation: Any) -> set[Any]:
    """The types that a field accepts."""
    if get_origin(annotation) is Literal:
        return {type(value) for value in get_args(annotation)}
    if get_origin(annotation) in (Union, UnionType):
        return set().union(*map(_kinds, get_args(annotation)))
    return {annotation}


def _required(section: type[BaseModel], path: Path) -> bool:
    return all(_field(section, path[: i + 1]).is_required() for i in range(len(path)))


def _present(given: dict[str, Any], path: Path) -> bool:
    content: Any = given
    for part in path:
        if not isinstance(content, dict):
            return True
        if part not in content:
            return False
        content = content[part]
    return True


def _nest(path: Path, value: Any) -> dict[str, Any]:
    for part in reversed(path):
        value = {part: value}
    return value


def _default(section: type[BaseModel], path: Path) -> Any:
    field = _field(section, path)
    return None if field.is_required() else field.default


def _defaults(section: type[BaseModel]) -> dict[str, Any]:
    """Every key with its default; a required one with null."""
    content: dict[str, Any] = {}
    for path in leaf_keys(section):
        content = merge(content, _nest(path, _default(section, path)))
    return content


def _describe(section: type[BaseModel], path: Path) -> str:
    field = _field(section, path)
    if field.is_required():
        return f"{field.description} (required)"
    default = "" if field.default in (None, [], False) else f" (default: {field.default})"
    return f"{field.description}{default}"
