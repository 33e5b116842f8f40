"""Weights as training checkpoints, and back: between Hugging Face or ``mp_rank`` directories and DCP directories with canonical keys.

A checkpoint that is written here stands at step 0 and has no optimizer state; a run loads it with ``no_load_optim``. Plain
``torch.distributed.checkpoint.load`` reads it as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tangram.checkpoints.conversion import Conversion, ModelSplit, check_family, open_hf, open_mm, require_directory, whole
from tangram.checkpoints.convert import hf_conversion, shards_like
from tangram.checkpoints.dcp_manifest import MANIFEST_FILE, TRACKER_FILE, Manifest, iteration_folder
from tangram.checkpoints.dcp_planner import write
from tangram.checkpoints.dcp_reader import DCPReader
from tangram.checkpoints.dcp_source import source_entries
from tangram.checkpoints.derived_readers import CastReader, SubsetReader, lossy_cast
from tangram.checkpoints.options import DCPToHF, HFToDCP, MMToDCP, ParallelOptions
from tangram.checkpoints.publish import require_new
from tangram.checkpoints.reader import CanonicalReader
from tangram.checkpoints.resume import resumable_directory
from tangram.checkpoints.writing import WritePlan, WriteSettings
from tangram.config.model import ModelConfig
from tangram.config.sources import read_hf_config
from tangram.errors import CheckpointError, ConfigError
from tangram.families.base import Family, get_family
from tangram.placement.blocks import canonical_shapes

LARGEST_PIECE = 2 * 64 * 2**20
"""Bytes that are held at a time: a piece, and its copy while it is cast."""


def prepare_hf_to_dcp(options: HFToDCP, families: tuple[str, ...] = (), dtype: torch.dtype | None = None) -> Conversion:
    """From a Hugging Face directory to a training checkpoint.

    Raises:
        TangramError: a directory of another family, damaged or incomplete weights, or an output directory with content.
    """
    out = Path(options.dcp_dir)
    require_new(out)
    hf = open_hf(options.hf_dir, families, "--hf_dir")
    split = ModelSplit.build(hf.family, hf.model, ParallelOptions())
    hf.check_model(split.shapes)

    def check_head() -> None:
        if hf.repeats_head:
            assert hf.embedding is not None
            hf.check_head((0, 0), split.shapes[hf.embedding])

    return _dcp_conversion(out, split, SubsetReader(hf, split.shapes), hf.config, dtype, check_head)


def prepare_mm_to_dcp(options: MMToDCP, families: tuple[str, ...] = (), dtype: torch.dtype | None = None) -> Conversion:
    """From an ``mp_rank`` directory to a training checkpoint.

    Raises:
        TangramError: as ``prepare_hf_to_dcp``, and where the manifest is of another split.
    """
    out = Path(options.dcp_dir)
    require_new(out)
    cfg = options.cfg
    opened = open_mm(cfg.mm_dir, families, cfg.parallel_config, cfg.common_model_config, cfg.hf_config.hf_dir)
    if opened.split.vit_only:
        raise ConfigError(f"{cfg.mm_dir}: holds the vision encoder alone, and a training checkpoint holds the whole model")
    return _dcp_conversion(out, opened.split, opened.reader, opened.hf_config, dtype)


def _dcp_conversion(
    out: Path,
    split: ModelSplit,
    source: CanonicalReader,
    hf_config: dict[str, Any],
    dtype: torch.dtype | None,
    before: Callable[[], None] | None = None,
) -> Conversion:
    """A conversion that writes a training checkpoint; ``before`` are checks that read weights."""
    note = lossy_cast(source, dtype)
    if dtype is not None:
        source = CastReader(source, dtype)
    manifest = Manifest.imported(split.family.name, split.topology, hf_config)
    total = sum(info.nbytes for info in source.names().values())

    def execute(settings: WriteSettings) -> int:
        if before is not None:
            before()
        with resumable_directory(out) as journal, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is meant
            journal.begin(None)  # one file, which nothing can be kept of
            folder = journal.folder / iteration_folder(manifest.step)
            folder.mkdir()
            write(folder, source_entries(source, settings.progress), source.names(), {})
            (folder / MANIFEST_FILE).write_text(manifest.text(), encoding="utf-8")
            (journal.folder / TRACKER_FILE).write_text(f"{manifest.step}\n", encoding="utf-8")
        return total

    def plan(_: WriteSettings) -> WritePlan:
        return WritePlan(((f"{iteration_folder(manifest.step)}/__0_0.distcp", total),), LARGEST_PIECE)

    return Conversion(out, source, plan, execute, split.tied, None, note)


def prepare_dcp_to_hf(
    options: DCPToHF, families: tuple[str, ...] = (), dtype: torch.dtype | None = None, max_shard_bytes: int | None = None
) -> Conversion:
    """The parameters of a training checkpoint as a Hugging Face directory; optimizer state stays behind.

    Raises:
        TangramError: no checkpoint, a damaged one, one of another family or without all of the model's tensors, or one that knows no Hugging
            Face config.
    """
    out = Path(options.save_dir)
    require_new(out)
    reader = DCPReader(options.load_dir)
    family = get_family(reader.manifest.family)
    check_family(family, families, f"--load_dir: {options.load_dir}")
    assets = options.model_assets_dir
    if assets is not None:
        require_directory(assets, "--model_assets_dir")
    config = dict(reader.manifest.hf_config) or (read_hf_config(assets) if assets else {})
    if not config:
        raise CheckpointError(f"{reader.folder}: holds no Hugging Face config (the run had none); name one that has with --model_assets_dir")
    model = check_whole(reader, family, config)
    source: CanonicalReader = reader
    shards = None
    if assets is not None:
        shards, source = shards_like(Path(assets), family, source, cut=max_shard_bytes is None)
    tied = not model.text_decoder.untie_embeddings_and_output_weights
    return hf_conversion(out, family, source, config, Path(assets) if assets else None, shards, max_shard_bytes, dtype, tied=tied)


def check_whole(reader: DCPReader, family: Family, config: dict[str, Any]) -> ModelConfig:
    """Check that a training checkpoint holds exactly the tensors of the model that a Hugging Face config describes.

    Raises:
        CheckpointError: as ``DCPReader.check_model``.
        ConfigError: the config cannot be represented.
    """
    model = family.from_hf_config(config)
    reader.check_model(canonical_shapes(family.tensor_table(model, model.text_decoder.vocab_size), whole(model)))
    return model
