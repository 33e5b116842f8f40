"""Importing a user's own files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tangram.cli.main import main
from tangram.errors import ConfigError
from tangram.families.plugins import load_plugins

FAMILY = """
from dataclasses import replace
from tangram.families.base import register_family
from tangram.families.qwen2_vl import QWEN2_VL
register_family(replace(QWEN2_VL, name={name!r}, model_ids=()))
"""


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def loaded() -> set[str]:
    return {name for name in sys.modules if name.startswith("tangram_plugin_")}


def test_a_plugin_registers_a_family_that_commands_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plugin = write(tmp_path / "mine.py", FAMILY.format(name="toy_of_the_plugin_test"))
    arguments = ["tiny", "toy_of_the_plugin_test", str(tmp_path / "hf"), "--vocab", "64", "--text-layers", "1", "--vision-layers", "1"]
    assert main(arguments) == 2
    assert "unknown model family 'toy_of_the_plugin_test'" in capsys.readouterr().err
    assert main([*arguments, "--plugin", str(plugin)]) == 0
    assert (tmp_path / "hf/model.safetensors").is_file()


def test_loading_twice_imports_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    plugin = write(tmp_path / "once.py", f"open({str(log)!r}, 'a').write('x')")
    monkeypatch.chdir(tmp_path)
    load_plugins([plugin, plugin, "once.py", "./once.py"])
    load_plugins([str(plugin)])
    assert log.read_text() == "x"


def test_a_folder_is_a_package_and_equal_names_stay_apart(tmp_path: Path) -> None:
    for where in ("one", "two"):
        write(tmp_path / where / "family/__init__.py", f"from . import part\nassert part.WHERE == {where!r}")
        write(tmp_path / where / "family/part.py", f"WHERE = {where!r}")
    load_plugins([tmp_path / "one/family", tmp_path / "two/family"])
    assert sum(name.startswith("tangram_plugin_family_") and name.endswith(".part") for name in loaded()) == 2


@pytest.mark.parametrize(
    ("files", "path", "message"),
    [
        ({}, "gone.py", "no such file or folder"),
        ({"notes.txt": ""}, "notes.txt", "expected a .py file or a folder with __init__.py"),
        ({"bare/part.py": ""}, "bare", "the folder has no __init__.py"),
        ({"bad.py": "x = 1\nimport no_such_module_at_all"}, "bad.py", "bad.py, line 2: ModuleNotFoundError: No module named 'no_such_module_at_all'"),
        ({"pkg/__init__.py": "from . import part", "pkg/part.py": "\n\n1 / 0"}, "pkg", "part.py, line 3: ZeroDivisionError: division by zero"),
        ({"leaves.py": "import sys\nsys.exit(0)"}, "leaves.py", "leaves.py, line 2: SystemExit: 0"),
        ({"typo.py": "def f(:"}, "typo.py", r"SyntaxError: invalid syntax \(typo.py, line 1\)"),
        ({"again.py": FAMILY.format(name="qwen2_5_vl")}, "again.py", "model family 'qwen2_5_vl' is registered already"),
    ],
)
def test_a_failing_plugin_is_named_with_the_reason(tmp_path: Path, files: dict[str, str], path: str, message: str) -> None:
    from tangram.families.base import get_family

    get_family("qwen2_vl")
    for name, text in files.items():
        write(tmp_path / name, text)
    before = loaded()
    for _ in range(2):  # a failed import leaves nothing half-loaded, so that it fails the second time too
        with pytest.raises(ConfigError, match=f"^plug-in {tmp_path / path}: .*{message}"):
            load_plugins([tmp_path / path])
    assert loaded() == before
