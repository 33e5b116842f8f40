"""``tangram tiny``: write a small random Hugging Face checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tangram.cli.parser import Parser

EPILOG = """\
examples:
  tangram tiny qwen2_5_vl runs/tiny                       the real vocabulary and tokenizer
  tangram tiny qwen2_vl runs/small --vocab 512 --tied     for unit tests
"""
SIZES = (
    ("hidden", "width of the text decoder (64)"),
    ("ffn", "width of the text MLP (2 * hidden)"),
    ("text-layers", "layers of the text decoder (4)"),
    ("heads", "attention heads of the text decoder (4)"),
    ("kv-heads", "key/value heads of the text decoder (2)"),
    ("vision-hidden", "width of the vision tower (32)"),
    ("vision-ffn", "width of the vision MLP (2 * vision-hidden)"),
    ("vision-layers", "blocks of the vision tower (4)"),
    ("vision-heads", "attention heads of the vision tower (4)"),
    ("experts", "experts of a text layer, qwen3_vl_moe (4)"),
    ("experts-per-token", "experts that a token goes to, qwen3_vl_moe (2)"),
    ("expert-ffn", "width of an expert, qwen3_vl_moe (3/4 of hidden)"),
    ("position-rows", "rows of the vision tower's position table, a square, qwen3_vl and qwen3_vl_moe (64)"),
    ("max-pixels", "largest picture after resizing, in pixels, not llava (200704)"),
    (
        "vocab",
        "rows of the embedding (the real 151936). With a number no tokenizer files are written, and the special tokens become the last "
        "ids: <|video_pad|> is N - 1, <|image_pad|> N - 2, <|vision_end|> N - 4, <|vision_start|> N - 5, <|im_end|> N - 12. "
        "llava: 32064, never with tokenizer files; with a number <pad> is N - 1, <image> N - 2",
    ),
)


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command to the parser of ``tangram``."""
    text = "write a small random Hugging Face checkpoint with tokenizer and image processor files"
    parser = subparsers.add_parser("tiny", help=text, description=text, epilog=EPILOG)
    parser.add_argument("family", metavar="FAMILY", help="qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe, llava, or a family that a plug-in registers")
    parser.add_argument("out", metavar="OUT", type=Path, help="directory to write")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed gives byte-identical weights (0)")
    parser.add_argument("--tied", action="store_true", help="the output layer is the embedding")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=None, help="type of the weights (float32)")
    parser.add_argument("--force", action="store_true", help="replace the checkpoint that lies in OUT")
    parser.add_argument("--plugin", action="append", default=[], metavar="PATH", help="Python file or folder to import first; may be repeated")
    for name, meaning in SIZES:
        parser.add_argument(f"--{name}", type=int, default=None, metavar="N", help=meaning)
    parser.add_argument("--weight-std", type=float, default=None, metavar="X", help="standard deviation of matrices (1 / sqrt(fan-in))")


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint and say what to do with it."""
    from tangram.families.base import get_family
    from tangram.families.plugins import load_plugins
    from tangram.families.tiny import TinySpec

    load_plugins(args.plugin)
    family = get_family(args.family)
    names = [name.replace("-", "_") for name, _ in SIZES] + ["weight_std", "dtype"]
    given: dict[str, Any] = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    family.tiny(args.out, args.seed, args.tied, TinySpec(**given), force=args.force)
    size = (args.out / "model.safetensors").stat().st_size
    print(f"{args.out}: random {family.name}, seed {args.seed}, {size / 1e6:.1f} MB of weights")
    return 0
