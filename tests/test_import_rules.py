"""What the rooms may import when they are imported. The order of rooms among themselves is import-linter's contract in pyproject.toml."""

from __future__ import annotations

import subprocess
import sys

import pytest

IMPORT_ALL = """
import importlib, pkgutil, sys
for root in sys.argv[1].split(","):
    package = importlib.import_module(root)
    names = [root, *(m.name for m in pkgutil.walk_packages(package.__path__, root + "."))]
    for name in names:
        importlib.import_module(name)
print([m for m in sys.argv[2].split(",") if m in sys.modules])
"""


@pytest.mark.parametrize(
    ("rooms", "forbidden"),
    [
        ("tangram.cli,tangram.config,tangram.placement,tangram.families", "torch,transformers,megatron"),
        ("tangram.data", "torch,numpy,transformers,megatron,PIL,av,pyarrow,jinja2"),
    ],
)
def test_importing_a_room_imports_nothing_heavy(rooms: str, forbidden: str) -> None:
    ended = subprocess.run([sys.executable, "-c", IMPORT_ALL, rooms, forbidden], capture_output=True, text=True, timeout=250)
    assert (ended.stdout, ended.returncode) == ("[]\n", 0), ended.stderr
