"""What ranks do in the tests of chunk loss on the megatron backend."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tangram.align.batch import micro_batches
from tangram.backends.megatron.engine import MegatronEngine
from tangram.checkpoints.hf_directory import HFDirectory
from tangram.checkpoints.load_hf import load_hf
from tangram.config.data import BasicParameters, DataConfig, DatasetParam, PreprocessParameters
from tangram.config.run import FeaturesConfig, ModelSource, ParallelConfig, RunConfig, TrainingConfig
from tangram.config.sources import model_from_hf
from tests.largest import largest


def errors(hf: Path, batch_file: Path, loss_type: str) -> dict[str, Any]:
    """Loss of the batch on two tensor-parallel ranks, and the largest relative error of this rank's gradients."""
    model, stored = model_from_hf(hf), torch.load(batch_file)
    run = RunConfig(
        model=ModelSource(config=model, hf_dir=str(hf), load=str(hf)),
        data=DataConfig(
            dataset_param=DatasetParam(
                preprocess_parameters=PreprocessParameters(model_name_or_path=str(hf)), basic_parameters=BasicParameters(dataset="data.json")
            )
        ),
        parallel=ParallelConfig(tensor_model_parallel_size=2, make_vocab_size_divisible_by=64),
        features=FeaturesConfig(enable_chunk_loss=True, chunk_size=5),
        training=TrainingConfig(micro_batch_size=2, lr=1e-3, loss_type=loss_type),  # type: ignore[arg-type]
    )
    engine = MegatronEngine(run)
    load_hf(
        HFDirectory(hf),
        [placement for _, placement, _ in engine.chunks],
        [held for _, _, held in engine.chunks],
        cast=True,
        shapes=engine.canonical_shapes,
    )
    engine.weights_changed()
    result = engine.forward_backward(micro_batches(stored["batch"], model, 2))
    return {"loss": result.loss, "error": _worst(engine, stored["gradients"])}


def _worst(engine: MegatronEngine, wanted: Mapping[str, torch.Tensor]) -> float:
    worst = 0.0
    for tensor in engine.canonical_gradients():
        whole = wanted[tensor.name]
        part = whole[tuple(slice(a, a + n) for a, n in zip(tensor.start, tensor.local.shape, strict=True))]
        worst = largest([worst, float((tensor.local - part).norm() / (whole.norm() if whole.any() else 1.0))])
    return worst
