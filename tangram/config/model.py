"""The assembled model as data: the typed form of model.json.

Key names are those of MindSpeed-MM's model.json. A key is here only if it has an effect. Sections are what the model is built of;
``model_id`` inside a section picks the component and its layer spec.
"""

from __future__ import annotations

from math import prod
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from tangram.config.parsing import Section
from tangram.placement.table import Component
from tangram.placement.topology import layer_grid

Activation = Literal["silu", "quick_gelu", "gelu", "gelu_pytorch_tanh"]
Normalization = Literal["RMSNorm", "LayerNorm"]
Grid = tuple[int, int, int]
"""(t, h, w) of an image or video, in patches."""
TokenDispatcher = Literal["alltoall", "allgather"]
AttentionBackend = Literal["auto", "flash", "transformer_engine", "npu", "torch"]


def _layer_list(value: Any) -> Any:
    if value is not None:
        layer_grid(value, "layers per stage")
    return value


LayerList = Annotated[list[int] | list[list[int]], BeforeValidator(_layer_list)]
"""Layers per pipeline stage, ``[12, 16]``, or one such list per virtual stage."""


class RecomputeKeys(Section):
    """Activation recomputation of one component; names and meaning as in Megatron."""

    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_method: Literal["uniform", "block"] | None = None
    recompute_num_layers: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _recompute_is_whole(self) -> RecomputeKeys:
        full = self.recompute_granularity == "full"
        if full != (self.recompute_method is not None) or full != (self.recompute_num_layers is not None):
            raise ValueError(
                "recompute_granularity 'full' needs recompute_method and recompute_num_layers, and these two need it; "
                f"got {self.recompute_granularity!r}, {self.recompute_method!r}, {self.recompute_num_layers!r}"
            )
        return self


class LayerKeys(RecomputeKeys):
    """How the layers of one component are computed; none of it changes what they compute."""

    attention_backend: AttentionBackend = "auto"
    """The library of core attention: flash-attn, TransformerEngine, torch_npu's fused attention, or torch. auto: the first that is installed."""
    activation_offload: bool = False
    """What layers save for the backward pass waits in host memory. The name is MindSpeed-MM's."""


class VisionEncoderConfig(LayerKeys):
    """A vision transformer over image patches."""

    model_id: str
    num_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    ffn_hidden_size: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    in_channels: int = Field(default=3, ge=1)
    patch_size: int = Field(default=14, ge=1)
    """Side of a square patch, pixels."""
    temporal_patch_size: int = Field(default=2, ge=1)
    """Frames per patch; a still image is repeated."""
    spatial_merge_size: int = Field(default=2, ge=1)
    """Side, in patches, of the square that the projector merges into one token."""
    window_attn_size: int | None = Field(default=None, ge=1)
    """Side of an attention window, pixels. None: every block attends to its whole frame."""
    fullatt_block_indexes: list[int] | None = None
    """Global 0-based indexes of the blocks that attend to their whole frame although windows are on."""
    tokens_per_second: int | None = Field(default=None, ge=1)
    """Temporal positions per second of video (Qwen2.5-VL); None: one per frame group."""
    gated_linear_unit: bool = False
    activation_func: Activation
    normalization: Normalization
    layernorm_epsilon: float = Field(default=1e-6, gt=0)
    add_bias_linear: bool = True
    """Biases in the attention and MLP linears."""
    add_bias_conv: bool = False
    """Bias in the patch embedding."""
    rope_theta: float = Field(default=10000.0, gt=0)
    init_method_std: float = Field(default=0.02, gt=0)
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    hidden_dropout: float = Field(default=0.0, ge=0, lt=1)
    freeze: bool = True
    """As in the reference, a vision encoder is frozen unless the file says ``false``."""
    pipeline_num_layers: LayerList | None = None
    """Layers per pipeline stage: one number per stage, or one such list per virtual stage."""

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def deepstack_layers(self) -> list[int]:
        """Global 0-based indexes of the blocks whose output a merger of their own brings to text layers 0, 1, ...; rising."""
        return []

    # What data, pipeline and model ask of an encoder; a section of a family's own answers otherwise where its encoder does.

    @property
    def patch_width(self) -> int:
        """Numbers of one patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def picture_grid(self) -> Grid | None:
        """The grid of every picture, where the encoder takes one size; None: it takes many."""
        return None

    @property
    def blank_grid(self) -> Grid:
        """The grid of the picture that stands in where a micro-batch has none."""
        return self.picture_grid or (1, self.spatial_merge_size, self.spatial_merge_size)

    @property
    def used_layers(self) -> int:
        """Layers that the encoder's output needs; those after them are kept, but take no part."""
        return self.num_layers

    def places(self, grid: Grid) -> int:
        """Hidden states that the encoder makes of an image or video: one per patch, and those that belong to none."""
        return prod(grid)

    @property
    def places_together(self) -> int:
        """Hidden states that no division over ranks may part."""
        return self.spatial_merge_size**2

    @property
    def rotary(self) -> bool:
        """Whether attention knows rows and columns by rotary angles, which take a quarter of a head's width each, twice."""
        return True

    def tokens(self, grid: Grid) -> int:
        """Tokens that an image or video becomes in the text."""
        return prod(grid) // self.spatial_merge_size**2

    @model_validator(mode="after")
    def _shapes_fit(self) -> VisionEncoderConfig:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not divisible by num_attention_heads {self.num_attention_heads}")
        if self.rotary and self.head_dim % 4:
            raise ValueError(f"head_dim {self.head_dim} is not divisible by 4, which 2-D rotary positions need")
        if (self.window_attn_size is None) != (self.fullatt_block_indexes is None):
            raise ValueError("window_attn_size and fullatt_block_indexes belong together: give both or neither")
        if self.window_attn_size is not None:
            cell = self.patch_size * self.spatial_merge_size
            if self.window_attn_size < cell:
                raise ValueError(f"window_attn_size {self.window_attn_size} is smaller than one merged cell of {cell} pixels")
            wrong = [i for i in self.fullatt_block_indexes or () if not 0 <= i < self.num_layers]
            if wrong:
                raise ValueError(f"fullatt_block_indexes {wrong} lie outside 0..{self.num_layers - 1}")
        return self


