"""Writing that a crash cannot leave half done: to a temporary name, flushed to the disk, then renamed.

A directory ``<name>`` is written as ``<name>.tmp-<token>`` beside it. Only a complete one ever has the final name.
"""

from __future__ import annotations

import glob
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from tangram.errors import CheckpointError

_TEMPORARY = ".tmp-"
_REPLACED = ".old-"


def temporary_name(final: Path, token: str | None = None) -> Path:
    """Name to write ``final`` under until it is complete.

    Args:
        token: what several processes that write one directory agree on; None: random.
    """
    return final.with_name(f"{final.name}{_TEMPORARY}{token or uuid.uuid4().hex[:8]}")


def remove_stale(final: Path) -> list[Path]:
    """Remove what interrupted writes of ``final`` left, and put back what an interrupted replacement had moved aside.

    To be called by one process, while no other writes ``final``.

    Returns:
        The removed paths.
    """
    name = glob.escape(final.name)
    for old in sorted(final.parent.glob(f"{name}{_REPLACED}*")):
        if not final.exists():
            old.rename(final)
    stale = [*final.parent.glob(f"{name}{_TEMPORARY}*"), *final.parent.glob(f"{name}{_REPLACED}*")]
    for path in stale:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    return stale


def sync_tree(root: Path) -> None:
    """Flush every file and folder under ``root`` to the disk."""
    for folder, _, files in os.walk(root):
        for name in files:
            _sync(Path(folder, name))
        _sync(Path(folder))


def _sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(temporary: Path, final: Path, *, replace: bool = False) -> None:
    """Flush a complete directory and give it its final name.

    Args:
        replace: take the place of an existing directory, which keeps its name until the new one is flushed.

    Raises:
        CheckpointError: ``final`` exists with content and ``replace`` is off.
    """
    sync_tree(temporary)
    if replace and final.exists():
        old = final.with_name(f"{final.name}{_REPLACED}{uuid.uuid4().hex[:8]}")
        final.rename(old)
        temporary.rename(final)
        _sync(final.parent)
        shutil.rmtree(old)
        return
    require_new(final)
    temporary.rename(final)
    _sync(final.parent)


def require_new(final: Path) -> None:
    """Check that a new directory can take the name without overwriting anything.

    Raises:
        CheckpointError: ``final`` is a file or a directory with content, or something that no rename replaces: a link, a mount point or ``.``.
    """
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise CheckpointError(f"{final}: exists already; remove it or write elsewhere")
    what = "a link" if final.is_symlink() else "a mount point" if os.path.ismount(final) else "" if final.name else "the current directory"
    if what:
        raise CheckpointError(f"{final}: is {what}, which the finished directory cannot replace; give the name of a new directory")


@contextmanager
def new_directory(final: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary directory that becomes ``final`` if the block ends well, and is removed if it raises.

    Raises:
        CheckpointError: ``final`` exists with content and ``replace`` is off; nothing is written then.
    """
    if not replace:
        require_new(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(final)
    temporary = temporary_name(final)
    temporary.mkdir()
    try:
        yield temporary
        publish(temporary, final, replace=replace)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def new_file(final: Path, *, replace: bool = False) -> Iterator[BinaryIO]:
    """Yield a file, open for writing, that becomes ``final`` if the block ends well, and is removed if it raises.

    Raises:
        CheckpointError: ``final`` exists and ``replace`` is off; nothing is written then.
    """
    if not replace:
        require_new(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(final)
    temporary = temporary_name(final)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if not replace:
            require_new(final)
        temporary.rename(final)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(final.parent)


def write_text(path: Path, text: str) -> None:
    """Write a small file, such as a checkpoint tracker, so that readers see the old content or the new, never a part."""
    temporary = temporary_name(path)
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)
