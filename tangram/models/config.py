"""Sections of model.json as megatron-core's TransformerConfig, with what is ours besides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from tangram.config.experts import runs_grouped
from tangram.config.model import ExpertKeys, TextDecoderConfig, VisionEncoderConfig, VisionProjectorConfig
from tangram.errors import ConfigError, suggest


def quick_gelu(x: Tensor) -> Tensor:
    """``x * sigmoid(1.702 x)`` (Hendrycks and Gimpel 2016)."""
    return x * torch.sigmoid(1.702 * x)


def tanh_gelu(x: Tensor) -> Tensor:
    """The tanh approximation of GELU."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "quick_gelu": quick_gelu,
    "gelu_pytorch_tanh": tanh_gelu,
}


@dataclass
class ComponentConfig(TransformerConfig):
    """megatron-core's settings of a component and ours.

    Args:
        attention_library: ``attention_backend`` of the section; core has a setting of that name, for TransformerEngine.
        offload_activations: ``activation_offload`` of the section; core's ``cpu_offloading`` needs TransformerEngine's layers.
    """

    attention_library: str = "auto"
    offload_activations: bool = False


def find_activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function that ``activation_func`` names.

    Raises:
        ConfigError: unknown.
    """
    if name not in ACTIVATIONS:
        raise ConfigError(f"activation_func {name!r} is unknown{suggest(name, ACTIVATIONS)}; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


@dataclass(frozen=True)
class BuildOptions:
    """What the run, not model.json, decides of a component."""

    dtype: torch.dtype
    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    expert_model_parallel_size: int = 1
    on_cpu: bool = True


def _common(options: BuildOptions) -> dict[str, Any]:
    return {
        "params_dtype": options.dtype,
        "bf16": options.dtype == torch.bfloat16,
        "fp16": options.dtype == torch.float16,
        "tensor_model_parallel_size": options.tensor_model_parallel_size,
        "sequence_parallel": options.sequence_parallel,
        "use_cpu_initialization": options.on_cpu,
        # Weights come from a checkpoint or from tangram.checkpoints.fresh, never from a layer's own generator.
        "perform_initialization": False,
        # The gradient of the word embedding, which core else leaves to a kernel that it says to be none.
        "deterministic_mode": torch.are_deterministic_algorithms_enabled(),
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
    }


def get_model_config(section: VisionEncoderConfig | TextDecoderConfig | VisionProjectorConfig, options: BuildOptions) -> ComponentConfig:
    """The settings of one component.

    The pipeline size is left at 1: a component is told which layers it holds, so core must not divide them again.
    """
    if isinstance(section, VisionProjectorConfig):
        return ComponentConfig(
            num_layers=1,
            hidden_size=section.hidden_size,
            ffn_hidden_size=section.ffn_hidden_size,
            # A projector has no heads, but core wants a number of them that divides.
            num_attention_heads=options.tensor_model_parallel_size,
            kv_channels=1,
            add_bias_linear=section.add_bias_linear,
            activation_func=find_activation(section.activation_func),
            normalization=section.normalization,
            layernorm_epsilon=section.layernorm_epsilon,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            **_common(options),
        )
    if isinstance(section, TextDecoderConfig):
        groups, qkv_bias, head_norms = section.num_query_groups, section.add_qkv_bias, section.qk_layernorm
    else:
        groups, qkv_bias, head_norms = section.num_attention_heads, section.add_bias_linear, False
    return ComponentConfig(
        num_layers=section.num_layers,
        hidden_size=section.hidden_size,
        ffn_hidden_size=section.ffn_hidden_size,
        num_attention_heads=section.num_attention_heads,
        num_query_groups=groups,
        kv_channels=section.head_dim,
        add_bias_linear=section.add_bias_linear,
        add_qkv_bias=qkv_bias,
        qk_layernorm=head_norms,
        gated_linear_unit=section.gated_linear_unit,
        activation_func=find_activation(section.activation_func),
        normalization=section.normalization,
        layernorm_epsilon=section.layernorm_epsilon,
        hidden_dropout=section.hidden_dropout,
        attention_dropout=section.attention_dropout,
        recompute_granularity=section.recompute_granularity,
        recompute_method=section.recompute_method,
        recompute_num_layers=section.recompute_num_layers,
        attention_library=section.attention_backend,
        offload_activations=section.activation_offload,
        **(_experts(section, options) if isinstance(section, TextDecoderConfig) else {}),
        **_common(options),
    )


def _experts(section: TextDecoderConfig, options: BuildOptions) -> dict[str, Any]:
    """Experts in every layer, where the section has them, routed in fp32 to the largest logits, with a softmax over these alone: what a softmax over
    all, renormalised over the chosen, is too. Tensor-parallel ranks divide each expert as they divide the rest."""
    if not isinstance(section, ExpertKeys):
        return {}
    return {
        "num_moe_experts": section.num_moe_experts,
        "moe_router_topk": section.moe_router_topk,
        "moe_ffn_hidden_size": section.moe_intermediate_size,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss" if section.moe_aux_loss_coeff else "none",
        "moe_aux_loss_coeff": section.moe_aux_loss_coeff,
        "moe_z_loss_coeff": section.moe_z_loss_coeff or None,
        "moe_grouped_gemm": runs_grouped(
            section,
            tensor=options.tensor_model_parallel_size,
            itemsize=options.dtype.itemsize,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        ),
        "moe_token_dispatcher_type": section.moe_token_dispatcher_type,
        "expert_model_parallel_size": options.expert_model_parallel_size,
        "expert_tensor_parallel_size": options.tensor_model_parallel_size,
        "calculate_per_token_loss": True,
    }
