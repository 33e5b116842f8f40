"""An output directory that survives a kill: a rerun of the same write keeps the files that were finished.

``<out>`` is written as ``<out>.partial/tree`` beside it; ``<out>.partial/journal`` names the plan and every finished file with its
size and digest. The directory gets its final name when it is complete. An error removes everything; a kill leaves what is there to the
next run, which throws it away if it is for another plan.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import NamedTuple

from tangram.checkpoints.publish import publish, require_new
from tangram.errors import CheckpointError

_PARTIAL = ".partial"


class Finished(NamedTuple):
    """What the journal says of a file."""

    size: int
    digest: str


class Journal:
    """The record of finished files of an output directory; its file is locked as long as it is open.

    ``folder`` is where the output is to be written.
    """

    def __init__(self, partial: Path, file: TextIOWrapper) -> None:
        self.folder = partial / "tree"
        self.folder.mkdir(exist_ok=True)
        self._file = file
        self._lock = threading.Lock()
        self._plan: str | None = None
        self._finished: dict[Path, Finished] = {}
        self._read()
        self._remove_all_but(set(self._finished))

    def _read(self) -> None:
        self._file.seek(0)
        for line in self._file:
            try:
                entry = json.loads(line)
                if self._plan is None:
                    self._plan = str(entry["plan"])
                else:
                    self._finished[self.folder / entry["file"]] = Finished(int(entry["size"]), str(entry["digest"]))
            except (ValueError, KeyError, TypeError):
                return  # the kill came while this line was written; begin() writes the good ones anew

    def _remove_all_but(self, kept: set[Path]) -> None:
        for root, folders, files in os.walk(self.folder, topdown=False):
            for name in files:
                if Path(root, name) not in kept:
                    Path(root, name).unlink()
            for name in folders:
                with suppress(OSError):
                    Path(root, name).rmdir()
        self._finished = {path: entry for path, entry in self._finished.items() if path.is_file()}

    def begin(self, plan: str | None) -> None:
        """Start or continue a plan; the finished files of another are removed.

        Args:
            plan: what is written from what; None: not known, so that nothing can be kept.
        """
        if plan is None or plan != self._plan:
            self._remove_listed()
        self._plan = plan
        self._file.truncate(0)
        if plan is not None:
            self._append({"plan": plan})
        for path, entry in self._finished.items():
            self.add(path, *entry)

    def _remove_listed(self) -> None:
        for path in self._finished:
            path.unlink(missing_ok=True)
            with suppress(OSError):
                for parent in path.relative_to(self.folder).parents[:-1]:
                    (self.folder / parent).rmdir()
        self._finished = {}

    def entry(self, path: Path) -> Finished | None:
        """What an earlier run noted of a file; None: not finished."""
        return self._finished.get(path)

    def add(self, path: Path, size: int, digest: str) -> None:
        """Note a file that is complete and flushed; from any thread."""
        if self._plan is not None:
            self._append({"file": str(path.relative_to(self.folder)), "size": size, "digest": digest})

    def _append(self, entry: dict[str, object]) -> None:
        with self._lock:
            self._file.seek(0, os.SEEK_END)
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()


@contextmanager
def resumable_directory(final: Path) -> Iterator[Journal]:
    """Yield the journal of a directory that becomes ``final`` if the block ends well, and is removed if it raises.

    Raises:
        CheckpointError: ``final`` cannot be a new directory, another process is writing it, ``<final>.partial`` holds files of other origin, or
            a file cannot be read or written.
    """
    require_new(final)
    partial = final.with_name(final.name + _PARTIAL)
    try:
        with _parents(final), _locked_journal(partial, final) as file:
            try:
                require_new(final)
                journal = Journal(partial, file)
                yield journal
                publish(journal.folder, final)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"{error.filename or final}: {error.strerror or error}; {final} is not written") from None


@contextmanager
def _parents(final: Path) -> Iterator[None]:
    """The folders above ``final``; those that had to be made go again if the block raises."""
    made = [folder for folder in final.parents if not folder.exists()]
    final.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for folder in made:
                folder.rmdir()
        raise


@contextmanager
def _locked_journal(partial: Path, final: Path) -> Iterator[TextIOWrapper]:
    """The journal's file, opened and locked."""
    while True:
        partial.mkdir(exist_ok=True)
        path = partial / "journal"
        foreign = sorted(entry.name for entry in partial.iterdir() if entry.name not in ("journal", "tree"))
        if foreign:
            raise CheckpointError(f"{partial}: holds {foreign[0]}, which no conversion put there; move the directory away, or write elsewhere")
        try:
            file = path.open("a+", encoding="utf-8")
        except FileNotFoundError:  # removed by one that ended since
            continue
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(f"{final}: another process is writing it; wait for it, or write elsewhere") from None
            if path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                yield file
                return
