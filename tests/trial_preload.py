"""What the server of ``tests.trial`` imports once; its children are forked with all of it in place."""

from __future__ import annotations

import importlib
import warnings

MODULES = (
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "PIL.Image",
    "tokenizers",
    "torch.distributed.checkpoint",
    "tangram.cli.main",
    "tangram.models.vlm",
    "tangram.training.entry",
    "tangram.training.pretrain",
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    importlib.import_module("tangram.backends.megatron.cpu").adapt()
    for name in MODULES:
        importlib.import_module(name)
