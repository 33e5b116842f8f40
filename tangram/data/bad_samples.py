"""The list of samples that a run left out: one JSON line ``{"sample", "where", "reason"}`` each, however often the sample comes up."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import NamedTuple

from tangram.errors import ConfigError


class Skip(NamedTuple):
    """A sample that was left out, and why."""

    sample: int
    where: str
    reason: str


class BadSampleReport:
    """Adds lines to a file that several ranks share.

    Ranks of different data-parallel index meet the same sample in different epochs, and a resumed run meets it again; so under a lock the file is
    read before a line is added.

    Args:
        path: None: nothing is written, and only this process knows what it has seen.

    Raises:
        ConfigError: ``path`` is a folder or a device.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._seen: set[Skip] = set()
        if path is not None:
            if path.exists() and not path.is_file():
                raise ConfigError(f"bad_samples_report {path}: {'a folder' if path.is_dir() else 'no regular file'}; give the path of a file")
            path.parent.mkdir(parents=True, exist_ok=True)

    def start_anew(self) -> None:
        """Forget what an earlier run has listed. One rank calls it, before any rank adds."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def add(self, skip: Skip) -> bool:
        """List a sample unless it is listed already.

        Returns:
            Whether it was new.
        """
        if skip in self._seen:
            return False
        self._seen.add(skip)
        if self.path is None:
            return True
        line = json.dumps(skip._asdict(), ensure_ascii=False).encode("utf-8", "surrogateescape")
        with self.path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            text = file.read()
            # A process that was killed while it wrote leaves half a line.
            whole = text[: text.rfind(b"\n") + 1]
            file.truncate(len(whole))
            if line in whole.splitlines():
                return False
            file.write(line + b"\n")
            file.flush()
            os.fsync(file.fileno())
        return True
