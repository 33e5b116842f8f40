"""``tangram replay``: the run of a baseline again, here or at another split, and the gate."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tangram.cli.baseline import add_settings, refuse_to_overwrite
from tangram.cli.gate import add_reports, show_gate
from tangram.cli.parser import Parser
from tangram.errors import ConfigError

if TYPE_CHECKING:
    from tangram.align.gate.replay import Replay

EPILOG = """\
examples:
  tangram replay good.json                          the same run on the same number of devices; everything is compared
  tangram replay good.json --dp 2                   a baseline of 8 devices on 4: twice the micro-batches per step, the same global batch
  tangram replay good.json --tp 1 --pp 1 --dp 1 -o runs/one
  tangram replay good.json --backend fsdp2 --dp 4
  tangram replay good.json model.hf_dir=/data/Qwen2.5-VL-3B-Instruct     a path of this machine

At another split loss, gradient norms and samples are compared, which all splits have alike. The exit status is that of tangram gate, and 1 if the
run fails.
"""

OWN = {"run.yaml", "metrics.jsonl", "metrics.ranks.jsonl"}
"""Files of a replay."""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command to the parser of ``tangram``."""
    text = "run a baseline's own configuration again, at its split or another one, with the same global batch, and hold it against the baseline"
    parser = subparsers.add_parser("replay", help=text, description=text, epilog=EPILOG)
    parser.add_argument("baseline", metavar="FILE", type=Path, help="what tangram baseline make wrote, of a metrics.jsonl")
    parser.add_argument("settings", metavar="section.key=value", nargs="*", help="values that replace those of the baseline's run file")
    parser.words_into = "settings"
    parser.add_argument("--tp", type=int, metavar="N", help="tensor-parallel size (the baseline's)")
    parser.add_argument("--pp", type=int, metavar="N", help="pipeline-parallel size; vision layers on the first stage, text layers evenly")
    parser.add_argument("--dp", type=int, metavar="N", help="data-parallel size (the baseline's)")
    parser.add_argument("--backend", choices=("megatron", "fsdp2"), help="what runs the model (the baseline's)")
    parser.add_argument("-o", "--out", metavar="DIR", type=Path, default=Path("runs/replay"), help="folder to write (runs/replay)")
    parser.add_argument("--force", action="store_true", help="replace the replay that lies there")
    parser.add_argument("--write-only", action="store_true", help="write DIR/run.yaml and the commands for it, and run nothing")
    add_settings(parser, "the baseline's")
    add_reports(parser)


def run(args: argparse.Namespace) -> int:
    """Run again and compare; 0 passed, 1 failed."""
    from tangram.align.gate.baseline import read_baseline
    from tangram.align.gate.replay import Wishes, prepare

    for name in ("tp", "pp", "dp"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ConfigError(f"--{name} {getattr(args, name)} must be at least 1")
    if "RANK" in os.environ and not args.write_only:
        raise ConfigError("replay starts its processes itself; on several machines give --write-only, and run what it says")
    refuse_to_overwrite({"--json": args.json, "--html": args.html}, {"FILE": args.baseline, "the replay in -o": args.out})
    baseline = read_baseline(args.baseline)
    settings = baseline.settings.changed(args.mode, args.margin, args.warm_up)
    wishes = Wishes(args.tp, args.pp, args.dp, args.backend, args.settings)
    if _holds_a_replay(args.out, args.force):
        with tempfile.TemporaryDirectory(prefix="tangram-replay-") as trial:
            prepare(baseline, wishes, Path(trial))  # what is refused removes nothing
        for name in OWN:
            (args.out / name).unlink(missing_ok=True)
    replay = prepare(baseline, wishes, args.out)
    ignore = ["topology"] if wishes.other_topology else []
    print(f"{replay.run_file}: {replay.processes} processes, {replay.accumulation} micro-batches per step on each data-parallel rank", flush=True)
    for change in replay.changes:
        print(f"note: {change}", flush=True)
    if args.write_only:
        print(f"torchrun --nproc-per-node {replay.processes} -m tangram train {replay.run_file}")
        print(f"tangram gate {args.out} {args.baseline}{' --ignore topology' if ignore else ''}")
        return 0
    status = _train(replay)
    if status:
        print(f"FAILED: the replay ended with status {status}, see above")
        return 1
    return show_gate(args.out, args.baseline, baseline, settings, ignore, args.json, args.html)


def _holds_a_replay(folder: Path, force: bool) -> bool:
    """Whether a folder holds an earlier replay, which may be removed; nothing else is.

    Raises:
        ConfigError: it holds something else, or a replay without ``force``.
    """
    left = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if left - OWN or (left and not force):
        mend = "--force to replace it" if left <= OWN else "another folder"
        raise ConfigError(f"{folder}: {'holds ' + min(left - OWN) if left - OWN else 'holds an earlier replay'}; give {mend}")
    return bool(left)


def _train(replay: Replay) -> int:
    from tangram.config.preflight import check_run
    from tangram.config.yaml_config import read_run

    config = read_run(replay.run_file)
    check_run(config, replay.processes).raise_errors()
    if replay.processes > 1:
        from tangram.training.launch import launch

        return launch(replay.processes, "tangram", ["train", str(replay.run_file)])
    from tangram.training.entry import train

    train(config)
    return 0
