"""``python -m tests.baselines``: makes the stored baselines, and the figures of docs/baselines.md, anew.

``python -m tests.baselines inputs``: only the models and data that they are of, where a replay looks for them.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from tangram.align.gate.baseline import make_baseline, read_baseline, write_baseline
from tangram.align.gate.read_run import read_run
from tangram.align.gate.replay import prepare
from tangram.align.gate.replay_split import Wishes
from tangram.align.gate.settings import Settings
from tangram.config import yaml_config
from tests.baselines.recipe import BACKENDS, FAMILIES, INITS, MARGINS, run_file, stored, write_inputs
from tests.baselines.thirty import PAGE, page, thirty_steps
from tests.trial import Job, run_in_turn


def make_all(root: Path) -> None:
    """First those of megatron, and of these, by replay, those of fsdp2. Each is of one process."""
    write_inputs(root)
    names = [(family, init) for family in FAMILIES for init in INITS]
    for backend in BACKENDS:
        files = {}
        for family, init in names:
            folder = root / "made" / backend / family / init
            if backend == "megatron":
                path = run_file(family, init, folder)
                path.write_text(yaml_config.dump(yaml_config.read_run(path, [f"training.metrics_file={folder}/metrics.jsonl"], root)))
            else:
                path = prepare(read_baseline(stored(family, "megatron", init)), Wishes(backend=backend), folder, root).run_file
            files[family, init] = path
        run_in_turn(root / "made" / backend / "log", [Job(["tangram", "train", str(path)]) for path in files.values()], 2).succeeded()
        for (family, init), path in files.items():
            _keep(path.parent, stored(family, backend, init), root)
    run_in_turn(root / "log", [Job(["tangram", "train", str(path)]) for path in thirty_steps(root, root / "thirty")], 2).succeeded()
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), root / "thirty"), encoding="utf-8")


def _keep(run: Path, file: Path, root: Path) -> None:
    """What a machine says of itself, time and memory, is left out; paths start from the root."""
    recorded = read_run(run)
    steps = [replace(step, step_ms=None) for step in recorded.steps]
    config = (recorded.config or "").replace(f"{root}/", "")
    kept = replace(recorded, where=f"{file.stem}, one process", steps=steps, memory={}, config=config)
    write_baseline(make_baseline(kept, Settings().changed("margin", MARGINS, 0)), file)


if __name__ == "__main__":
    if sys.argv[1:] == ["inputs"]:
        write_inputs(Path.cwd())
    else:
        with tempfile.TemporaryDirectory() as name:
            make_all(Path(name).resolve())
