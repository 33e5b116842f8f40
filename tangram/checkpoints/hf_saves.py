"""Weights of a run as Hugging Face directories, written from all ranks' parameters while it trains."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tangram.checkpoints.background import own_group
from tangram.checkpoints.dcp_manifest import iteration_folder
from tangram.checkpoints.dcp_ranks import on_coordinator, rank
from tangram.checkpoints.dcp_state import LocalChunk
from tangram.checkpoints.export import replace_hf
from tangram.checkpoints.sharded_reader import ShardedReader
from tangram.checkpoints.stored_types import StoredAs
from tangram.checkpoints.writing import WriteSettings
from tangram.families.base import Family
from tangram.placement.table import Shape

log = logging.getLogger(__name__)
FOLDER = "hf"


class HFSaves:
    """Writes ``<save>/hf/iter_<step>``. All ranks make it and call ``save`` together; rank 0 writes, and holds a few megabytes at a time.

    Such a directory has no optimizer state and no data position: a run can start from it, but not go on.

    Args:
        chunks, shapes, stored_as: as ``CheckpointManager`` has them.
        hf_config: content of config.json.
        files_from: directory whose tokenizer, processor and other small files are copied; None: config.json alone is written.
    """

    def __init__(
        self,
        chunks: Sequence[LocalChunk],
        shapes: Mapping[str, Shape],
        stored_as: StoredAs | None,
        family: Family,
        hf_config: Mapping[str, Any],
        files_from: Path | None,
    ) -> None:
        self._chunks, self._shapes, self._stored_as = chunks, shapes, stored_as
        self._family, self._config, self._files_from = family, hf_config, files_from
        self._group = own_group()

    def save(self, folder: str | Path, step: int) -> Path:
        """Write the directory; one that stands there, of the same step, is replaced when the new one is complete.

        Raises:
            CheckpointError: on every rank, if any rank failed; nothing is published then.
        """
        began = time.monotonic()
        final = Path(folder) / FOLDER / iteration_folder(step)
        reader = ShardedReader(self._chunks, self._shapes, self._stored_as, self._group)
        if rank() != 0:
            reader.serve()
        on_coordinator(lambda: self._write(reader, final))
        if rank() == 0:
            log.info("wrote the Hugging Face directory %s in %.1f s", final, time.monotonic() - began)
        return final

    def _write(self, reader: ShardedReader, final: Path) -> None:
        try:
            replace_hf(reader, final, self._family, files_from=self._files_from, hf_config=self._config, settings=WriteSettings(workers=1))
        finally:
            reader.close()
