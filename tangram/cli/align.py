"""``tangram align``: prove that a split model is the Hugging Face model."""

from __future__ import annotations

import argparse
import json
import math
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tangram.cli.align_trace import EPILOG as TRACE_EPILOG
from tangram.cli.align_trace import add_options, check_options, compare, trace_folder, traces
from tangram.cli.parser import Parser
from tangram.errors import ConfigError

if TYPE_CHECKING:
    from tangram.align.sharded import Sharded
    from tangram.align.task import Split

EPILOG = """\
examples:
  tangram align --hf runs/tiny --tp 2 --sp --pp 2
  tangram align --hf runs/tiny --pp 2 --vit-pp-layers [2,2] --llm-pp-layers [0,4]
  tangram align --hf runs/tiny --pp 2 --vpp 2 --dump runs/seen     then look at logits.safetensors and grads.safetensors
  tangram align --hf runs/tiny --cp 4 --cp-algo hybrid --ulysses-degree 2
  tangram align --hf runs/tiny --dp 2 --balance                    pictures dealt out over the copies
  tangram align --hf runs/tiny --tp 2 --dp 2 --steps 20            compare a training curve instead of one batch
  tangram align --hf runs/tiny --backend fsdp2 --nproc 2
  tangram align --hf runs/tiny --backend fsdp2 --nproc 2 features.enable_chunk_loss=true parallel.ulysses_parallel_size=2

On the fsdp2 backend the settings are keys of the run file; blocks, merger and layers are sharded where they do not say otherwise
(parallel.fsdp_plan.apply_modules). --tp, --sp, --cp, --pp, --vpp, --dp, --ep, --balance and the layer lists are megatron's.

{trace}
The exit status is 0 if everything lies within the tolerance, else 1.
"""
MEGATRON_OPTIONS = (
    *("--tp", "--vision-tp", "--sp", "--cp", "--cp-algo", "--ulysses-degree", "--pp", "--vpp", "--dp", "--ep"),
    *("--balance", "--vit-pp-layers", "--llm-pp-layers"),
)


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command to the parser of ``tangram``."""
    text = "run one batch through transformers and through the split model; compare loss, logits and every gradient"
    parser = subparsers.add_parser("align", help=text, description=text, epilog=EPILOG.replace("{trace}", TRACE_EPILOG))
    parser.add_argument("--hf", metavar="DIR", type=Path, help="Hugging Face model directory; needed, but to compare two traces")
    checkpoint = "training checkpoint, or mp_rank directory of this split, whose weights the split model takes; proves that --hf is the same model"
    parser.add_argument("--checkpoint", metavar="DIR", type=Path, help=checkpoint)
    parser.add_argument("settings", nargs="*", metavar="section.key=value", help="fsdp2: keys of the run file, the value as YAML")
    parser.add_argument("--backend", choices=("megatron", "fsdp2"), default="megatron", help="what runs the split model (megatron)")
    parser.add_argument("--nproc", type=int, default=None, metavar="N", help="fsdp2: processes (1)")
    parser.add_argument("--tp", type=int, default=None, metavar="N", help="tensor-parallel size (1)")
    own = "tensor-parallel size of the vision encoder, a divisor of --tp (the same); what is left over are copies that encode pictures of their own"
    parser.add_argument("--vision-tp", type=int, default=None, metavar="N", help=own)
    parser.add_argument("--sp", action="store_true", default=None, help="sequence parallelism over the tensor-parallel ranks")
    parser.add_argument("--cp", type=int, default=None, metavar="N", help="context-parallel size: ranks that share the tokens of a micro-batch (1)")
    parser.add_argument("--cp-algo", choices=("ulysses", "ring", "hybrid"), default=None, help="how they attend (ulysses)")
    parser.add_argument("--ulysses-degree", type=int, default=None, metavar="N", help="hybrid: ranks that share the heads")
    parser.add_argument("--pp", type=int, default=None, metavar="N", help="pipeline-parallel size (as --llm-pp-layers says, or 1)")
    parser.add_argument("--vpp", type=int, default=None, metavar="N", help="virtual stages per pipeline rank (as --llm-pp-layers says, or 1)")
    parser.add_argument("--dp", type=int, default=None, metavar="N", help="copies of the model, each with its share of the batch (1)")
    experts = "of the --dp x --cp ranks, those that divide the experts (1); --dp is then as large as that needs"
    parser.add_argument("--ep", type=int, default=None, metavar="N", help=experts)
    parser.add_argument("--balance", action="store_true", default=None, help="the copies of --dp deal out their pictures and videos among them")
    parser.add_argument("--vit-pp-layers", metavar="LIST", help="vision layers per stage, such as [2,2] or [[2,1],[1,0]] (all on the first)")
    parser.add_argument("--llm-pp-layers", metavar="LIST", help="text layers per stage (evenly)")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="type of the split model; the reference is fp32 (fp32)")
    media = "pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw, second_per_grid_ts"
    tensors = f"input_ids, labels, attention_mask[, {media}, position_ids]"
    parser.add_argument("--batch", metavar="FILE", type=Path, help=f"safetensors file with {tensors} (photographs and questions of our own)")
    parser.add_argument("--micro-batch-size", type=int, default=None, metavar="N", help="rows per micro-batch (half of the batch)")
    parser.add_argument("--pack", action="store_true", help="run all rows once more, packed into one, each seeing itself alone")
    parser.add_argument("--tolerance", type=float, default=None, metavar="X", help="largest relative error (fp32 1e-5, fp16 5e-2, bf16 0.2)")
    parser.add_argument("--dump", metavar="DIR", type=Path, help="write batch.safetensors, logits.safetensors, grads.safetensors of the split model")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the report as JSON")
    parser.add_argument("--rows", type=int, default=12, metavar="N", help="gradients in the table, worst first (12)")
    parser.add_argument("--steps", type=int, default=None, metavar="N", help="train N steps on the batch and compare the losses instead")
    parser.add_argument("--lr", type=float, default=1e-4, metavar="X", help="learning rate of --steps (1e-4)")
    parser.add_argument("--plugin", action="append", default=[], metavar="PATH", help="Python file or folder to import first; may be repeated")
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Compare, print, and write what is asked for."""
    _check_tolerance(args)
    if (two := traces(args)) is not None:
        return compare(*two, args.tolerance, args.json)
    if args.hf is None:
        raise ConfigError("--hf DIR is missing: the model that is to be run; or give two traces, --trace A B")
    check_options(args)
    split = read_sharded(args) if args.backend == "fsdp2" else read_split(args)
    for name in ("micro_batch_size", "steps"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1")
    if args.rows < 0:
        raise ConfigError(f"--rows {args.rows} must be at least 0")
    if not 0 < args.lr < math.inf:
        raise ConfigError(f"--lr {args.lr} must be a number above 0")
    if args.steps is None:
        return _compare_batch(args, split)
    if args.dump is not None or args.checkpoint is not None or args.dtype != "fp32" or args.pack:
        raise ConfigError("--steps compares losses in fp32 from the weights of --hf; leave out --dump, --checkpoint, --dtype and --pack")
    return _compare_curves(args, split)


def _check_tolerance(args: argparse.Namespace) -> None:
    if args.tolerance is not None and not 0 <= args.tolerance < math.inf:
        raise ConfigError(f"--tolerance {args.tolerance} must be a number from 0 up")


def _compare_batch(args: argparse.Namespace, split: Split | Sharded) -> int:
    from tangram.align.render import render
    from tangram.align.run import align

    with trace_folder(args) as folder:
        (outcome,) = align(
            args.hf,
            [split],
            dtype=args.dtype,
            batch_file=args.batch,
            micro_batch_size=args.micro_batch_size,
            dump=args.dump,
            tolerance=args.tolerance,
            plugins=args.plugin,
            checkpoint=args.checkpoint,
            pack=args.pack,
            trace_to=folder,
            trace_only=args.trace_only,
        )
        for note in outcome.notes:
            print(note)
        print(render(outcome.report, f"{args.hf}, {split}, {args.dtype}, against transformers in fp32", limit=args.rows))
        if args.trace is None:
            _write_json(args.json, outcome.as_dict())
            return 0 if outcome.report.passed else 1
        assert folder is not None
        print()
        status = compare(folder / "reference", folder / "split", args.tolerance, args.json)
        return status if outcome.report.passed else 1


def _compare_curves(args: argparse.Namespace, split: Split | Sharded) -> int:
    from tangram.align.curves import CURVE_TOLERANCE, compare_curves

    curves = compare_curves(
        args.hf, [split], args.steps, lr=args.lr, batch_file=args.batch, micro_batch_size=args.micro_batch_size or 1, plugins=args.plugin
    )
    tolerance = CURVE_TOLERANCE if args.tolerance is None else args.tolerance
    for name, losses in curves.losses.items():
        print(f"{name}: loss {losses[0]:.6f} to {losses[-1]:.6f} in {len(losses)} steps")
    # NaN is not within a tolerance either.
    passed = curves.worst <= tolerance
    print(f"{'passed' if passed else 'FAILED'}: largest relative deviation {curves.worst:.2e}, tolerance {tolerance:g}")
    _write_json(args.json, {**curves.as_dict(), "passed": passed, "tolerance": tolerance})
    return 0 if passed else 1


def _write_json(path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_sharded(args: argparse.Namespace) -> Sharded:
    """What the options say of the fsdp2 backend.

    Raises:
        ConfigError: an option of the megatron backend, or no processes.
    """
    from tangram.align.sharded import Sharded

    foreign = [name for name in MEGATRON_OPTIONS if getattr(args, name[2:].replace("-", "_")) is not None]
    if foreign:
        raise ConfigError(f"{', '.join(foreign)}: not of --backend fsdp2; say how many processes with --nproc, and the rest as parallel.key=value")
    if args.dtype == "fp16":
        raise ConfigError("--dtype fp16: the fsdp2 backend has no loss scaling, without which fp16 loses gradients; use bf16 or fp32")
    if args.nproc is not None and args.nproc < 1:
        raise ConfigError(f"--nproc {args.nproc} must be at least 1")
    return Sharded(processes=args.nproc or 1, settings=args.settings)


def read_split(args: argparse.Namespace) -> Split:
    """The split of the megatron backend that the options describe.

    Raises:
        ConfigError: a list that cannot be read, sizes below 1, or an option of the fsdp2 backend.
    """
    if args.nproc is not None or args.settings:
        given = " ".join([*(["--nproc"] if args.nproc is not None else []), *args.settings])
        raise ConfigError(f"{given}: of --backend fsdp2, and the backend is megatron; add it, or use --tp, --pp, --vpp, --dp and --ep")
    from tangram.align.task import Split
    from tangram.config.parsing import parse_section
    from tangram.placement.topology import layer_grid

    vision, text = read_layers(args.vit_pp_layers, "--vit-pp-layers"), read_layers(args.llm_pp_layers, "--llm-pp-layers")
    grid = layer_grid(text, "--llm-pp-layers") if text is not None else ((0,),)
    experts = args.ep or 1
    copies = {"data": args.dp or experts // gcd(experts, args.cp or 1), "expert": experts, "balance": bool(args.balance)}
    sizes = {"tensor": args.tp or 1, "vision_tensor": args.vision_tp, "pipeline": args.pp or len(grid[0]), "virtual": args.vpp or len(grid), **copies}
    for name in ("--tp", "--vision-tp", "--cp", "--pp", "--vpp", "--dp", "--ep", "--ulysses-degree"):
        value = getattr(args, name[2:].replace("-", "_"))
        if value is not None and value < 1:
            raise ConfigError(f"{name} {value} must be at least 1")
    if (args.cp or 1) == 1 and (args.cp_algo or args.ulysses_degree):
        given = f"--cp-algo {args.cp_algo}" if args.cp_algo else f"--ulysses-degree {args.ulysses_degree}"
        raise ConfigError(f"{given} has no effect without context-parallel ranks; give --cp of 2 or more, or leave it out")
    if args.balance and copies["data"] == 1:
        raise ConfigError("--balance has nothing to deal out with one copy of the model; give --dp of 2 or more, or leave it out")
    shared = {"context": args.cp or 1, "context_algo": args.cp_algo or "ulysses", "ulysses": args.ulysses_degree}
    return parse_section(
        Split, {**sizes, **shared, "sequence_parallel": bool(args.sp), "vit_pp_layers": vision, "llm_pp_layers": text}, "tangram align"
    )


def read_layers(text: str | None, option: str) -> list[Any] | None:
    """A list of layers as users write it: ``[1,3]``, ``1,3`` or ``[[1,1],[1,1]]``.

    Raises:
        ConfigError: it is none of these.
    """
    if text is None:
        return None
    try:
        value = json.loads(text if text.lstrip().startswith("[") else f"[{text}]")
    except json.JSONDecodeError:
        raise ConfigError(f"{option} {text!r} is no list of layers; write [1,3], or [[1,1],[1,1]] with virtual stages") from None
    return list(value)
