"""From one split of an ``mp_rank`` directory to another."""

from __future__ import annotations

from pathlib import Path

import torch

from tangram.checkpoints.conversion import Conversion, ModelSplit, OpenedMM, mm_conversion, open_mm
from tangram.checkpoints.derived_readers import CastReader, SubsetReader, lossy_cast
from tangram.checkpoints.options import ResplitOptions
from tangram.checkpoints.publish import require_new
from tangram.checkpoints.reader import CanonicalReader
from tangram.errors import ConfigError


def prepare_resplit(options: ResplitOptions, families: tuple[str, ...] = (), dtype: torch.dtype | None = None) -> Conversion:
    """Any split and form to any other; tied copies and vocabulary padding are made anew for the target.

    Args:
        families: that the directory may be of; empty: any.
        dtype: cast floating-point tensors to it; None: every tensor keeps its own.

    Raises:
        TangramError: bad options, a directory of another family or split than its manifest says, damaged or incomplete weights, a split that
            does not fit, or an output directory with content.
    """
    out = Path(options.target_dir)
    require_new(out)
    opened = open_mm(
        options.source_dir,
        families,
        options.source_parallel_config,
        options.source_common_model_config,
        options.hf_config.hf_dir,
        "--cfg.source_dir",
    )
    source_split = opened.split
    if source_split.vit_only and not options.save_vit_only:
        raise ConfigError(f"{options.source_dir}: holds the vision encoder alone; add --cfg.save_vit_only true to write that")
    form = options.common_model_config.enable_canonical_hf_struct
    target = ModelSplit.build(
        source_split.family,
        source_split.model,
        options.target_parallel_config,
        canonical_form=source_split.canonical_form if form is None else form,
        vit_only=options.save_vit_only,
    )
    source: CanonicalReader = SubsetReader(opened.reader, target.shapes)
    note = lossy_cast(source, dtype)
    if dtype is not None:
        source = CastReader(source, dtype)
    return mm_conversion(out, target, source, opened.hf_config, fingerprint(opened), note)


def fingerprint(opened: OpenedMM) -> str:
    """What the weights were first converted from; of a directory without a manifest, its path."""
    manifest = opened.directory.manifest
    return manifest.source if manifest is not None else str(opened.directory.path.resolve())
