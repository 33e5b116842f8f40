"""Qwen3-VL with experts (30B-A3B, 235B-A22B): Qwen3-VL with a router and experts in every text layer."""

from dataclasses import replace

from tangram.families.qwen3_vl import QWEN3_VL
from tangram.families.qwen3_vl_moe.config import Qwen3VLMoeConfig, from_hf_config
from tangram.families.qwen3_vl_moe.tensors import tensor_table
from tangram.families.qwen3_vl_moe.tiny import write_tiny

QWEN3_VL_MOE = replace(
    QWEN3_VL,
    name="qwen3_vl_moe",
    architecture="Qwen3VLMoeForConditionalGeneration",
    model_ids=("qwen3vl_moe",),
    config_class=Qwen3VLMoeConfig,
    from_hf_config=from_hf_config,
    tensor_table=tensor_table,
    tiny=write_tiny,
    backends=("megatron", "fsdp2"),
)
