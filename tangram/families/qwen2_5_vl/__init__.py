"""Qwen2.5-VL (3B, 7B, 32B, 72B): Qwen2-VL with RMSNorm, a gated MLP and windows in the vision encoder."""

from dataclasses import replace

from tangram.families.qwen2_5_vl.config import from_hf_config
from tangram.families.qwen2_5_vl.positions import rope_index
from tangram.families.qwen2_5_vl.tensors import tensor_table
from tangram.families.qwen2_5_vl.tiny import write_tiny
from tangram.families.qwen2_vl import QWEN2_VL

QWEN2_5_VL = replace(
    QWEN2_VL,
    name="qwen2_5_vl",
    architecture="Qwen2_5_VLForConditionalGeneration",
    model_ids=("qwen2_5vl", "qwen2.5vl"),
    from_hf_config=from_hf_config,
    tensor_table=tensor_table,
    rope_index=rope_index,
    tiny=write_tiny,
)
