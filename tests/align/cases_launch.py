"""What ranks do in ``test_launch``: ``main([FOLDER, WHAT])`` leaves ``FOLDER/RANK``, then does it."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path


def main(arguments: list[str]) -> int:
    folder, what = Path(arguments[0]), arguments[1]
    rank = os.environ["RANK"]
    seen = {"pid": os.getpid(), "server": os.getppid(), "folder": str(Path.cwd()), "mark": os.environ.get("TANGRAM_MARK")}
    seen["place"] = [os.environ[name] for name in ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")]
    (folder / f"partial_{rank}").write_text(json.dumps(seen))
    (folder / f"partial_{rank}").rename(folder / rank)
    if what == "return":
        return 0
    while not (folder / "0").exists():
        time.sleep(0.02)
    if rank == "1" and what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == "1" and what == "raises":
        raise ValueError("of this rank alone")
    if rank == "1" and what == "status":
        return 3
    time.sleep(3600)
    return 0
