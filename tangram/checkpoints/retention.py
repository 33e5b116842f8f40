"""How many checkpoints of a run are kept."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

from tangram.checkpoints.dcp_manifest import MANIFEST_FILE, Manifest, iteration_folder, read_manifest
from tangram.checkpoints.publish import temporary_name
from tangram.errors import CheckpointError

log = logging.getLogger(__name__)


def remove_oldest(folder: Path, newest: Manifest, limit: int) -> list[Path]:
    """Remove the run's oldest checkpoints until ``limit`` are left.

    To be called when the newest is published and the tracker names it. What counts are finished checkpoints of this run (its family, seed,
    tokenizer and dataset) up to the newest; all others, such as those of other runs, imported weights, or later steps of a run that was taken
    back to an earlier one, are left where they are.

    Returns:
        Where the removed ones were.
    """
    steps = sorted(step for step in _steps(folder) if step <= newest.step and _is_of_run(folder / iteration_folder(step), step, newest))
    removed = []
    for step in steps[: max(0, len(steps) - limit)]:
        path = folder / iteration_folder(step)
        # Under its own name a checkpoint is whole: a kill on the way leaves something that the next save clears away.
        aside = temporary_name(path)
        try:
            path.rename(aside)
            shutil.rmtree(aside)
        except OSError as error:
            log.warning("%s: cannot be removed (%s), though only %d checkpoints are to be kept", path, error.strerror or error, limit)
            continue
        removed.append(path)
    return removed


def _steps(folder: Path) -> list[int]:
    found = [re.fullmatch(r"iter_(\d{7,})", path.name) for path in folder.iterdir()]
    return [int(match[1]) for match in found if match]


def _is_of_run(path: Path, step: int, newest: Manifest) -> bool:
    if not (path / MANIFEST_FILE).is_file() or path.is_symlink():
        return False
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        return False
    facts = ("family", "seed", "tokenizer_hash", "dataset_fingerprint")
    return manifest.step == step and all(getattr(manifest, fact) == getattr(newest, fact) for fact in facts)
