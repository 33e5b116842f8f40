"""The chunked loss against whole logits, checkpointed chunks and, where it is installed, Cut Cross-Entropy compiled by torch.

    python bench/chunk_loss.py --json bench/results/chunk_loss.json

Every token counts. A side is measured forward and backward, each time in a process of its own, sides taking turns: CPU time, and the growth of the
peak memory, the gradients that every side leaves behind not counted. The gradient's error is measured on 256 tokens against fp64. Ratios are
medians over the rounds.

Time goes to three matrix products of T x H x V, which all sides have, and to passes over the logits: the wider the model, the less there
is to save. Memory is another matter: whole logits take 12 to 16 bytes per token and vocabulary entry whatever H is.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

SIDES = ("full", "checkpointed", "chunked", "cce")
TOKENS, VOCAB = 4096, 32000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=4, metavar=("SIDE", "HIDDEN", "CHUNK", "WHAT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        side, hidden, chunk, what = args.one
        print(json.dumps(measure(side, int(hidden), int(chunk), what)))
        return
    found: dict[str, Any] = {"tokens": TOKENS, "vocab": VOCAB, "dtype": "fp32", "chunk": args.chunk, "rounds": args.rounds}
    for hidden in args.hidden:
        found[f"hidden {hidden}"] = compare(hidden, args.chunk, args.rounds)
        print(json.dumps({f"hidden {hidden}": found[f"hidden {hidden}"]}, indent=1), flush=True)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def compare(hidden: int, chunk: int, rounds: int) -> dict[str, Any]:
    sides: dict[str, Any] = {}
    runnable = []
    for side in SIDES:
        if side == "cce" and importlib.util.find_spec("cut_cross_entropy") is None:
            sides[side] = "not installed"
            continue
        try:
            sides[side] = child(side, hidden, chunk, "error")
            runnable.append(side)
        except subprocess.CalledProcessError as error:
            sides[side] = f"does not run: {error.stderr.strip().splitlines()[-1]}"
    found: dict[str, list[dict[str, float]]] = {side: [] for side in runnable}
    for _ in range(rounds):
        for side in runnable:
            found[side].append(child(side, hidden, chunk, "run"))
    for side in runnable:
        for key, ratio in (("seconds", "time_ratio"), ("extra_mib", "memory_ratio")):
            sides[side][key] = round(statistics.median(one[key] for one in found[side]), 2)
            pairs = zip(found[side], found["full"], strict=True)
            sides[side][ratio] = round(statistics.median(mine[key] / whole[key] for mine, whole in pairs), 3)
    return sides


def child(side: str, hidden: int, chunk: int, what: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", side, str(hidden), str(chunk), what]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(side: str, hidden: int, chunk: int, what: str) -> dict[str, float]:
    """``run``: CPU seconds, and growth of the peak less the gradients, MiB; ``error``: of the gradients, against fp64."""
    import torch

    torch.set_num_threads(1)
    tokens = 256 if what == "error" else TOKENS
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, hidden, generator=generator).requires_grad_()
    weight = (torch.randn(VOCAB, hidden, generator=generator) * 0.02).requires_grad_()
    targets = torch.randint(0, VOCAB, (tokens,), generator=generator)
    run = sides_of(chunk)[side]
    small = [states[:8].detach().requires_grad_(), weight[:64].detach().requires_grad_()]
    run(*small, targets[:8] % 64).backward()
    if what == "error":
        return {"gradient_error": worst_error(run, states, weight, targets)}
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    run(states, weight, targets).backward()
    seconds = time.process_time() - start
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    gradients = (states.nbytes + weight.nbytes) / 2**20
    return {"seconds": seconds, "extra_mib": grown - gradients}


def sides_of(chunk: int) -> dict[str, Callable[..., Any]]:
    """Loss functions of (states [n, H], weight [V, H], targets [n]): the mean cross-entropy."""
    import torch
    from torch.nn import functional as F
    from torch.utils.checkpoint import checkpoint

    from tangram.losses.chunk import chunked_loss

    def full(states: Any, weight: Any, targets: Any) -> Any:
        return F.cross_entropy(states @ weight.t(), targets)

    def checkpointed(states: Any, weight: Any, targets: Any) -> Any:
        def part(one: Any, weight: Any, wanted: Any) -> Any:
            return F.cross_entropy(one @ weight.t(), wanted, reduction="sum")

        pairs = zip(states.split(chunk), targets.split(chunk), strict=True)
        return torch.stack([checkpoint(part, one, weight, wanted, use_reentrant=False) for one, wanted in pairs]).sum() / len(targets)

    def ours(states: Any, weight: Any, targets: Any) -> Any:
        return chunked_loss(states, weight, targets, torch.full(targets.shape, 1 / len(targets)), chunk)

    def cce(states: Any, weight: Any, targets: Any) -> Any:
        from cut_cross_entropy import linear_cross_entropy

        return linear_cross_entropy(states, weight, targets, impl="torch_compile")

    return {"full": full, "checkpointed": checkpointed, "chunked": ours, "cce": cce}


def worst_error(run: Callable[..., Any], states: Any, weight: Any, targets: Any) -> float:
    import torch

    exact = [tensor.detach().double().requires_grad_() for tensor in (states, weight)]
    torch.nn.functional.cross_entropy(exact[0] @ exact[1].t(), targets).backward()
    run(states, weight, targets).backward()
    return max(float((one.grad.double() - other.grad).norm() / other.grad.norm()) for one, other in zip((states, weight), exact, strict=True))


if __name__ == "__main__":
    main()
