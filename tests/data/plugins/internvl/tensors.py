"""The tensor table: canonical names are those of transformers' ``InternVLForConditionalGeneration``."""

from tangram.families.qwen2_vl.tensors import linear, norm, text_rules
from tangram.placement.table import GroupedQKV, Replicated, Rule, Source, Split

TOWER, PROJECTOR = "model.vision_tower", "model.multi_modal_projector"
LAYER = f"{TOWER}.encoder.layer.{{i}}"
LOCAL, LOCAL_PROJECTOR = "image_encoder.encoder", "image_encoder.projector"
LOCAL_LAYER = f"{LOCAL}.decoder.layers.{{i}}"


def tensor_table(model, padded_vocab: int) -> list[Rule]:
    vision, projector = model.image_encoder.vision_encoder, model.image_encoder.vision_projector
    width, ffn, side = vision.hidden_size, vision.ffn_hidden_size, vision.patch_size
    attention, embeddings = f"{LOCAL_LAYER}.self_attention", f"{TOWER}.embeddings"

    def whole(local: str, source: str, shape: tuple[int, ...], place: str = "first", init: str = "normal") -> Rule:
        return Rule(local, (Source(source, shape),), Replicated(), "vision", place, init)

    qkv = {f"{LAYER}.attention.{x}_proj": width for x in "qkv"}
    return [
        whole(f"{LOCAL}.class_token", f"{embeddings}.cls_token", (1, 1, width)),
        whole(f"{LOCAL}.position_embeddings.weight", f"{embeddings}.position_embeddings", (1, vision.positions, width)),
        whole(f"{LOCAL}.conv1.weight", f"{embeddings}.patch_embeddings.projection.weight", (width, vision.in_channels, side, side)),
        whole(f"{LOCAL}.conv1.bias", f"{embeddings}.patch_embeddings.projection.bias", (width,), init="zeros"),
        *norm(f"{LOCAL_LAYER}.input_layernorm", f"{LAYER}.layernorm_before", width, "LayerNorm", "vision"),
        *linear(f"{attention}.linear_qkv", qkv, width, GroupedQKV(vision.num_attention_heads), "vision", bias=True),
        *linear(f"{attention}.linear_proj", {f"{LAYER}.attention.projection_layer": width}, width, Split(1), "vision", bias=True),
        whole(f"{LOCAL_LAYER}.self_attn_bda.weight", f"{LAYER}.lambda_1", (width,), "layer", "ones"),
        *norm(f"{LOCAL_LAYER}.pre_mlp_layernorm", f"{LAYER}.layernorm_after", width, "LayerNorm", "vision"),
        *linear(f"{LOCAL_LAYER}.mlp.linear_fc1", {f"{LAYER}.mlp.fc1": ffn}, width, Split(0), "vision", bias=True),
        *linear(f"{LOCAL_LAYER}.mlp.linear_fc2", {f"{LAYER}.mlp.fc2": width}, ffn, Split(1), "vision", bias=True),
        whole(f"{LOCAL_LAYER}.mlp_bda.weight", f"{LAYER}.lambda_2", (width,), "layer", "ones"),
        *norm(f"{LOCAL_PROJECTOR}.layernorm", f"{PROJECTOR}.layer_norm", projector.input_size, "LayerNorm", "vision", "last"),
        *mlp_linear("1", projector.ffn_hidden_size, projector.input_size, Split(0)),
        *mlp_linear("2", projector.hidden_size, projector.ffn_hidden_size, Split(1)),
        *text_rules(model.text_decoder, padded_vocab),
    ]


def mlp_linear(number: str, rows: int, width: int, layout) -> list[Rule]:
    local, source = f"{LOCAL_PROJECTOR}.encoder.linear_fc{number}", f"{PROJECTOR}.linear_{number}"
    return linear(local, {source: rows}, width, layout, "vision", bias=True, place="last")
