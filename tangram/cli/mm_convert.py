"""``mm-convert CONVERTER COMMAND``: weights between Hugging Face, ``mp_rank`` and training-checkpoint directories."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from tangram.checkpoints.look_options import Inspect, LookOptions, Verify
from tangram.checkpoints.lora_options import LoraMerge, LoraToHF, LoraToMM
from tangram.checkpoints.options import CommandOptions, CopyOptions, DCPToHF, HFToDCP, HFToMM, MMToDCP, MMToHF, Resplit
from tangram.cli import inspect, verify
from tangram.cli.parser import Parser
from tangram.cli.section_options import SectionOptions, UsageError
from tangram.errors import suggest
from tangram.guard import guarded

if TYPE_CHECKING:
    from tangram.checkpoints.conversion import Conversion
    from tangram.checkpoints.writing import WriteSettings

CONVERTERS: dict[str, tuple[str, ...]] = {
    "Qwen2VLConverter": ("qwen2_vl",),
    "Qwen2_5_VLConverter": ("qwen2_5_vl",),
    "Qwen3VLConverter": ("qwen3_vl", "qwen3_vl_moe"),
    "Qwen3VLMegatronConverter": ("qwen3_vl", "qwen3_vl_moe"),
    "LlavaConverter": ("llava",),
    "HFConverter": (),
}
"""Converter names, as MindSpeed-MM has them, and the families each is for; which one it is, config.json says. None: any family."""


def _hf_to_mm(options: Any, families: tuple[str, ...], dtype: Any) -> Conversion:
    from tangram.checkpoints.convert import prepare_hf_to_mm

    return prepare_hf_to_mm(options.cfg, families, dtype)


def _mm_to_hf(options: Any, families: tuple[str, ...], dtype: Any) -> Conversion:
    from tangram.checkpoints.convert import prepare_mm_to_hf

    return prepare_mm_to_hf(options.cfg, families, dtype, options.max_shard_bytes)


def _resplit(options: Any, families: tuple[str, ...], dtype: Any) -> Conversion:
    from tangram.checkpoints.resplit import prepare_resplit

    return prepare_resplit(options.cfg, families, dtype)


def _hf_to_dcp(options: Any, families: tuple[str, ...], dtype: Any) -> Conversion:
    from tangram.checkpoints.dcp_convert import prepare_hf_to_dcp

    return prepare_hf_to_dcp(options, families, dtype)


def _mm_to_dcp(options: Any, families: tuple[str, ...], dtype: Any) -> Conversion:
    from tangram.checkpoints.dcp_convert import prepare_mm_to_dcp

    return prepare_mm_to_dcp(options, families, dtype)


def _dcp_to_hf(options: Any, families: tuple[str, ...], dtype: Any) -> Conversion:
    from tangram.checkpoints.dcp_convert import prepare_dcp_to_hf

    return prepare_dcp_to_hf(options, families, dtype, options.max_shard_bytes)


def _lora_hf_to_mm(options: Any, families: tuple[str, ...], dtype: Any) -> Conversion:
    from tangram.checkpoints.lora import prepare_lora_to_mm

    return prepare_lora_to_mm(options.cfg, families, dtype)


def _lora_mm_to_hf(options: Any, families: tuple[str, ...], dtype: Any) -> Conversion:
    from tangram.checkpoints.lora import prepare_lora_to_hf

    return prepare_lora_to_hf(options.cfg, families, dtype)


def _lora_merge(options: Any, families: tuple[str, ...], dtype: Any) -> Conversion:
    from tangram.checkpoints.lora import prepare_lora_merge

    return prepare_lora_merge(options.cfg, families, dtype, options.max_shard_bytes)


class Command(NamedTuple):
    """What a command does, its options, and how it is prepared."""

    help: str
    section: type[CommandOptions]
    prepare: Callable[[Any, tuple[str, ...], Any], Conversion]


COMMANDS = {
    "hf_to_mm": Command("write the mp_rank directory of a split from Hugging Face weights", HFToMM, _hf_to_mm),
    "mm_to_hf": Command("write a Hugging Face directory from an mp_rank directory", MMToHF, _mm_to_hf),
    "resplit": Command("write an mp_rank directory at another split, or in the other form", Resplit, _resplit),
    "hf_to_dcp": Command("write a training checkpoint from Hugging Face weights", HFToDCP, _hf_to_dcp),
    "mm_to_dcp": Command("write a training checkpoint from an mp_rank directory", MMToDCP, _mm_to_dcp),
    "dcp_to_hf": Command("write a Hugging Face directory from a training checkpoint", DCPToHF, _dcp_to_hf),
    "lora_hf_to_mm": Command("write the mp_rank directory of a LoRA adapter from a PEFT directory", LoraToMM, _lora_hf_to_mm),
    "lora_mm_to_hf": Command("write a PEFT directory from the mp_rank directory of a LoRA adapter", LoraToHF, _lora_mm_to_hf),
    "lora_merge": Command("write a Hugging Face directory with a LoRA adapter added to its weights", LoraMerge, _lora_merge),
}


class Look(NamedTuple):
    """A command that writes nothing: what it does, its options, and what runs it and returns the exit status."""

    help: str
    section: type[LookOptions]
    show: Callable[[Any, tuple[str, ...], bool], int]


LOOKS = {"verify": Look(verify.HELP, Verify, verify.show_verdict), "inspect": Look(inspect.HELP, Inspect, inspect.show_inspection)}
"""Also without a converter: ``mm-convert verify FIRST SECOND``, ``mm-convert inspect DIR``; faults of theirs have status 2."""
WORDS: dict[str, Command | Look] = {**COMMANDS, **LOOKS}
HELP = ("-h", "--help")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``mm-convert``; returns the exit status.

    0: done. 1: weights, directories or a split that cannot be converted, and full disks; what verify or inspect found wrong. 2: a command
    line that cannot be understood, and what verify or inspect cannot read. 130:
    interrupted. Every fault is one line on standard error, and leaves no output directory.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in LOOKS:
        return guarded("mm-convert", lambda: _look_alone(words[0], words[1:]))
    request: Request | None = None

    def read() -> int:
        nonlocal request
        request = _read(words)
        return 0

    status = guarded("mm-convert", read)
    if status or request is None:
        return status
    command, options, families = request
    if isinstance(command, Look):
        return guarded("mm-convert", lambda: command.show(options.cfg, families, options.json_))
    return guarded("mm-convert", lambda: _convert(command, options, families), user_fault=1)


def _look_alone(name: str, words: Sequence[str]) -> int:
    module = {"verify": verify, "inspect": inspect}[name]
    parser = Parser(prog=f"mm-convert {name}", description=module.HELP, epilog=module.EPILOG)
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(words)))


Request = tuple[Command | Look, Any, tuple[str, ...]]
"""Command, its options, and the families that the converter is for."""


def _read(words: list[str]) -> Request | None:
    """Understand the command line, or print what it asks for and return None."""
    converter, name, rest = _leading_words(words)
    if name is None:
        print(_help(converter))
        return None
    command = WORDS[name]
    parsed = SectionOptions(f"mm-convert {converter} {name}", command.help, command.section).parse(rest)
    if parsed.options is None:
        print(parsed.print)
        return None
    from tangram.families.plugins import load_plugins

    load_plugins(parsed.options.plugin)
    return command, parsed.options, _families_of(str(converter))


def _leading_words(words: list[str]) -> tuple[str | None, str | None, list[str]]:
    """Converter, command and what follows; a command of None asks for help."""
    if words and words[0] in HELP:
        return None, None, []
    if not words:
        raise UsageError(f"converter and command are missing; {_choices()}")
    converter, *rest = words
    if not any(word == "--plugin" or word.startswith(("--plugin=", "--config")) for word in rest):
        _families_of(converter)
    if rest and rest[0] in HELP:
        return converter, None, []
    if not rest:
        raise UsageError(f"command is missing after {converter}; one of {', '.join(WORDS)}")
    if rest[0] not in WORDS:
        raise UsageError(f"unknown command {rest[0]!r}{suggest(rest[0], WORDS)}; one of {', '.join(WORDS)}")
    return converter, rest[0], rest[1:]


def _choices() -> str:
    return f"converters: {', '.join(CONVERTERS)}; commands: {', '.join(WORDS)}; see mm-convert --help"


def _families_of(converter: str) -> tuple[str, ...]:
    """Families that a converter is for; the name of a registered family is a converter too.

    Raises:
        UsageError: no such converter.
    """
    if converter in CONVERTERS:
        return CONVERTERS[converter]
    from tangram.families.base import family_names, get_family

    if converter not in family_names():
        raise UsageError(f"unknown converter {converter!r}{suggest(converter, (*CONVERTERS, *family_names()))}; {_choices()}")
    return (get_family(converter).name,)


def _help(converter: str | None) -> str:
    lines = [f"usage: mm-convert {converter or 'CONVERTER'} COMMAND [options]", ""]
    if converter is None:
        lines += ["Convert weights between Hugging Face, mp_rank and training-checkpoint directories.", "", "converters:"]
        lines += [f"  {name:26}{' and '.join(families) or 'any family, also one of a plug-in'}" for name, families in CONVERTERS.items()]
        lines += ["  FAMILY                    the name of a family, also one of a plug-in (--plugin PATH)", ""]
    lines += ["commands:", *(f"  {name:14}{command.help}" for name, command in WORDS.items())]
    lines += ["", "without a converter: mm-convert verify FIRST SECOND, mm-convert inspect DIR"] if converter is None else []
    return "\n".join([*lines, "", f"options of a command: mm-convert {converter or 'CONVERTER'} COMMAND --help"])


def _convert(command: Command, options: CommandOptions, families: tuple[str, ...]) -> int:
    from tangram.checkpoints.conversion import torch_dtype
    from tangram.checkpoints.writing import WriteSettings
    from tangram.cli.progress import byte_progress

    conversion = command.prepare(options, families, torch_dtype(options.dtype_name))
    settings = WriteSettings(workers=options.workers) if isinstance(options, CopyOptions) else WriteSettings()
    if options.dry_run:
        print(_plan(conversion, settings))
        return 0
    with byte_progress(conversion.out.name) as progress:
        report = conversion.write(replace(settings, progress=progress))
    print(report)
    return 0


def _plan(conversion: Conversion, settings: WriteSettings) -> str:
    plan = conversion.plan(settings)
    lines = [f"{conversion.out}: would write {len(plan.files)} weight file(s), {plan.bytes} bytes, with at most {plan.peak_memory} bytes of memory"]
    lines += [f"  {size:>16} bytes  {name}" for name, size in plan.files]
    return "\n".join([*lines, *([f"  {conversion.note}"] if conversion.note else [])])


if __name__ == "__main__":
    sys.exit(main())
