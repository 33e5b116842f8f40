"""What the server of ``tests.ranks`` and ``tests.trial`` imports once; its children are forked with all of it in place."""

from __future__ import annotations

import gc
import importlib
import warnings

from tangram.config.parsing import Section

MODULES = (
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel.schedules",
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


def _build_schemas(section: type[Section]) -> None:
    """Those of pydantic, which otherwise each rank builds for itself when it first reads a run file."""
    section.model_rebuild()
    for each in section.__subclasses__():
        _build_schemas(each)


_build_schemas(Section)
gc.collect()
# Else each rank's first collections walk, and so copy, all that was imported.
gc.freeze()
