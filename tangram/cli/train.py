"""``tangram train``: train what a run file describes."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from tangram.cli.parser import Parser
from tangram.errors import ConfigError

if TYPE_CHECKING:
    from tangram.config.run import RunConfig

EPILOG = """\
examples:
  tangram train run.yaml                                       as many processes as the split needs, on this machine
  tangram train run.yaml training.lr=1e-5 --nproc-per-node 8   two copies of a model that is split over four
  torchrun --nnodes 2 ... -m tangram train run.yaml            several machines
"""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command to the parser of ``tangram``."""
    text = "train, at the split and from the weights that a run file names"
    parser = subparsers.add_parser("train", help=text, description=text, epilog=EPILOG)
    parser.add_argument("run_file", metavar="RUN.yaml", help="six sections: parallel, data, model, features, training, tools")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="values that replace the file's")
    parser.words_into = "overrides"
    parser.add_argument("--nproc-per-node", type=int, default=None, metavar="N", help="processes to start (as few as the split needs)")


def run(args: argparse.Namespace) -> int:
    """Check the run; train in this process, or in the processes that it needs."""
    from tangram.config.yaml_config import read_run

    if args.nproc_per_node is not None and args.nproc_per_node < 1:
        raise ConfigError(f"--nproc-per-node {args.nproc_per_node} must be at least 1")
    if "RANK" in os.environ:
        if args.nproc_per_node is not None:
            raise ConfigError("--nproc-per-node is for a launch without torchrun; remove it")
        from tangram.training.failure import SharedFailure

        with SharedFailure():
            return _train(read_run(args.run_file, args.overrides))
    config = read_run(args.run_file, args.overrides)
    processes = args.nproc_per_node or _needed(config)
    if processes == 1:
        return _train(config)
    from tangram.config.preflight import check_run
    from tangram.training.launch import launch

    check_run(config, processes).raise_errors()
    print(f"starting {processes} processes on this machine through torch.distributed.run", flush=True)
    return launch(processes, "tangram", ["train", args.run_file, *args.overrides])


def _needed(config: RunConfig) -> int:
    """Processes that the split needs."""
    if config.fsdp2 is None:
        return config.topology().process_unit
    from tangram.config.fsdp2_sizes import least_processes

    return least_processes(config.fsdp2.parallel)


def _train(config: Any) -> int:
    from tangram.training.entry import train

    train(config)
    return 0
