"""The tensor table of Qwen2-VL.

Source of the names on the right: transformers ``Qwen2VLForConditionalGeneration.state_dict()``; of the local names and layouts: the
public ``mp_rank`` checkpoints of MindSpeed-MM.
"""

from __future__ import annotations

from tangram.config.model import ModelConfig, TextDecoderConfig, VisionEncoderConfig
from tangram.placement.table import Component, GatedSplit, GroupedQKV, Layout, PackedQKV, Replicated, Rule, Source, Split, Vocabulary

VISION = "model.visual"
VISION_LAYER = "model.visual.blocks.{i}"
LOCAL_VISION_LAYER = "image_encoder.encoder.blocks.layers.{i}"
TEXT = "model.language_model"
TEXT_LAYER = "model.language_model.layers.{i}"
LOCAL_TEXT_LAYER = "text_decoder.decoder.layers.{i}"


def linear(
    local: str, sources: dict[str, int], width: int, layout: Layout, component: Component, *, bias: bool, place: str = "layer"
) -> list[Rule]:
    """Rules of a linear: ``sources`` maps each canonical module to its output size; ``width`` is the input size.

    The bias of a linear split by rows is split alike; of one split by columns it is replicated.
    """
    weight = Rule(f"{local}.weight", tuple(Source(f"{s}.weight", (rows, width)) for s, rows in sources.items()), layout, component, place)  # type: ignore[arg-type]
    if not bias:
        return [weight]
    bias_layout = layout if layout.axis == 0 else Replicated()
    return [
        weight,
        Rule(f"{local}.bias", tuple(Source(f"{s}.bias", (rows,)) for s, rows in sources.items()), bias_layout, component, place, init="zeros"),  # type: ignore[arg-type]
    ]


def norm(local: str, source: str, width: int, kind: str | None, component: Component, place: str = "layer") -> list[Rule]:
    """Rules of an RMSNorm (weight) or a LayerNorm (weight and bias); none for no norm."""
    if kind is None:
        return []
    rules = [Rule(f"{local}.weight", (Source(f"{source}.weight", (width,)),), Replicated(), component, place, init="ones")]  # type: ignore[arg-type]
    if kind == "LayerNorm":
        rules.append(Rule(f"{local}.bias", (Source(f"{source}.bias", (width,)),), Replicated(), component, place, init="zeros"))  # type: ignore[arg-type]
    return rules


def vision_mlp(vision: VisionEncoderConfig) -> list[Rule]:
    """Two plain linears, ``fc1`` and ``fc2``."""
    width, ffn, bias = vision.hidden_size, vision.ffn_hidden_size, vision.add_bias_linear
    return [
        *linear(f"{LOCAL_VISION_LAYER}.mlp.linear_fc1", {f"{VISION_LAYER}.mlp.fc1": ffn}, width, Split(0), "vision", bias=bias),
        *linear(f"{LOCAL_VISION_LAYER}.mlp.linear_fc2", {f"{VISION_LAYER}.mlp.fc2": width}, ffn, Split(1), "vision", bias=bias),
    ]


