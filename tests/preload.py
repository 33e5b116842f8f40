"""What the server of ``tests.ranks`` and ``tests.trial`` imports once; its children are forked with all of it in place."""

from __future__ import annotations

import gc
import importlib
import warnings

MODULES = (
    "megatron.core.models.backends",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.transformer.multi_token_prediction",
    "PIL.Image",
    "tokenizers",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "accelerate",
    "transformers.models.llava.modeling_llava",
    "transformers.models.qwen2_vl.modeling_qwen2_vl",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe",
    "tangram.align.default_batch",
    "tangram.align.reference",
    "tangram.backends.fsdp2.engine",
    "tangram.backends.megatron.communicator",
    "tangram.backends.megatron.gradients",
    "tangram.cli.main",
    "tangram.models.builtin",
    "tangram.models.vlm",
    "tangram.training.entry",
    "tangram.training.pretrain",
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    importlib.import_module("tangram.backends.megatron.cpu").adapt()
    for name in MODULES:
        importlib.import_module(name)
    importlib.import_module("tangram.config.parsing").build_validators()
# Collections of garbage in a child leave all this alone.
gc.collect()
gc.freeze()
