"""The parser of launch flags, light enough for a help text."""

from __future__ import annotations

import argparse
from typing import NoReturn

from tangram.errors import ConfigError


class FlagParser(argparse.ArgumentParser):
    """ArgumentParser that raises ConfigError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"flags: {message}")
