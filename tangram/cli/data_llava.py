"""``tangram data llava-to-mllm``: LLaVA's instruction file to the form that training reads."""

from __future__ import annotations

import argparse
from pathlib import Path

from tangram.cli.parser import Parser

HELP = "convert LLaVA-Instruct-150K to records with messages and images"
EPILOG = """\
The images of COCO 2017 lie in COCO/train2017. A missing image ends the conversion and nothing is written, unless --skip-missing is given.
The whole set has 157,712 records and 118,287 images: --expect-images 118287 finds an archive that was not unpacked completely.
"""
SHOWN = 5


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command to the parser of ``tangram data``."""
    from tangram.cli.data import spellings

    parser = subparsers.add_parser("llava-to-mllm", help=HELP, description=HELP, epilog=EPILOG)
    paths = (
        ("coco_path", "COCO", "./data/COCO2017", "folder that holds train2017"),
        ("llava_json_path", "FILE", "./data/llava_instruct_150k.json", "LLaVA's file: a JSON array, or one record a line"),
        ("output_json_path", "OUT", "./data/mllm_format_llava_instruct_data.json", "file to write"),
    )
    for name, metavar, default, meaning in paths:
        parser.add_argument(*spellings(name), type=Path, default=Path(default), metavar=metavar, help=f"{meaning} ({default})")
    parser.add_argument(*spellings("expect_images"), type=int, metavar="N", help="fail unless train2017 holds exactly N image files")
    parser.add_argument(*spellings("skip_missing"), action="store_true", help="leave out records without their image; OUT.skipped.jsonl lists them")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT")


def run(args: argparse.Namespace) -> int:
    """Convert and say what was found."""
    from tangram.cli.progress import byte_progress
    from tangram.data.llava import SKIPPED_ENDING, convert_llava

    with byte_progress("convert") as progress:
        report = convert_llava(
            args.coco_path,
            args.llava_json_path,
            args.output_json_path,
            expect_images=args.expect_images,
            skip_missing=args.skip_missing,
            overwrite=args.overwrite,
            progress=progress,
        )
    print(
        f"{args.output_json_path}: {report.written} of {report.records} records, {report.without_image} of them without an image; "
        f"{report.images_used} of {report.images_found} image files are used"
    )
    if report.skipped:
        print(f"skipped={report.skipped}: their images are missing; {args.output_json_path}{SKIPPED_ENDING} lists them")
    if report.miscounted:
        some = ", ".join(map(str, report.miscounted[:SHOWN])) + (", ..." if len(report.miscounted) > SHOWN else "")
        print(f"{len(report.miscounted)} records hold another number of <image> than images, which training refuses: {some}")
    return 0
