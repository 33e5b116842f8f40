"""The script for ``torchrun tangram/backends/fsdp2/trainer.py run.yaml [section.key=value ...]``: ``tangram train`` by its path, from any folder."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":
    # Python puts a script's folder first, where this room's files would pass for packages of the same names.
    here = Path(__file__).resolve()
    sys.path[:] = [str(here.parents[3]), *(entry for entry in sys.path if Path(entry).resolve() != here.parent)]
    sys.exit(import_module("tangram.cli.main").main(["train", *sys.argv[1:]]))
