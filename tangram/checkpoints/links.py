"""Which symbolic links a model directory may hold."""

from __future__ import annotations

from pathlib import Path

from tangram.errors import CheckpointError


def require_inside(directory: Path, file: Path) -> None:
    """Check that a file lies in a directory, links followed.

    The Hugging Face cache keeps ``models--<name>/snapshots/<revision>/<file>`` as a link to ``models--<name>/blobs/<hash>``: such links
    are followed. All others out of the directory are refused: what lies behind them is not part of the model that was asked for.

    Raises:
        CheckpointError: it does not.
    """
    home, target = directory.resolve(), file.resolve()
    if target.is_relative_to(home) or (home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"):
        return
    raise CheckpointError(f"{file}: is a link to {target}, outside of {directory}; copy the file in, or give the directory where it lies")
