"""A small random Qwen3-VL with experts."""

from __future__ import annotations

from pathlib import Path

from tangram.errors import ConfigError
from tangram.families.qwen3_vl.tiny import HALF_PIXELS, hf_config, write_qwen3_tokenizer
from tangram.families.qwen3_vl.tiny import SIZES as QWEN3_VL_SIZES
from tangram.families.qwen3_vl_moe.config import from_hf_config
from tangram.families.tiny import DEFAULT_SPEC, TinySpec, write_checkpoint

SIZES = (*QWEN3_VL_SIZES, "experts", "experts_per_token", "expert_ffn")


def write_tiny(out: Path, seed: int, tied: bool, spec: TinySpec = DEFAULT_SPEC, *, force: bool = False) -> None:
    """See ``TinyWriter``.

    Raises:
        ConfigError: experts that the model cannot have, or whose width makes one of their tensors square.
    """
    experts, width = spec.experts or 4, spec.expert_ffn or 3 * spec.hidden // 4
    if spec.hidden in (width, 2 * width):
        raise ConfigError(
            f"tiny model: expert_ffn {width} is hidden {spec.hidden} or half of it, so transformers 5.x could not tell [in, out] from [out, in] in "
            "the file; choose another"
        )
    config = hf_config(spec, tied, "qwen3_vl_moe")
    config["text_config"] |= {
        "num_experts": experts,
        "num_experts_per_tok": spec.experts_per_token or min(2, experts),
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    from_hf_config(config)
    stacks = {"mlp.experts.gate_up_proj": (experts, spec.hidden, 2 * width), "mlp.experts.down_proj": (experts, width, spec.hidden)}
    write_checkpoint(
        out,
        config,
        "Qwen3VLProcessor",
        seed,
        spec,
        force,
        sizes=SIZES,
        stacks=stacks,
        pixels=HALF_PIXELS,
        tokenizer=write_qwen3_tokenizer,
    )
