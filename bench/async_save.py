"""How long a save in the background keeps training waiting, against a save that training waits for.

Weights and AdamW's state of one rank, saved again and again in one process: by turns with and without waiting. Between saves the weights are
trained on, so that nothing is saved twice. Medians; the first save of each kind, which makes the staging memory, is told apart.

    python bench/async_save.py --megabytes 600
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch

from tangram.backends.fsdp2.optimizer_state import ShardOptimizerState
from tangram.backends.fsdp2.placement import local_value, place_shards
from tangram.checkpoints.dcp_manifest import RunFacts
from tangram.checkpoints.manager import CheckpointManager
from tangram.placement.topology import Topology

warnings.filterwarnings("ignore")
logging.getLogger("tangram").setLevel(logging.ERROR)
GOAL = 10.0
"""Percent of the time of a save that is waited for."""
WIDTH = 1024


class State:
    """Matrices of 4 MiB, and AdamW after a step."""

    def __init__(self, megabytes: int) -> None:
        count = max(1, megabytes // 12)  # with two moments
        self.model = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(count))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.step()

    def step(self) -> None:
        for parameter in self.model:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def manager(self, save_async: bool) -> CheckpointManager:
        topology, named = Topology.build(vision_layers=0, text_layers=1), dict(self.model.named_parameters())
        placement = place_shards(self.model, topology, None)
        chunks = [(topology.order[0], placement, {name: local_value(parameter) for name, parameter in named.items()})]
        shapes = {name: tuple(parameter.shape) for name, parameter in named.items()}
        facts = RunFacts("bench", topology, 1, {}, "", "", 0, {})
        held = ShardOptimizerState(self.optimizer, named)
        return CheckpointManager(facts, chunks, shapes, held, save_async=save_async, save_total_limit=1)  # type: ignore[arg-type]


def timed(manager: CheckpointManager, folder: Path, step: int) -> tuple[float, float]:
    """Seconds until ``save`` returns, and until the checkpoint is published."""
    began = time.perf_counter()
    manager.save(folder, step, step)
    returned = time.perf_counter()
    manager.wait()
    return returned - began, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=600, help="of weights and optimizer state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; a disk, not memory (a temporary folder)")
    args = parser.parse_args()
    state = State(args.megabytes)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        waits, whole, plain = [], [], []
        in_background, in_front = state.manager(True), state.manager(False)
        for step in range(1, args.rounds + 2):
            blocked, published = timed(in_background, Path(folder, "background"), step)
            waits.append(blocked)
            whole.append(published)
            state.step()
            plain.append(timed(in_front, Path(folder, "front"), step)[0])
            state.step()
    first, wait, full = waits[0], statistics.median(waits[1:]), statistics.median(plain[1:])
    staged = in_background.staging.nbytes if in_background.staging is not None else 0
    print(f"state: {args.megabytes} MB, staging memory: {staged / 2**20:.0f} MiB")
    print(f"save that is waited for: {full:.2f} s; in the background: published after {statistics.median(whole[1:]):.2f} s")
    print(f"training waits {wait:.3f} s ({100 * wait / full:.1f} % of it; goal at most {GOAL:.0f} %); the first time {first:.3f} s")


if __name__ == "__main__":
    main()
