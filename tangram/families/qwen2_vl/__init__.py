"""Qwen2-VL (2B, 7B, 72B)."""

from tangram.families.base import Family
from tangram.families.qwen2_vl.config import from_hf_config
from tangram.families.qwen2_vl.positions import rope_index
from tangram.families.qwen2_vl.tensors import tensor_table
from tangram.families.qwen2_vl.tiny import write_tiny

QWEN2_VL = Family(
    name="qwen2_vl",
    architecture="Qwen2VLForConditionalGeneration",
    model_ids=("qwen2vl",),
    from_hf_config=from_hf_config,
    tensor_table=tensor_table,
    rope_index=rope_index,
    template="qwen2vl",
    tiny=write_tiny,
    backends=("megatron", "fsdp2"),
    from_hub=((r"^visual\.", "model.visual."), (r"^model\.(?!language_model\.|visual\.)", "model.language_model.")),
    to_hub=((r"^model\.visual\.", "visual."), (r"^model\.language_model\.", "model.")),
)
