"""argparse, with faults as one-line ConfigErrors that name the nearest known word."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import NoReturn

from tangram.errors import ConfigError, suggest


class Parser(argparse.ArgumentParser):
    """ArgumentParser that raises ConfigError instead of printing its usage and exiting. Options are not abbreviated."""

    words_into: str | None = None
    """Name of a list that also gets the words that stand behind options; argparse itself gives up on them."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse's, but an argument that nobody knows is refused here, where the known ones are at hand."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if self.words_into is not None:
            words = [word for word in unknown if not word.startswith("-")]
            setattr(parsed, self.words_into, [*getattr(parsed, self.words_into), *words])
            unknown = [word for word in unknown if word.startswith("-")]
        if unknown:
            word = unknown[0].partition("=")[0]
            known = re.findall(r"--[\w.-]+", self.format_help())
            self.error(f"unknown argument {unknown[0]!r}{suggest(word, known)}")
        return parsed, unknown
