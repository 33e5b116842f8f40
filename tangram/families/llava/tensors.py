"""The tensor table of LLaVA-1.5: a CLIP tower and two linears before Qwen2-VL's text decoder without biases.

Source of the names on the right: transformers 5.x ``LlavaForConditionalGeneration.state_dict()``; of the local names: megatron-core's
``CLIPViTModel`` (``conv1``, ``class_token``, ``position_embeddings``, ``ln_pre``, ``decoder.layers``, ``ln_post``). Its class token has
the shape ``[1, 1, hidden_size]``, here as in Hugging Face ``[hidden_size]``.

The tower is kept whole: the layers after ``vision_feature_layer`` and the last norm take no part in a forward pass, but belong to the
checkpoint.
"""

from __future__ import annotations

from tangram.config.model import ModelConfig, VisionProjectorConfig
from tangram.families.llava.config import ClipEncoderConfig
from tangram.families.qwen2_vl.tensors import linear, norm, text_rules
from tangram.placement.table import GroupedQKV, Replicated, Rule, Source, Split

TOWER = "model.vision_tower"
TOWER_LAYER = "model.vision_tower.encoder.layers.{i}"
LOCAL_TOWER = "image_encoder.encoder"
LOCAL_TOWER_LAYER = "image_encoder.encoder.decoder.layers.{i}"


def tower_rules(vision: ClipEncoderConfig) -> list[Rule]:
    """Embeddings, norms before and after, and layers of CLIP."""
    width, ffn, bias, kind = vision.hidden_size, vision.ffn_hidden_size, vision.add_bias_linear, vision.normalization
    attention, embeddings = f"{LOCAL_TOWER_LAYER}.self_attention", f"{TOWER}.embeddings"
    qkv = {f"{TOWER_LAYER}.self_attn.{x}_proj": width for x in "qkv"}
    whole = {
        "conv1.weight": Source(f"{embeddings}.patch_embedding.weight", (width, vision.in_channels, vision.patch_size, vision.patch_size)),
        "position_embeddings.weight": Source(f"{embeddings}.position_embedding.weight", (vision.positions, width)),
        **({"class_token": Source(f"{embeddings}.class_embedding", (width,))} if vision.add_class_token else {}),
    }
    return [
        *(Rule(f"{LOCAL_TOWER}.{local}", (source,), Replicated(), "vision", "first") for local, source in whole.items()),
        *norm(f"{LOCAL_TOWER}.ln_pre", f"{TOWER}.pre_layrnorm", width, kind, "vision", "first"),
        *norm(f"{LOCAL_TOWER_LAYER}.input_layernorm", f"{TOWER_LAYER}.layer_norm1", width, kind, "vision"),
        *linear(f"{attention}.linear_qkv", qkv, width, GroupedQKV(vision.num_attention_heads), "vision", bias=bias),
        *linear(f"{attention}.linear_proj", {f"{TOWER_LAYER}.self_attn.out_proj": width}, width, Split(1), "vision", bias=bias),
        *norm(f"{LOCAL_TOWER_LAYER}.pre_mlp_layernorm", f"{TOWER_LAYER}.layer_norm2", width, kind, "vision"),
        *linear(f"{LOCAL_TOWER_LAYER}.mlp.linear_fc1", {f"{TOWER_LAYER}.mlp.fc1": ffn}, width, Split(0), "vision", bias=bias),
        *linear(f"{LOCAL_TOWER_LAYER}.mlp.linear_fc2", {f"{TOWER_LAYER}.mlp.fc2": width}, ffn, Split(1), "vision", bias=bias),
        *norm(f"{LOCAL_TOWER}.ln_post", f"{TOWER}.post_layernorm", width, kind, "vision", "last"),
    ]


def projector_rules(projector: VisionProjectorConfig) -> list[Rule]:
    """Two linears, on the stage with the tower's last layer."""
    local, source, bias = "image_encoder.projector.encoder.linear_fc", "model.multi_modal_projector.linear_", projector.add_bias_linear
    ffn = projector.ffn_hidden_size
    return [
        *linear(f"{local}1", {f"{source}1": ffn}, projector.input_size, Split(0), "vision", bias=bias, place="last"),
        *linear(f"{local}2", {f"{source}2": projector.hidden_size}, ffn, Split(1), "vision", bias=bias, place="last"),
    ]


def tensor_table(model: ModelConfig, padded_vocab: int) -> list[Rule]:
    """The whole of LLaVA-1.5.

    Args:
        padded_vocab: rows of the word embedding over all tensor-parallel ranks.
    """
    rules = text_rules(model.text_decoder, padded_vocab)
    if model.image_encoder is None:
        return rules
    vision = model.image_encoder.vision_encoder
    assert isinstance(vision, ClipEncoderConfig)
    return [*tower_rules(vision), *projector_rules(model.image_encoder.vision_projector), *rules]