class VisionProjectorConfig(Section):
    """Norm, merge of neighbouring patches, two linears: ``[n * merge^2, input_size] -> [n, hidden_size]``.

    With ``model_id`` ``mlp`` only the two linears: ``[n, input_size] -> [n, hidden_size]``.
    """

    model_id: str
    input_size: int = Field(ge=1)
    """Width of the vision encoder's output."""
    ffn_hidden_size: int = Field(ge=1)
    """Width between the linears; where patches are merged, the width after it: input_size * spatial_merge_size ** 2."""
    hidden_size: int = Field(ge=1)
    """Width of the text decoder."""
    activation_func: Activation = "gelu"
    normalization: Normalization | None = None
    """Needed unless ``model_id`` is ``mlp``, which has no norm."""
    layernorm_epsilon: float = Field(default=1e-6, gt=0)
    add_bias_linear: bool = True
    init_method_std: float = Field(default=0.02, gt=0)
    freeze: bool = False


class ImageEncoderConfig(Section):
    vision_encoder: VisionEncoderConfig
    vision_projector: VisionProjectorConfig

    @model_validator(mode="after")
    def _widths_fit(self) -> ImageEncoderConfig:
        encoder, projector = self.vision_encoder, self.vision_projector
        if projector.model_id not in ("mlp", "lnmlp"):
            return self  # A projector of a plug-in has widths of its own.
        merged = encoder.hidden_size * encoder.spatial_merge_size**2
        if projector.input_size != encoder.hidden_size:
            raise ValueError(f"vision_projector.input_size {projector.input_size} is not vision_encoder.hidden_size {encoder.hidden_size}")
        if projector.model_id == "mlp":
            if projector.normalization is not None or encoder.spatial_merge_size != 1:
                raise ValueError(
                    "vision_projector 'mlp' neither normalises nor merges: leave normalization out and set spatial_merge_size to 1; "
                    f"got {projector.normalization!r}, {encoder.spatial_merge_size}"
                )
            return self
        if projector.normalization is None:
            raise ValueError("vision_projector.normalization is missing; give RMSNorm or LayerNorm")
        if projector.ffn_hidden_size != merged:
            raise ValueError(f"vision_projector.ffn_hidden_size {projector.ffn_hidden_size} is not hidden_size * spatial_merge_size^2 = {merged}")
        return self


