"""``tangram demo``: the whole job in one go."""

from __future__ import annotations

import argparse
from pathlib import Path

from tangram.cli.parser import Parser

EPILOG = """\
Writes into DIR (runs/demo): data/, hf_init/, mm/, run.yaml, train.log, metrics.jsonl, ckpt/, hf_final/, loss.png, report.json, report.html.
The exit status is 1 if one of the checks in the report failed.
"""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command to the parser of ``tangram``."""
    text = "train a small random model over four processes on real pictures, export it, and let transformers answer questions with it"
    parser = subparsers.add_parser("demo", help=text, description=text, epilog=EPILOG)
    parser.add_argument("out", metavar="DIR", type=Path, nargs="?", default=Path("runs/demo"), help="folder to write (runs/demo)")
    parser.add_argument("--steps", type=int, default=None, metavar="N", help="training steps; few, for a quick look, teach the model nothing")
    parser.add_argument("--force", action="store_true", help="replace the earlier demo that lies in DIR")


def run(args: argparse.Namespace) -> int:
    """Run the demo; print what happens, three answers, and what to run next."""
    from dataclasses import replace

    from tangram.demo.recipe import Recipe
    from tangram.demo.run import next_commands, run_demo, shown
    from tangram.errors import ConfigError

    recipe = Recipe()
    if args.steps is not None:
        if args.steps < 1:
            raise ConfigError(f"--steps {args.steps} must be at least 1")
        recipe = replace(recipe, steps=args.steps, warmup=min(recipe.warmup, args.steps - 1))
    found = run_demo(args.out, recipe, lambda line: print(line, flush=True), force=args.force)
    print()
    for check in found.checks:
        print(f"{'ok    ' if check.passed else 'FAILED'} {check.text}")
    print("\nThree pictures that training did not see, and what the exported model answers:")
    for answer in shown(found.answers, 3):
        print(f"  {answer.question.image}: {answer.question.text} -> {answer.said} (truth: {answer.question.answer})")
    print(f"\nLook at {args.out}/report.html. What to run next:")
    for command in next_commands(args.out, recipe):
        print(f"  {command}")
    return 0 if found.passed else 1
