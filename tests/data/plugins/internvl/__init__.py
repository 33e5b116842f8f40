"""InternVL (InternVL3 in the form of transformers), a model that Tangram does not ship: a ViT with layer scale, pixel shuffle, a Qwen2 decoder."""

from dataclasses import replace

from tangram.families import register_family
from tangram.families.llava import LLAVA
from tangram.models.registry import register_component

from .component import InternEncoder, NormedProjector, scaled_layer_spec
from .config import InternVLModelConfig, from_hf_config
from .tensors import tensor_table
from .tiny import write_tiny

register_component("intern_vit", InternEncoder, scaled_layer_spec)
register_component("intern_mlp", NormedProjector)
register_family(
    replace(
        LLAVA,
        name="internvl",
        architecture="InternVLForConditionalGeneration",
        model_ids=(),
        from_hf_config=from_hf_config,
        tensor_table=tensor_table,
        config_class=InternVLModelConfig,
        template=None,
        tiny=write_tiny,
        backends=("megatron",),
        to_hub=((r"^model\.vision_tower\.", "vision_tower."), *LLAVA.to_hub[1:]),
    )
)
