"""Several ``tangram train`` runs one after another in the ranks of one launch: ``feed_worker.py FEEDS.json``.

FEEDS.json: ``{"run_file": path, "folder": path, "feeds": {name: [override, ...]}}``. Each run leaves ``folder/name.jsonl``, its metrics, and each
rank ``folder/name.RANK.json``, how many images and videos it decoded itself.

As under torchrun, a store outlives the runs, and a run knows its keys by the number of the restart.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from tangram.cli.main import main
from tangram.data.media import Media

decoded = {"images": 0, "videos": 0}


def counted(name: str, read: Callable[..., Any]) -> Any:
    """``read``, counted."""

    def reading(*args: Any) -> Any:
        decoded[name] += 1
        return read(*args)

    return reading


def run(job: dict[str, Any]) -> int:
    """Ends with the status of the first run that fails."""
    for number, (name, overrides) in enumerate(job["feeds"].items()):
        decoded.update(images=0, videos=0)
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        sys.stdout.write(f"feed {name}\n")
        status = main(["train", job["run_file"], f"training.metrics_file={job['folder']}/{name}.jsonl", *overrides])
        if status:
            return status
        Path(job["folder"], f"{name}.{os.environ['RANK']}.json").write_text(json.dumps(decoded))
    return 0


def with_store(job: dict[str, Any]) -> int:
    """``run``; rank 0 holds the store until all ranks are through."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=rank == 0)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    status = run(job)
    store.set(f"through/{rank}", "1")
    if rank == 0 and status == 0:
        store.wait([f"through/{other}" for other in range(ranks)])
    return status


if __name__ == "__main__":
    Media.image_pixels = counted("images", Media.image_pixels)  # type: ignore[method-assign]
    Media.video_pixels = counted("videos", Media.video_pixels)  # type: ignore[method-assign]
    sys.exit(with_store(json.loads(Path(sys.argv[1]).read_text())))
