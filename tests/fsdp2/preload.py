"""What the server of ``tests.fsdp2.ranks`` imports once."""

import importlib
import warnings

MODULES = (
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "accelerate",
    "transformers.models.qwen2_vl.modeling_qwen2_vl",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe",
    "tangram.training.entry",
    "tangram.backends.fsdp2.engine",
    "tangram.align.reference",
    "tangram.align.default_batch",
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for name in MODULES:
        importlib.import_module(name)
