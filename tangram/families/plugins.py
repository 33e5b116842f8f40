"""Import Python files, folders and packages of the user's own; importing one registers families, components, models and datasets."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import pkgutil
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

from tangram.errors import ConfigError

_NOT_OF_THE_USER = (f"{Path(__file__).parents[1]}/", f"{sysconfig.get_path('purelib')}/", f"{sysconfig.get_path('stdlib')}/", "<frozen")
"""Beginnings of paths."""


def load_plugins(paths: Iterable[str | Path]) -> None:
    """Import each of ``paths``; one that was imported before is left alone.

    A plug-in is a .py file, a folder with ``__init__.py``, or, where there is no such file, the name of a package that Python finds
    (``a.b`` or ``a/b``), of which all modules are imported. A folder is a package: its files import each other relatively.

    Raises:
        ConfigError: a path is missing or no plug-in, or its import fails; with the path, the line and the reason.
    """
    for path in paths:
        if isinstance(path, str) and not Path(path).exists() and re.fullmatch(r"[A-Za-z_]\w*([./][A-Za-z_]\w*)*", path) and not path.endswith(".py"):
            _load_package(path)
        else:
            _load(Path(path))


def _load_package(text: str) -> None:
    name = text.replace("/", ".")
    try:
        module = importlib.import_module(name)
        for found in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{name}.", onerror=_raise_on):
            importlib.import_module(found.name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(f"plug-in {text}: no such file or folder, nor a package that Python finds; correct it, or set PYTHONPATH") from None
        raise ConfigError(f"plug-in {text}: {_place(error, _root(name))}{type(error).__name__}: {' '.join(str(error).split())}") from error


def _raise_on(name: str) -> None:
    """For ``walk_packages``, which is about to pass over a package whose import failed."""
    error = sys.exception()
    assert error is not None
    raise error


def _root(name: str) -> Path:
    """Folder of the outermost package."""
    spec = importlib.util.find_spec(name.partition(".")[0])
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else Path()


def _load(path: Path) -> None:
    source = _entry_file(path).resolve()
    package = source.parent if source.name == "__init__.py" else None
    # The hash keeps plug-ins apart whose files have the same name.
    name = f"tangram_plugin_{(package or source).stem}_{hashlib.sha256(str(source).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, source, submodule_search_locations=[str(package)] if package else None)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        for loaded in [n for n in sys.modules if n == name or n.startswith(f"{name}.")]:
            del sys.modules[loaded]
        raise ConfigError(f"plug-in {path}: {_place(error, package or source)}{type(error).__name__}: {' '.join(str(error).split())}") from error


def told(error: BaseException) -> str:
    """Kind, text and line of an error in code that the user brings: ``KeyError: 'no' (my_data.py, line 3)``.

    The line is the innermost one that neither Tangram nor an installed package has written, so long as there is one.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_OF_THE_USER)]
    line = f" ({Path((own or frames)[-1].filename).name}, line {(own or frames)[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{line}"


def _entry_file(path: Path) -> Path:
    if path.is_dir():
        if not (path / "__init__.py").is_file():
            raise ConfigError(f"plug-in {path}: the folder has no __init__.py; add one that imports the files which register something")
        return path / "__init__.py"
    if not path.exists():
        raise ConfigError(f"plug-in {path}: no such file or folder")
    if path.suffix != ".py":
        raise ConfigError(f"plug-in {path}: expected a .py file or a folder with __init__.py")
    return path


def _place(error: BaseException, root: Path) -> str:
    """ "file.py, line 3: " of the innermost frame inside the plug-in, or nothing where the error says it itself."""
    inside = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(root)]
    return f"{Path(inside[-1].filename).name}, line {inside[-1].lineno}: " if inside else ""
