"""LLaVA-1.5 (7B): a CLIP tower with learned positions, two linears, and a Llama decoder.

Both backends train it.
"""

from tangram.families.base import Family
from tangram.families.llava.config import LlavaConfig, from_hf_config
from tangram.families.llava.positions import rope_index
from tangram.families.llava.tensors import tensor_table
from tangram.families.llava.tiny import write_tiny

LLAVA = Family(
    name="llava",
    architecture="LlavaForConditionalGeneration",
    model_ids=("llava1.5",),
    from_hf_config=from_hf_config,
    tensor_table=tensor_table,
    config_class=LlavaConfig,
    rope_index=rope_index,
    template="llava",
    tiny=write_tiny,
    backends=("megatron", "fsdp2"),
    # The tower's keys are vision_tower.vision_model.* on the hub and in transformers 4.57, vision_tower.* in files of 5.x.
    from_hub=(
        (r"^(model\.)?vision_tower\.(vision_model\.)?", "model.vision_tower."),
        (r"^multi_modal_projector\.", "model.multi_modal_projector."),
        (r"^language_model\.model\.", "model.language_model."),
        (r"^language_model\.lm_head\.", "lm_head."),
    ),
    to_hub=(
        (r"^model\.vision_tower\.", "vision_tower.vision_model."),
        (r"^model\.multi_modal_projector\.", "multi_modal_projector."),
        (r"^model\.language_model\.", "language_model.model."),
        (r"^lm_head\.", "language_model.lm_head."),
    ),
)
