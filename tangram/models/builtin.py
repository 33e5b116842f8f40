"""Registers the components that ship with Tangram; importing it twice is harmless."""

from tangram.models.clip import ClipEncoder
from tangram.models.projector import MLPProjector, Projector
from tangram.models.registry import register_component
from tangram.models.specs import layer_spec
from tangram.models.text import Qwen3TextDecoder, TextDecoder
from tangram.models.vision import Qwen3VisionEncoder, VisionEncoder

register_component("qwen2vit", VisionEncoder, layer_spec)
register_component("qwen2_5_vit", VisionEncoder, layer_spec)
register_component("qwen3vit", Qwen3VisionEncoder, layer_spec)
register_component("lnmlp", Projector)
register_component("qwen2lm", TextDecoder, layer_spec)
register_component("qwen2_5_lm", TextDecoder, layer_spec)
register_component("qwen3_lm", Qwen3TextDecoder, layer_spec)
register_component("clip", ClipEncoder, layer_spec)
register_component("mlp", MLPProjector)
register_component("llama", TextDecoder, layer_spec)
