"""The keys of model.json that experts bring, and the Hugging Face config of Qwen3-VL with experts as a model config."""

from __future__ import annotations

from tangram.config.model import ExpertKeys, ModelConfig
from tangram.errors import ConfigError
from tangram.families.qwen2_vl.config import HFConfig, Reader, assemble, decoder_section
from tangram.families.qwen3_vl.config import Qwen3TextDecoderConfig, Qwen3VLConfig, qwen3_keys, vision_encoder


class Qwen3MoeTextDecoderConfig(Qwen3TextDecoderConfig, ExpertKeys):
    """A Qwen3 decoder with experts in every layer."""


class Qwen3VLMoeConfig(Qwen3VLConfig):
    """model.json of Qwen3-VL with experts."""

    text_decoder: Qwen3MoeTextDecoderConfig


def from_hf_config(hf: HFConfig) -> ModelConfig:
    """Read a ``qwen3_vl_moe`` config.json.

    Raises:
        ConfigError: a key is missing or its value cannot be represented.
    """
    read = Reader(hf)
    _refuse_dense_layers(read)
    if read.text.get("norm_topk_prob", True) is not True:
        raise ConfigError("config.json: norm_topk_prob false is not supported; transformers lets the weights sum to one whatever it says")
    text = decoder_section(
        read,
        Qwen3MoeTextDecoderConfig,
        model_id="qwen3_lm",
        # transformers 4.x and the hub write the first name, 5.x the second.
        num_moe_experts=read.get(read.text, "num_experts", "num_local_experts"),
        moe_router_topk=read.get(read.text, "num_experts_per_tok"),
        moe_intermediate_size=read.get(read.text, "moe_intermediate_size"),
        norm_topk_prob=True,
        **qwen3_keys(read),
    )
    return assemble(read, "qwen3_vl_moe", vision_encoder(read), text, Qwen3VLMoeConfig)


def _refuse_dense_layers(read: Reader) -> None:
    step, dense = read.text.get("decoder_sparse_step", 1), read.text.get("mlp_only_layers") or []
    if step != 1 or dense:
        raise ConfigError(
            f"config.json: decoder_sparse_step {step} and mlp_only_layers {dense} ask for layers without experts, which is not supported; every "
            "published Qwen3-VL has 1 and []"
        )
