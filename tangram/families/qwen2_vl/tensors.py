"""The tensor table of Qwen2-VL.

Source of the names on the right: transformers ``Qwen2VLForConditionalGeneration.state_dict()``; of the local names and layouts: the
public ``mp_rank`` checkpoints of MindSpeed-MM.
"""

from __future__ import annotations

from collections.abc import Callable

from tangram.config.model import ModelConfig, TextDecoderConfig, VisionEncoderConfig, VisionProjectorConfig
from tangram.placement.table import Component, GatedSplit, GroupedQKV, Layout, PackedQKV, Replicated, Rule, Source, Split, Vocabulary

VISION = "model.visual"
VISION_LAYER = "model.visual.blocks.{i}"
LOCAL_VISION_LAYER = "image_encoder.encoder.blocks.layers.{i}"
TEXT = "model.language_model"
TEXT_LAYER = "model.language_model.layers.{i}"
LOCAL_TEXT_LAYER = "text_decoder.decoder.layers.{i}"


def linear(local: str, sources: dict[str, int], width: int, layout: Layout, component: Component, *, bias: bool, place: str = "layer") -> list[Rule]:
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


def vision_rules(vision: VisionEncoderConfig, mlp: list[Rule]) -> list[Rule]:
    """Patch embedding and blocks with the given MLP rules."""
    width, bias = vision.hidden_size, vision.add_bias_linear
    patch = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    attention = f"{LOCAL_VISION_LAYER}.self_attention"
    qkv = PackedQKV(vision.num_attention_heads)
    return [
        *patch_embedding(width, patch, bias=vision.add_bias_conv),
        *norm(f"{LOCAL_VISION_LAYER}.input_layernorm", f"{VISION_LAYER}.norm1", width, vision.normalization, "vision"),
        *linear(f"{attention}.linear_qkv", {f"{VISION_LAYER}.attn.qkv": 3 * width}, width, qkv, "vision", bias=bias),
        *linear(f"{attention}.linear_proj", {f"{VISION_LAYER}.attn.proj": width}, width, Split(1), "vision", bias=bias),
        *norm(f"{LOCAL_VISION_LAYER}.pre_mlp_layernorm", f"{VISION_LAYER}.norm2", width, vision.normalization, "vision"),
        *mlp,
    ]


def patch_embedding(width: int, patch: tuple[int, ...], *, bias: bool) -> list[Rule]:
    """A convolution over patches of ``[channels, frames, height, width]``."""
    local, source = "image_encoder.encoder.patch_embed.proj", f"{VISION}.patch_embed.proj"
    rules = [Rule(f"{local}.weight", (Source(f"{source}.weight", (width, *patch)),), Replicated(), "vision", "first")]
    if bias:
        rules.append(Rule(f"{local}.bias", (Source(f"{source}.bias", (width,)),), Replicated(), "vision", "first", init="zeros"))
    return rules


def merger_rules(
    local: str, source: str, names: tuple[str, str, str], projector: VisionProjectorConfig, norm_width: int, place: str = "last"
) -> list[Rule]:
    """A norm of ``norm_width`` and two linears, ``[merged, merged]`` and ``[hidden, merged]``, called ``names`` in ``source``."""
    layernorm, fc1, fc2 = names
    merged, bias = projector.ffn_hidden_size, projector.add_bias_linear
    up, down = {f"{source}.{fc1}": merged}, {f"{source}.{fc2}": projector.hidden_size}
    return [
        *norm(f"{local}.layernorm", f"{source}.{layernorm}", norm_width, projector.normalization, "vision", place),
        *linear(f"{local}.encoder.linear_fc1", up, merged, Split(0), "vision", bias=bias, place=place),
        *linear(f"{local}.encoder.linear_fc2", down, merged, Split(1), "vision", bias=bias, place=place),
    ]


def image_encoder_rules(model: ModelConfig, mlp: Callable[[VisionEncoderConfig], list[Rule]]) -> list[Rule]:
    """Vision encoder with the given MLP, and the merger; nothing for a model without them."""
    if model.image_encoder is None:
        return []
    vision, projector = model.image_encoder.vision_encoder, model.image_encoder.vision_projector
    merger = merger_rules("image_encoder.projector", f"{VISION}.merger", ("ln_q", "mlp.0", "mlp.2"), projector, projector.input_size)
    return [*vision_rules(vision, mlp(vision)), *merger]


def text_mlp(text: TextDecoderConfig) -> list[Rule]:
    """Gate and up projections side by side, then the down projection."""
    width, ffn, bias = text.hidden_size, text.ffn_hidden_size, text.add_bias_linear
    gated = {f"{TEXT_LAYER}.mlp.{x}_proj": ffn for x in ("gate", "up")}
    return [
        *linear(f"{LOCAL_TEXT_LAYER}.mlp.linear_fc1", gated, width, GatedSplit(), "text", bias=bias),
        *linear(f"{LOCAL_TEXT_LAYER}.mlp.linear_fc2", {f"{TEXT_LAYER}.mlp.down_proj": width}, ffn, Split(1), "text", bias=bias),
    ]


def head_norms(text: TextDecoderConfig) -> list[Rule]:
    """Norms over the width of a head, of queries and of keys, where the decoder has them."""
    if not text.qk_layernorm:
        return []
    return [
        rule
        for x in "qk"
        for rule in norm(
            f"{LOCAL_TEXT_LAYER}.self_attention.{x}_layernorm", f"{TEXT_LAYER}.self_attn.{x}_norm", text.head_dim, text.normalization, "text"
        )
    ]


def text_rules(text: TextDecoderConfig, padded_vocab: int, mlp: list[Rule] | None = None) -> list[Rule]:
    """Embedding, decoder layers, final norm and head; ``mlp``: rules of another MLP than ``text_mlp``."""
    width, head_dim = text.hidden_size, text.head_dim
    queries, keys = text.num_attention_heads * head_dim, text.num_query_groups * head_dim
    attention = f"{LOCAL_TEXT_LAYER}.self_attention"
    projections = {f"{TEXT_LAYER}.self_attn.{x}_proj": size for x, size in (("q", queries), ("k", keys), ("v", keys))}
    embedding = Source(f"{TEXT}.embed_tokens.weight", (text.vocab_size, width))
    head = Source("lm_head.weight", (text.vocab_size, width)) if text.untie_embeddings_and_output_weights else embedding
    return [
        Rule("text_decoder.embedding.word_embeddings.weight", (embedding,), Vocabulary(padded_vocab), "text", "first"),
        *norm(f"{LOCAL_TEXT_LAYER}.input_layernorm", f"{TEXT_LAYER}.input_layernorm", width, text.normalization, "text"),
        *linear(f"{attention}.linear_qkv", projections, width, GroupedQKV(text.num_query_groups), "text", bias=text.add_qkv_bias),
        *linear(f"{attention}.linear_proj", {f"{TEXT_LAYER}.self_attn.o_proj": width}, queries, Split(1), "text", bias=text.add_bias_linear),
        *head_norms(text),
        *norm(f"{LOCAL_TEXT_LAYER}.pre_mlp_layernorm", f"{TEXT_LAYER}.post_attention_layernorm", width, text.normalization, "text"),
        *(text_mlp(text) if mlp is None else mlp),
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
    return [*image_encoder_rules(model, vision_mlp), *text_rules(model.text_decoder, padded_vocab)]
