"""A model that Tangram does not ship: Qwen2-VL with one more LayerNorm after the last vision block, as CLIP has."""

from dataclasses import replace

from tangram.families import register_family
from tangram.families.qwen2_vl import QWEN2_VL
from tangram.models.registry import register_component
from tangram.models.specs import layer_spec

from .component import ToyVisionEncoder
from .tensors import from_hf_config, tensor_table

register_component("toy_vit", ToyVisionEncoder, layer_spec)
register_family(replace(QWEN2_VL, name="toy_vl", model_ids=(), from_hf_config=from_hf_config, tensor_table=tensor_table))
