"""Runs the engine on every rank on the same samples, packed and not, and writes what it finds.

Usage: packing_worker.py FOLDER, on every rank. ``FOLDER/tasks.json`` holds the runs, ``FOLDER/steps.pt`` the micro-batches of one
step by name. Of each run, loss type and step, every rank writes its gradients, and rank 0 the loss.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from tangram.align.assemble import write_pieces
from tangram.align.task import Task, TaskList
from tangram.backends.megatron.engine import MegatronEngine
from tangram.backends.megatron.parallel import shutdown
from tangram.checkpoints.hf_directory import HFDirectory
from tangram.checkpoints.load_hf import load_hf

LOSS_TYPES = ("default", "per_sample_loss", "per_token_loss")


def make_engine(task: Task, loss_type: str) -> MegatronEngine:
    run = task.run_config()
    engine = MegatronEngine(run.model_copy(update={"training": run.training.model_copy(update={"loss_type": loss_type})}))
    placements, parameters = [c.placement for c in engine.chunks], [c.parameters for c in engine.chunks]
    load_hf(HFDirectory(task.hf_dir), placements, parameters, cast=True, shapes=engine.canonical_shapes)
    engine.weights_changed()
    return engine


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    steps = torch.load(folder / "steps.pt", weights_only=True)
    for task in TaskList.model_validate_json((folder / "tasks.json").read_text(encoding="utf-8")).tasks:
        for loss_type in LOSS_TYPES:
            engine = make_engine(task, loss_type)
            for name, micro_batches in steps.items():
                out = task.folder / f"{loss_type}_{name}"
                out.mkdir(parents=True, exist_ok=True)
                result = engine.forward_backward(micro_batches[engine.data_parallel_rank :: engine.data_parallel_size])
                write_pieces(engine.canonical_gradients(), out / f"gradients_{rank}")
                if rank == 0:
                    found = {"loss": result.loss, "weight": result.weight, "tokens": result.tokens}
                    (out / "result.json").write_text(json.dumps(found), encoding="utf-8")
    shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
