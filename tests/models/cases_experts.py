"""What ranks do in ``test_experts``: one launch, every split of a small text model with experts in it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.moe.experts import SequentialMLP

from tangram.align.assemble import write_pieces
from tangram.backends.megatron.engine import MegatronEngine
from tangram.checkpoints.hf_directory import HFDirectory
from tangram.checkpoints.load_hf import fill_all
from tangram.config.data import BasicParameters, DataConfig, DatasetParam, PreprocessParameters
from tangram.config.parsing import read_mapping
from tangram.config.run import ModelSource, ParallelConfig, RunConfig, TrainingConfig
from tangram.families.base import get_family
from tangram.models.grouped_experts import GroupedExperts

Settings = dict[str, Any]


def micro_batches(lengths: Sequence[int] = (17, 31, 8, 24), seed: int = 0, token: int | None = None) -> list[dict[str, Any]]:
    """Text of the given lengths, the last two tokens of each padding; the first three have no label. ``token``: all are this one."""
    generator, made = torch.Generator().manual_seed(seed), []
    for length in lengths:
        ids = torch.randint(0, 500, (1, length), generator=generator) if token is None else torch.full((1, length), token)
        mask, labels = torch.ones_like(ids), ids.clone()
        mask[:, -2:], labels[:, :3], labels[:, -2:] = 0, -100, -100
        made.append({"input_ids": ids, "labels": labels, "attention_mask": mask, "position_ids": torch.arange(length).expand(3, 1, length)})
    return made


def engine_of(hf: Path, parallel: Settings, text: Settings, **training: Any) -> MegatronEngine:
    """The text side of the model at a split, with the weights of ``hf``."""
    family = get_family("qwen3_vl_moe")
    model = family.from_hf_config(read_mapping(hf / "config.json"))
    model = model.model_copy(update={"image_encoder": None, "text_decoder": model.text_decoder.model_copy(update=text)})
    files = DatasetParam(
        preprocess_parameters=PreprocessParameters(model_name_or_path=str(hf)), basic_parameters=BasicParameters(dataset="given as tensors")
    )
    known = {"lr": 1e-3, "weight_decay": 0.0, "loss_type": "per_token_loss", "lr_decay_style": "constant", **training}
    run = RunConfig(
        model=ModelSource(config=model), data=DataConfig(dataset_param=files), parallel=ParallelConfig(**parallel), training=TrainingConfig(**known)
    )
    engine = MegatronEngine(run)
    fill_all([c.placement for c in engine.chunks], [c.parameters for c in engine.chunks], HFDirectory(hf, family), str(hf), cast=True)
    engine.weights_changed()
    return engine


def grouped(engine: MegatronEngine) -> bool:
    """Whether its experts run as one product."""
    (kind,) = {type(module) for model in engine.models for module in model.modules() if isinstance(module, SequentialMLP)}
    return kind is GroupedExperts


def observe(hf: Path, out: Path, rank: int, cases: dict[str, Settings]) -> dict[str, tuple[float, float, float | None]]:
    """Loss, gradient norm and balance of each case; gradients go to ``out``. No model outlives its engine."""
    found, models = {}, []
    for name, case in cases.items():
        engine = engine_of(hf, case.get("parallel", {}), case.get("text", {}), **case.get("training", {}))
        assert grouped(engine) == case.get("parallel", {}).get("moe_grouped_gemm", False)
        mine = micro_batches(token=case.get("token"))[engine.data_parallel_rank :: engine.data_parallel_size]
        result = engine.forward_backward(mine)
        write_pieces(engine.canonical_gradients(), out / f"{name}.{rank}")
        found[name] = (result.loss, engine.step(0.0).grad_norm, result.load_balancing)
        models += [weakref.ref(model) for model in engine.models]
        del engine
    gc.collect()
    assert not any(model() for model in models)
    return found


def train(hf: Path, parallel: Settings, steps: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses of AdamW steps from random weights, and afterwards this rank's parameters by canonical name and place."""
    engine = engine_of(hf, parallel, {})
    engine.random_weights(7)
    losses = []
    for step in range(steps):
        mine = micro_batches(seed=step)[engine.data_parallel_rank :: engine.data_parallel_size]
        losses.append(engine.forward_backward(mine).loss)
        engine.step(1e-3)
    return losses, {f"{piece.name} {piece.start}": piece.local.numpy().copy() for piece in engine.canonical_parameters()}


def drawn(hf: Path, parallel: Settings) -> dict[str, float]:
    """Sums of random weights, by canonical name and expert."""
    engine = engine_of(hf, parallel, {})
    engine.random_weights(7)
    return {f"{piece.name} {piece.start}": float(piece.local.double().sum()) for piece in engine.canonical_parameters()}


def everything(hf: Path, out: Path, cases: dict[str, Settings], curves: dict[str, Settings]) -> dict[str, Any]:
    import torch.distributed as dist

    observed = observe(hf, out, _rank(), cases)
    trained = {name: train(hf, parallel, 20) for name, parallel in curves.items()}
    random = {name: drawn(hf, parallel) for name, parallel in curves.items()}
    dist.barrier()
    return {"observed": observed, "trained": trained, "random": random}


def _rank() -> int:
    import os

    return int(os.environ["RANK"])
