"""Conversion between Hugging Face directories and ``mp_rank`` directories."""

from __future__ import annotations

from pathlib import Path

import torch

from tangram.checkpoints.conversion import Conversion, ConversionReport, ModelSplit, mm_conversion, open_hf, open_mm
from tangram.checkpoints.derived_readers import CastReader, OverlayReader, SubsetReader, lossy_cast
from tangram.checkpoints.export import LARGEST_SHARD, export_hf, plan_hf
from tangram.checkpoints.hf_directory import INDEX, TIED_HEAD, HFDirectory
from tangram.checkpoints.language_model import LanguageModel
from tangram.checkpoints.options import ToHFOptions, ToMMOptions
from tangram.checkpoints.publish import require_new
from tangram.checkpoints.reader import AliasReader, CanonicalReader
from tangram.checkpoints.writing import WritePlan, WriteSettings
from tangram.errors import ConfigError
from tangram.families.base import Family
from tangram.placement.blocks import check_names


def convert_hf_to_mm(options: ToMMOptions, *families: str) -> ConversionReport:
    """Write the ``mp_rank`` directory of a split; see ``prepare_hf_to_mm``."""
    return prepare_hf_to_mm(options, families).write()


def convert_mm_to_hf(options: ToHFOptions, *families: str) -> ConversionReport:
    """Write a Hugging Face directory from an ``mp_rank`` directory; see ``prepare_mm_to_hf``."""
    return prepare_mm_to_hf(options, families).write()


def prepare_hf_to_mm(options: ToMMOptions, families: tuple[str, ...] = (), dtype: torch.dtype | None = None) -> Conversion:
    """From a Hugging Face directory to the ``mp_rank`` directory of a split.

    Args:
        families: that the directory may be of; empty: any.
        dtype: cast floating-point tensors to it; None: every tensor keeps its own.

    Raises:
        TangramError: bad options, a directory of another family, damaged or incomplete weights, a split that does not fit, or an output
            directory with content.
    """
    out = Path(options.mm_dir)
    require_new(out)
    hf = open_hf(options.hf_config.hf_dir, families)
    split = ModelSplit.build(
        hf.family,
        hf.model,
        options.parallel_config,
        canonical_form=options.common_model_config.enable_canonical_hf_struct,
        vit_only=options.save_vit_only,
    )
    shapes, source, fingerprint = split.shapes, SubsetReader(hf, _wanted(hf, split)), hf.fingerprint
    text: LanguageModel | None = None
    if options.language_model is not None:
        text = LanguageModel(options.language_model, split)
        fingerprint = f"{fingerprint} {text.fingerprint}"
    whole: CanonicalReader = OverlayReader(source, text.reader) if text is not None else source
    note = lossy_cast(whole, dtype)
    if dtype is not None:
        whole = CastReader(whole, dtype)

    def check_heads() -> None:
        if text is not None:
            text.check_head()
        elif hf.repeats_head and not split.vit_only:
            assert hf.embedding is not None
            hf.check_head((0, 0), shapes[hf.embedding])

    return mm_conversion(out, split, whole, hf.config, fingerprint, note, before=check_heads)


def _wanted(hf: HFDirectory, split: ModelSplit) -> list[str]:
    """Names to take from the files, which must hold exactly the model; for the vision encoder alone they may lack the text decoder."""
    if not split.vit_only:
        hf.check_model(split.shapes)
        return list(split.shapes)
    text = {*split.component_names("text"), TIED_HEAD}
    check_names([name for name in hf.names() if name not in text], list(split.shapes), str(hf.path))
    return list(split.shapes)


def prepare_mm_to_hf(
    options: ToHFOptions, families: tuple[str, ...] = (), dtype: torch.dtype | None = None, max_shard_bytes: int | None = None
) -> Conversion:
    """From an ``mp_rank`` directory to a Hugging Face directory with the other files of ``hf_dir``.

    Args:
        max_shard_bytes: largest weight file; None: the files of ``hf_dir``, or where it holds no weights files of at most ``LARGEST_SHARD``.

    Raises:
        TangramError: as ``prepare_hf_to_mm``, and where the manifest is of another split or model.
    """
    out = Path(options.save_hf_dir)
    require_new(out)
    hf_dir = options.hf_config.hf_dir
    opened = open_mm(options.mm_dir, families, options.parallel_config, options.common_model_config, hf_dir)
    split = opened.split
    if split.vit_only and not options.save_vit_only:
        raise ConfigError(f"{options.mm_dir}: holds the vision encoder alone; add --cfg.save_vit_only true to write that")
    source: CanonicalReader = opened.reader
    if options.save_vit_only:
        source = SubsetReader(source, split.component_names("vision"))
    shards, source = shards_like(Path(hf_dir), split.family, source, cut=max_shard_bytes is None and not options.save_vit_only)
    return hf_conversion(
        out, split.family, source, opened.hf_config, Path(hf_dir), shards, max_shard_bytes, dtype, tied=split.tied, ranks=split.ranks
    )


def shards_like(folder: Path, family: Family, source: CanonicalReader, *, cut: bool) -> tuple[dict[str, list[str]] | None, CanonicalReader]:
    """Shards of a directory with weights, and ``source`` with a tied head under its second name where the directory repeats it."""
    if not (folder / INDEX).is_file() and not any(folder.glob("*.safetensors")):
        return None, source
    hf = HFDirectory(folder, family)
    if hf.repeats_head and hf.embedding in source.names():
        assert hf.embedding is not None
        source = AliasReader(source, {TIED_HEAD: hf.embedding})
    return (hf.shards if cut else None), source


def hf_conversion(
    out: Path,
    family: Family,
    source: CanonicalReader,
    hf_config: dict[str, object],
    files_from: Path | None,
    shards: dict[str, list[str]] | None,
    max_shard_bytes: int | None,
    dtype: torch.dtype | None,
    *,
    tied: bool,
    ranks: int | None = None,
) -> Conversion:
    """A conversion that writes a Hugging Face directory; arguments as ``export_hf`` has them."""
    largest = max_shard_bytes or LARGEST_SHARD

    def execute(settings: WriteSettings) -> int:
        return export_hf(
            source,
            out,
            family,
            files_from=files_from,
            hf_config=hf_config,
            shards=shards,
            max_shard_bytes=largest,
            dtype=dtype,
            settings=settings,
        )

    def plan(settings: WriteSettings) -> WritePlan:
        return plan_hf(source, family, shards=shards, max_shard_bytes=largest, dtype=dtype, settings=settings)

    return Conversion(out, source, plan, execute, tied, ranks, lossy_cast(source, dtype))
