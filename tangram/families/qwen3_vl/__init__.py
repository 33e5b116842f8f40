"""Qwen3-VL (2B, 4B, 8B, 32B): Qwen2-VL with a learned position table, DeepStack, head norms and interleaved mRoPE."""

from dataclasses import replace

from tangram.families.qwen2_vl import QWEN2_VL
from tangram.families.qwen3_vl.config import Qwen3VLConfig, from_hf_config
from tangram.families.qwen3_vl.positions import rope_index
from tangram.families.qwen3_vl.tensors import tensor_table
from tangram.families.qwen3_vl.tiny import write_tiny

QWEN3_VL = replace(
    QWEN2_VL,
    name="qwen3_vl",
    architecture="Qwen3VLForConditionalGeneration",
    model_ids=("qwen3vl",),
    config_class=Qwen3VLConfig,
    from_hf_config=from_hf_config,
    tensor_table=tensor_table,
    rope_index=rope_index,
    template="qwen3_vl_nothink",
    tiny=write_tiny,
    from_hub=(),
    to_hub=(),
    backends=("megatron", "fsdp2"),
)
