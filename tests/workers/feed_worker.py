"""Several ``tangram train`` runs one after another in the ranks of one launch: ``feed_worker.py FEEDS.json``.

FEEDS.json: ``{"run_file": path, "folder": path, "feeds": {name: [override, ...]}}``. Each run leaves ``folder/name.jsonl``, its metrics, and each
rank ``folder/name.RANK.json``, how many images and videos it decoded itself.
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
    """Ends with the status of the first run that fails. As under torchrun, each run has a store of its own, which outlives it."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    common = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=rank == 0)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    stores = []
    for name, overrides in job["feeds"].items():
        if rank == 0:
            stores.append(TCPStore(os.environ["MASTER_ADDR"], 0, is_master=True, wait_for_workers=False))
            common.set(f"port/{name}", str(stores[-1].port))
        os.environ["MASTER_PORT"] = common.get(f"port/{name}").decode()
        decoded.update(images=0, videos=0)
        sys.stdout.write(f"feed {name}\n")
        status = main(["train", job["run_file"], f"training.metrics_file={job['folder']}/{name}.jsonl", *overrides])
        if status:
            return status
        Path(job["folder"], f"{name}.{rank}.json").write_text(json.dumps(decoded))
    common.set(f"through/{rank}", "1")
    if rank == 0:
        common.wait([f"through/{other}" for other in range(ranks)])
    return 0


if __name__ == "__main__":
    Media.image_pixels = counted("images", Media.image_pixels)  # type: ignore[method-assign]
    Media.video_pixels = counted("videos", Media.video_pixels)  # type: ignore[method-assign]
    sys.exit(run(json.loads(Path(sys.argv[1]).read_text())))
