"""The delta: one model_id in the config, one norm in the table."""

from tangram.families.qwen2_vl.config import from_hf_config as qwen2_vl_config
from tangram.families.qwen2_vl.tensors import norm
from tangram.families.qwen2_vl.tensors import tensor_table as qwen2_vl_table


def from_hf_config(hf):
    model = qwen2_vl_config(hf)
    encoder = model.image_encoder
    vision = encoder.vision_encoder.model_copy(update={"model_id": "toy_vit"})
    return model.model_copy(update={"model_id": "toy_vl", "image_encoder": encoder.model_copy(update={"vision_encoder": vision})})


def tensor_table(model, padded_vocab):
    width = model.image_encoder.vision_encoder.hidden_size
    extra = norm("image_encoder.encoder.post_layernorm", "model.visual.post_norm", width, "LayerNorm", "vision", "last")
    return [*qwen2_vl_table(model, padded_vocab), *extra]