class TextDecoderConfig(LayerKeys):
    """A causal language model."""

    model_id: str
    num_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    ffn_hidden_size: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_query_groups: int = Field(ge=1)
    """Key/value heads."""
    kv_channels: int | None = Field(default=None, ge=1)
    """Width of one head; None: hidden_size / num_attention_heads."""
    vocab_size: int = Field(ge=1)
    """Rows of the Hugging Face embedding; padding to the tensor-parallel size comes on top."""
    max_position_embeddings: int = Field(default=32768, ge=1)
    """Longest sequence; a longer ``seq_length`` is refused."""
    rope_theta: float = Field(default=10000.0, gt=0)
    position_embedding_type: Literal["mrope", "rope"] = "mrope"
    mrope_section: list[int] | None = None
    """Rotary frequency pairs given to time, height and width; they sum to half of kv_channels."""
    untie_embeddings_and_output_weights: bool
    """False: the output layer is the embedding."""
    add_bias_linear: bool = False
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    gated_linear_unit: bool = True
    activation_func: Activation = "silu"
    normalization: Normalization = "RMSNorm"
    layernorm_epsilon: float = Field(default=1e-6, gt=0)
    init_method_std: float = Field(default=0.02, gt=0)
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    hidden_dropout: float = Field(default=0.0, ge=0, lt=1)
    freeze: bool = False
    loss_chunk_size: int | None = Field(default=None, ge=1)
    """Supervised tokens that reach the output layer at a time; None: all of a micro-batch at once."""
    pipeline_num_layers: LayerList | None = None

    @property
    def head_dim(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @model_validator(mode="after")
    def _shapes_fit(self) -> TextDecoderConfig:
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not divisible by num_attention_heads {self.num_attention_heads}")
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(f"num_attention_heads {self.num_attention_heads} is not divisible by num_query_groups {self.num_query_groups}")
        if (self.position_embedding_type == "mrope") != (self.mrope_section is not None):
            raise ValueError("position_embedding_type 'mrope' needs mrope_section, and only it")
        section = self.mrope_section
        if section is not None and (len(section) != 3 or min(section) < 0 or 2 * sum(section) != self.head_dim):
            raise ValueError(f"mrope_section {section} must hold 3 numbers that sum to half of head_dim {self.head_dim}, none below 0")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd, and rotary positions turn pairs; make it even")
        return self


class ExpertKeys(Section):
    """What a text decoder with experts in every layer has beyond others; names and meaning as in Megatron."""

    num_moe_experts: int = Field(ge=1)
    moe_router_topk: int = Field(ge=1)
    """Experts that a token goes to."""
    moe_intermediate_size: int = Field(ge=1)
    """Width of one expert."""
    norm_topk_prob: bool = True
    """The weights of the experts that a token goes to sum to one."""
    moe_aux_loss_coeff: float = Field(default=0.0, ge=0)
    """Weight of each layer's load-balancing loss; 0: none. See docs/experts.md for how it differs from router_aux_loss_coef."""
    moe_z_loss_coeff: float = Field(default=0.0, ge=0)
    """Weight of each layer's mean squared log-sum-exp of router logits; 0: none."""
    moe_token_dispatcher_type: TokenDispatcher = "alltoall"
    """How tokens reach the ranks that hold their experts; ``parallel.moe_token_dispatcher_type`` overrides it."""
    moe_grouped_gemm: bool | None = None
    """Run the experts of a rank as one grouped product instead of one after the other; None: where an accelerator has a kernel for it.
    ``parallel.moe_grouped_gemm`` overrides it."""

    @model_validator(mode="after")
    def _experts_fit(self) -> ExpertKeys:
        if self.moe_router_topk > self.num_moe_experts:
            raise ValueError(f"moe_router_topk {self.moe_router_topk} is more than num_moe_experts {self.num_moe_experts}")
        return self

    @property
    def has_router_loss(self) -> bool:
        """Whether routers add to the loss."""
        return self.moe_aux_loss_coeff > 0 or self.moe_z_loss_coeff > 0


class ModelConfig(Section):
    """The whole of model.json. A section that is null is not built."""

    model_id: str
    """The family, such as ``qwen2_5_vl``."""
    img_context_token_id: int = Field(ge=0)
    """Id of ``<|image_pad|>``: its positions receive the image embeddings."""
    video_token_id: int | None = Field(default=None, ge=0)
    """Needed by ``mrope`` positions, as ``vision_start_token_id`` is; None: the model has no such token."""
    vision_start_token_id: int | None = Field(default=None, ge=0)
    image_encoder: ImageEncoderConfig | None = None
    text_decoder: TextDecoderConfig

    @model_validator(mode="after")
    def _components_fit(self) -> ModelConfig:
        text = self.text_decoder
        absent = [key for key in ("video_token_id", "vision_start_token_id") if getattr(self, key) is None]
        if absent and text.position_embedding_type == "mrope":
            raise ValueError(f"{' and '.join(absent)} missing; position_embedding_type 'mrope' needs {'it' if len(absent) == 1 else 'them'}")
        if self.image_encoder is not None:
            projector = self.image_encoder.vision_projector
            if projector.hidden_size != text.hidden_size:
                raise ValueError(f"vision_projector.hidden_size {projector.hidden_size} is not text_decoder.hidden_size {text.hidden_size}")
        return self

    @property
    def layered(self) -> dict[str, VisionEncoderConfig | TextDecoderConfig]:
        """Components that are made of layers."""
        vision = {"vision_encoder": self.image_encoder.vision_encoder} if self.image_encoder is not None else {}
        return {**vision, "text_decoder": self.text_decoder}

    @property
    def init_method_stds(self) -> dict[Component, float]:
        """Standard deviation of fresh weights, per component."""
        stds: dict[Component, float] = {"text": self.text_decoder.init_method_std}
        if self.image_encoder is not None:
            stds["vision"] = self.image_encoder.vision_encoder.init_method_std
        return stds
