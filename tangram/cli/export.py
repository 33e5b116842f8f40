"""``tangram export``: a training checkpoint as a Hugging Face directory."""

from __future__ import annotations

import argparse
from pathlib import Path

from tangram.cli.parser import Parser
from tangram.errors import CheckpointError

EPILOG = """\
examples:
  tangram export runs/ckpt runs/hf --hf Qwen2.5-VL-3B-Instruct         the newest checkpoint; tokenizer and processor files from --hf
  tangram export runs/ckpt/iter_0000200 runs/hf --hf DIR --dtype bfloat16
"""
DTYPES = ("float32", "bfloat16", "float16")


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command to the parser of ``tangram``."""
    text = "write a training checkpoint as a Hugging Face directory"
    parser = subparsers.add_parser("export", help=text, description=text, epilog=EPILOG)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="folder of one checkpoint, or of checkpoints, whose newest is taken")
    parser.add_argument("out", metavar="OUT", type=Path, help="directory to write")
    parser.add_argument("--hf", metavar="DIR", type=Path, help="directory whose tokenizer, processor and other small files are copied")
    parser.add_argument("--dtype", choices=DTYPES, help="type of the weights (that of the checkpoint)")
    parser.add_argument("--plugin", action="append", default=[], metavar="PATH", help="Python file or folder to import first; may be repeated")


def run(args: argparse.Namespace) -> int:
    """Write the directory and say what is in it."""
    import torch

    from tangram.checkpoints.dcp_convert import check_whole
    from tangram.checkpoints.dcp_reader import DCPReader
    from tangram.checkpoints.export import export_hf
    from tangram.config.sources import read_hf_config
    from tangram.families import has_family
    from tangram.families.plugins import load_plugins
    from tangram.families.unknown import family_or_unknown

    load_plugins(args.plugin)
    reader = DCPReader(args.checkpoint)
    config = dict(reader.manifest.hf_config) or (read_hf_config(args.hf) if args.hf else {})
    if not config:
        raise CheckpointError(f"{reader.folder}: holds no Hugging Face config (the run had none); give a directory that has one with --hf")
    dtype, family = getattr(torch, args.dtype) if args.dtype else None, family_or_unknown(reader.manifest.family)
    if has_family(family.name):
        # Of a model of no family the checkpoint's own completeness, which it was saved with, is all there is to hold it against.
        check_whole(reader, family, config)
    written = export_hf(reader, args.out, family, files_from=args.hf, hf_config=config, dtype=dtype)
    print(f"{args.out}: {len(reader.names())} tensors, {written} bytes, from step {reader.manifest.step} of {reader.folder}")
    return 0
