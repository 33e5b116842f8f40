"""``tangram data mock``: a dataset of made-up pictures and text."""

from __future__ import annotations

import argparse

from tangram.cli.parser import Parser

HELP = "write a dataset of made-up pictures and text of an exact length"
EPILOG = """\
DIR gets mock_data_pic_num_P_textlen_T.json and a folder of pictures. Train on it with these keys of data.json:
  basic_parameters: {dataset: DIR/mock_data_pic_num_P_textlen_T.json, dataset_dir: DIR}
"""
NUMBERS = (
    ("num_samples", "samples (512)"),
    ("num_pics", "pictures of each sample (10)"),
    ("pic_width", "pixels (1024)"),
    ("pic_height", "pixels (1024)"),
    ("text_length", "tokens of question and answer together, without those of template and pictures; a quarter is the answer's (16384)"),
    ("seed", "the same seed gives the same files (0)"),
)


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command to the parser of ``tangram data``."""
    from tangram.cli.data import spellings

    parser = subparsers.add_parser("mock", help=HELP, description=HELP, epilog=EPILOG)
    parser.add_argument(*spellings("save_dir"), metavar="DIR", required=True, help="folder to write into")
    parser.add_argument(*spellings("tokenizer_path"), metavar="HF", required=True, help="folder with tokenizer.json, which counts the tokens")
    for name, meaning in NUMBERS:
        parser.add_argument(*spellings(name), type=int, metavar="N", help=meaning)
    parser.add_argument("--overwrite", action="store_true", help="replace a dataset of the same name")


def run(args: argparse.Namespace) -> int:
    """Write the dataset and say how to train on it."""
    from tangram.config.parsing import parse_section
    from tangram.data.mock import MockOptions, write_mock

    names = [name for name, _ in NUMBERS]
    given = {name: getattr(args, name) for name in (*names, "save_dir", "tokenizer_path", "overwrite") if getattr(args, name) is not None}
    options = parse_section(MockOptions, given, "mock", names={name: f"--{name}" for name in names})
    mock = write_mock(options)
    pictures = f"{options.num_pics} pictures each, {mock.pictures} different"
    print(f"{mock.dataset}: {options.num_samples} samples, {pictures}, {options.text_length} tokens of text")
    print(f"data.json: basic_parameters.dataset {mock.dataset}, basic_parameters.dataset_dir {options.save_dir}")
    return 0
