"""Conversion between Hugging Face directories and ``mp_rank`` directories."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tangram.checkpoints.export import export_hf
from tangram.checkpoints.hf_directory import TIED_HEAD, HFDirectory
from tangram.checkpoints.manifest import MANIFEST, check_manifest, make_manifest, manifest_text
from tangram.checkpoints.mp_rank import TRACKER, MMDirectory, write_ranks
from tangram.checkpoints.options import ParallelOptions, ToHFOptions, ToMMOptions
from tangram.checkpoints.publish import require_new
from tangram.checkpoints.reader import AliasReader, CanonicalReader
from tangram.checkpoints.resume import resumable_directory
from tangram.config.model import ModelConfig
from tangram.errors import ConfigError
from tangram.families.base import get_family
from tangram.placement.proof import prove_table
from tangram.placement.table import Rule, Shape, padded_vocabulary
from tangram.placement.topology import Topology


@dataclass(frozen=True)
class ConversionReport:
    """What was written where."""

    out: Path
    tensors: int
    """Canonical tensors."""
    bytes: int
    """Of tensors in the output; replicas and tied copies count each time."""
    ranks: int
    tied: bool

    def __str__(self) -> str:
        tied = ", output layer tied to the embedding" if self.tied else ""
        return f"{self.out}: {self.tensors} tensors, {self.ranks} model-parallel rank(s), {self.bytes} bytes{tied}"


def convert_hf_to_mm(options: ToMMOptions, family: str) -> ConversionReport:
    """Write the ``mp_rank`` directory of a split.

    Raises:
        TangramError: bad options, a directory of another family, damaged or incomplete weights, a split that does not fit, or an output
            directory with content. Nothing is published then.
    """
    out = Path(options.mm_dir)
    require_new(out)
    hf = open_hf(options, family)
    topology = _topology(options.parallel_config, hf.model)
    padded, table, shapes = _prove(hf, topology, options.parallel_config.make_vocab_size_divisible_by)
    hf.check_model(shapes)
    if hf.repeats_head:
        assert hf.embedding is not None
        hf.check_head((0, 0), shapes[hf.embedding])
    manifest = make_manifest(
        family=family,
        topology=topology,
        model=hf.model,
        padded_vocab=padded,
        dtypes=[hf.names()[name].dtype for name in shapes],
        hf_config=hf.config,
        source=hf.fingerprint,
    )
    with resumable_directory(out) as journal:
        written = write_ranks(journal.folder / "release", table, topology, hf, journal=journal)
        (journal.folder / MANIFEST).write_text(manifest_text(manifest), encoding="utf-8")
        (journal.folder / TRACKER).write_text("release")
    return ConversionReport(out, len(shapes), written, topology.model_parallel_size, hf.embedding is not None)


def convert_mm_to_hf(options: ToHFOptions, family: str) -> ConversionReport:
    """Write a Hugging Face directory from an ``mp_rank`` directory, in the shards of ``hf_dir`` and with its other files.

    Raises:
        TangramError: as ``convert_hf_to_mm``, and where the manifest is of another split or model.
    """
    out = Path(options.save_hf_dir)
    require_new(out)
    hf = open_hf(options, family)
    mm = MMDirectory(options.mm_dir)
    topology = _topology(_fill_from_manifest(options.parallel_config, mm), hf.model)
    padded, table, shapes = _prove(hf, topology, options.parallel_config.make_vocab_size_divisible_by)
    if mm.manifest is not None:
        check_manifest(mm.manifest, topology, hf.model, str(mm.path), padded)
    source: CanonicalReader = mm.canonical(table, topology, shapes)
    if hf.repeats_head:
        assert hf.embedding is not None
        source = AliasReader(source, {TIED_HEAD: hf.embedding})
    written = export_hf(source, out, hf.family, files_from=hf.path, hf_config=hf.config, shards=hf.shards)
    return ConversionReport(out, len(shapes), written, topology.model_parallel_size, hf.embedding is not None)


def open_hf(options: ToMMOptions, family: str) -> HFDirectory:
    """The Hugging Face directory, of the family that the converter is for."""
    path = options.hf_config.hf_dir
    if not Path(path).is_dir():
        raise ConfigError(f"--cfg.hf_config.hf_dir: {path}: no such directory")
    hf = HFDirectory(path)
    if hf.family.name != get_family(family).name:
        raise ConfigError(
            f"--cfg.hf_config.hf_dir: {path} is a {hf.family.name} model but the converter is for {family}; use the {hf.family.name} converter"
        )
    return hf


def _topology(parallel: ParallelOptions, model: ModelConfig) -> Topology:
    encoder = model.image_encoder
    return Topology.build(
        vision_layers=encoder.vision_encoder.num_layers if encoder else 0,
        text_layers=model.text_decoder.num_layers,
        tensor=parallel.tp_size or 1,
        vit_pp_layers=parallel.vit_pp_layers,
        llm_pp_layers=parallel.llm_pp_layers,
    )


def _fill_from_manifest(parallel: ParallelOptions, mm: MMDirectory) -> ParallelOptions:
    """Options that were not given are the manifest's."""
    if mm.manifest is None:
        return parallel
    return parallel.model_copy(
        update={
            "tp_size": parallel.tp_size or mm.manifest.tensor_parallel,
            "llm_pp_layers": parallel.llm_pp_layers or mm.manifest.llm_pp_layers,
            "vit_pp_layers": parallel.vit_pp_layers or mm.manifest.vit_pp_layers,
        }
    )


def _prove(hf: HFDirectory, topology: Topology, divisible_by: int) -> tuple[int, list[Rule], dict[str, Shape]]:
    """Padded vocabulary, table and canonical shapes, after the proof that the split covers the model."""
    padded = padded_vocabulary(hf.model.text_decoder.vocab_size, topology.tensor, divisible_by)
    table = hf.family.tensor_table(hf.model, padded)
    return padded, table, prove_table(table, topology)
