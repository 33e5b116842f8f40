"""The layer spec of pre-norm transformer layers, chosen by a section's own keys."""

from __future__ import annotations

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from tangram.config.model import ExpertKeys, TextDecoderConfig, VisionEncoderConfig
from tangram.models.attention import SegmentAttention
from tangram.models.experts import Experts
from tangram.models.norms import NORMS


def layer_spec(section: TextDecoderConfig | VisionEncoderConfig) -> ModuleSpec:
    """Norm, self-attention, norm, MLP or experts; causal for a text decoder."""
    norm = NORMS[section.normalization]
    dense = ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
    head_norm, mask = IdentityOp, AttnMaskType.no_mask
    if isinstance(section, TextDecoderConfig):
        head_norm, mask = (norm if section.qk_layernorm else IdentityOp), AttnMaskType.causal
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": mask},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=SegmentAttention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=head_norm,
                    k_layernorm=head_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=Experts if isinstance(section, ExpertKeys) else dense,
            mlp_bda=get_bias_dropout_add,
        ),
    )
