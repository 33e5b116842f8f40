"""Puts weights into a freshly built engine, from wherever the run says."""

from __future__ import annotations

from tangram.backends.engine import RunnableEngine
from tangram.checkpoints.kinds import kind_of_weights
from tangram.checkpoints.load_hf import load_hf
from tangram.checkpoints.manager import CheckpointManager
from tangram.checkpoints.mp_rank import MMDirectory, load_mm
from tangram.config.hf_compare import compare_with_hf
from tangram.training.logs import LOGGER
from tangram.training.loop import Progress


def put_weights(engine: RunnableEngine, manager: CheckpointManager) -> Progress:
    """Fill the engine's parameters, and its optimizer where a training checkpoint is resumed.

    Returns:
        Where the run starts.

    Raises:
        ConfigError: model.json differs from the Hugging Face config of the weights.
        CheckpointError, PlacementError: weights that are missing, left over, damaged or of another model or split.
    """
    run = engine.run
    placements = [placement for _, placement, _ in engine.chunks]
    parameters = [held for _, _, held in engine.chunks]
    described = run.model.config
    if run.model.hf_dir is not None and described is not None:
        compare_with_hf(described, run.model.hf_dir)
    if run.model.load is None:
        engine.random_weights(run.training.seed)
        LOGGER.info("weights: random, from seed %d (the same at every split)", run.training.seed)
        return Progress()
    kind = kind_of_weights(run.model.load, "load", run.model.load_format)
    if kind == "training checkpoint":
        resumed = manager.load(run.model.load)
        LOGGER.info("resumed %s at step %d, %d samples consumed", run.model.load, resumed.step, resumed.consumed_samples)
        skipped, empty = (resumed.extra.get(key, 0) for key in ("skipped", "skipped_samples"))
        return Progress(resumed.step, resumed.consumed_samples, skipped, empty)
    if kind == "Hugging Face directory":
        if described is not None:
            compare_with_hf(described, run.model.load)
        with_hf = engine.hf_directory(run.model.load)
        report = load_hf(with_hf, placements, parameters, cast=run.model.cast_weights, shapes=engine.canonical_shapes)
    else:
        directory, cast = MMDirectory(run.model.load), run.model.cast_weights
        report = load_mm(directory, placements, parameters, engine.topology, run.described, cast=cast, padded_vocab=run.padded_vocab)
    engine.weights_changed()
    LOGGER.info("weights: %s %s: %s", kind, run.model.load, report)
    return Progress()
