"""Launches of ``tests.trial``, one after another, under an interpreter of their own: ``python launches.py LIST.json``."""

import json
import sys
from pathlib import Path

from tests.trial import run

if __name__ == "__main__":
    for launch in json.loads(Path(sys.argv[1]).read_text()):
        run(Path(launch["folder"]), launch["command"], launch["ranks"]).succeeded()
