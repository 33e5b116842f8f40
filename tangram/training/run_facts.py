"""What decides the numbers of a run, as plain data: what two runs must have alike to be compared."""

from __future__ import annotations

import platform
from typing import Any

import torch
import torch.distributed as dist

from tangram.checkpoints.dcp_manifest import RunFacts, package_versions
from tangram.config.run import RunConfig
from tangram.platform import current

SAID_BY_SPLIT = {
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "context_parallel_size"),
    *("vit_pp_layers", "llm_pp_layers", "context_parallel_algo", "ulysses_degree_in_cp", "expert_model_parallel_size", "sequence_parallel"),
    *("vision_tensor_model_parallel_size", "encoder_dp_balance"),
}
OF_THE_MACHINE = {"distributed_timeout_minutes", "distributed_backend"}


def facts_of(run: RunConfig, known: RunFacts, batch: int, callbacks: list[str]) -> dict[str, Any]:
    """For the file that ``RanksFile`` writes.

    Args:
        batch: samples of a step, over all ranks.
        callbacks: what an entry script has put in the place of Tangram's own, by name.
    """
    device = current().name
    return {
        "backend": run.backend,
        "split": {**known.split(), **_ways(run)},
        "world_size": dist.get_world_size(),
        "seed": known.seed,
        "data": known.dataset_fingerprint,
        "tokenizer": known.tokenizer_hash,
        "family": known.family,
        "global_batch_size": batch,
        "dtype": run.training.dtype,
        "loss_type": run.training.loss_type,
        "schedule": dict(known.schedule),
        "callbacks": callbacks,
        "platform": device,
        "device": platform.machine() if device == "cpu" else getattr(torch, device).get_device_name(),
        "packages": package_versions(),
    }


def _ways(run: RunConfig) -> dict[str, Any]:
    """How ranks work together, as far as sizes do not say it and it is not the default."""
    return run.parallel.model_dump(mode="json", exclude_defaults=True, exclude=SAID_BY_SPLIT | OF_THE_MACHINE)