def vision_rules(model: ModelConfig, mlp: list[Rule]) -> list[Rule]:
    """Patch embedding, blocks with the given MLP rules, and the merger."""
    assert model.image_encoder is not None
    vision, projector = model.image_encoder.vision_encoder, model.image_encoder.vision_projector
    width, bias = vision.hidden_size, vision.add_bias_linear
    kernel = (vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    attention = f"{LOCAL_VISION_LAYER}.self_attention"
    qkv = PackedQKV(vision.num_attention_heads)
    return [
        Rule(
            "image_encoder.encoder.patch_embed.proj.weight",
            (Source(f"{VISION}.patch_embed.proj.weight", (width, vision.in_channels, *kernel)),),
            Replicated(),
            "vision",
            "first",
        ),
        *norm(f"{LOCAL_VISION_LAYER}.input_layernorm", f"{VISION_LAYER}.norm1", width, vision.normalization, "vision"),
        *linear(f"{attention}.linear_qkv", {f"{VISION_LAYER}.attn.qkv": 3 * width}, width, qkv, "vision", bias=bias),
        *linear(f"{attention}.linear_proj", {f"{VISION_LAYER}.attn.proj": width}, width, Split(1), "vision", bias=bias),
        *norm(f"{LOCAL_VISION_LAYER}.pre_mlp_layernorm", f"{VISION_LAYER}.norm2", width, vision.normalization, "vision"),
        *mlp,
        *norm("image_encoder.projector.layernorm", f"{VISION}.merger.ln_q", width, projector.normalization, "vision", "last"),
        *linear(
            "image_encoder.projector.encoder.linear_fc1",
            {f"{VISION}.merger.mlp.0": projector.ffn_hidden_size},
            projector.ffn_hidden_size,
            Split(0),
            "vision",
            bias=projector.add_bias_linear,
            place="last",
        ),
        *linear(
            "image_encoder.projector.encoder.linear_fc2",
            {f"{VISION}.merger.mlp.2": projector.hidden_size},
            projector.ffn_hidden_size,
            Split(1),
            "vision",
            bias=projector.add_bias_linear,
            place="last",
        ),
    ]


def text_rules(text: TextDecoderConfig, padded_vocab: int) -> list[Rule]:
    """Embedding, decoder layers, final norm and head of Qwen2."""
    width, ffn, head_dim = text.hidden_size, text.ffn_hidden_size, text.head_dim
    queries, keys = text.num_attention_heads * head_dim, text.num_query_groups * head_dim
    attention = f"{LOCAL_TEXT_LAYER}.self_attention"
    projections = {f"{TEXT_LAYER}.self_attn.{x}_proj": size for x, size in (("q", queries), ("k", keys), ("v", keys))}
    gated = {f"{TEXT_LAYER}.mlp.{x}_proj": ffn for x in ("gate", "up")}
    embedding = Source(f"{TEXT}.embed_tokens.weight", (text.vocab_size, width))
    head = Source("lm_head.weight", (text.vocab_size, width)) if text.untie_embeddings_and_output_weights else embedding
    return [
        Rule("text_decoder.embedding.word_embeddings.weight", (embedding,), Vocabulary(padded_vocab), "text", "first"),
        *norm(f"{LOCAL_TEXT_LAYER}.input_layernorm", f"{TEXT_LAYER}.input_layernorm", width, text.normalization, "text"),
        *linear(f"{attention}.linear_qkv", projections, width, GroupedQKV(text.num_query_groups), "text", bias=text.add_qkv_bias),
        *linear(f"{attention}.linear_proj", {f"{TEXT_LAYER}.self_attn.o_proj": width}, queries, Split(1), "text", bias=text.add_bias_linear),
        *norm(f"{LOCAL_TEXT_LAYER}.pre_mlp_layernorm", f"{TEXT_LAYER}.post_attention_layernorm", width, text.normalization, "text"),
        *linear(f"{LOCAL_TEXT_LAYER}.mlp.linear_fc1", gated, width, GatedSplit(), "text", bias=text.add_bias_linear),
        *linear(f"{LOCAL_TEXT_LAYER}.mlp.linear_fc2", {f"{TEXT_LAYER}.mlp.down_proj": width}, ffn, Split(1), "text", bias=text.add_bias_linear),
        *norm("text_decoder.decoder.final_layernorm", f"{TEXT}.norm", width, text.normalization, "text", "last"),
        Rule(
            "text_decoder.output_layer.weight",
            (head,),
            Vocabulary(padded_vocab),
            "text",
            "last",
            tied=not text.untie_embeddings_and_output_weights,
        ),
    ]


def tensor_table(model: ModelConfig, padded_vocab: int) -> list[Rule]:
    """The whole of Qwen2-VL.

    Args:
        padded_vocab: rows of the word embedding over all tensor-parallel ranks.
    """
    vision = model.image_encoder.vision_encoder if model.image_encoder else None
    return [*(vision_rules(model, vision_mlp(vision)) if vision else []), *text_rules(model.text_decoder, padded_vocab)]
