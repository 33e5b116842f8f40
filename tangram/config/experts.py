"""Which splits of experts the megatron backend runs, said before any process starts."""

from __future__ import annotations

from tangram.config.model import ExpertKeys, ModelConfig, TextDecoderConfig
from tangram.errors import ConfigError
from tangram.platform import current


def check_experts(model: ModelConfig, *, expert: int, tensor: int, sequence_parallel: bool) -> None:
    """Refuse what cannot be run.

    Raises:
        ConfigError: experts that are not there, are too few or do not divide; tensor parallelism without sequence
            parallelism; a single expert per token.
    """
    text = model.text_decoder
    if not isinstance(text, ExpertKeys):
        if expert != 1:
            raise ConfigError(f"expert_model_parallel_size {expert}: the model {model.model_id} has no experts; leave it out")
        return
    if text.num_moe_experts % expert:
        fits = ", ".join(str(n) for n in range(1, text.num_moe_experts + 1) if text.num_moe_experts % n == 0)
        raise ConfigError(f"expert_model_parallel_size {expert} does not divide num_moe_experts {text.num_moe_experts}; use one of {fits}")
    if tensor > 1 and not sequence_parallel:
        raise ConfigError(
            f"tensor_model_parallel_size {tensor} with {text.num_moe_experts} experts needs sequence_parallel: without it all tensor-parallel ranks "
            "would send the experts the same tokens; set sequence_parallel, or divide the experts alone with expert_model_parallel_size"
        )
    if text.moe_router_topk == 1:
        raise ConfigError("moe_router_topk 1: the weight of the only expert is always 1, so the router cannot learn; use 2 or more")


def runs_grouped(text: TextDecoderConfig, *, tensor: int, itemsize: int, deterministic: bool = False) -> bool:
    """Whether the experts of a rank run as one grouped product on this platform; else they run one after the other.

    Args:
        itemsize: bytes of one number of the run's type.
        deterministic: whether the run is to give the same bits each time.

    Raises:
        ConfigError: ``moe_grouped_gemm`` asks for it where it cannot be had.
    """
    assert isinstance(text, ExpertKeys)
    device = current().name
    # On the cpu the kernel is a loop itself, and stacks weights besides.
    if text.moe_grouped_gemm is False or (text.moe_grouped_gemm is None and device == "cpu"):
        return False
    obstacle = _obstacle(text, device, tensor, itemsize, deterministic)
    if text.moe_grouped_gemm and obstacle is not None:
        raise ConfigError(f"moe_grouped_gemm: {obstacle}; set it to false, or leave it out")
    return obstacle is None


def _obstacle(text: TextDecoderConfig, device: str, tensor: int, itemsize: int, deterministic: bool) -> str | None:
    """Why there is no grouped product."""
    from tangram.platform.operators import grouped, grouped_linear

    assert isinstance(text, ExpertKeys)
    if deterministic and not grouped_linear.repeats_on(device):
        return f"deterministic mode, and no kernel of grouped products on {device} promises the same bits each time"
    kernel = grouped_linear.fused_on(device)
    if kernel is None:
        return f"{device} has no kernel of grouped products, or the environment switches it off (TANGRAM_FUSED_OPS)"
    hidden, width = text.hidden_size, text.moe_intermediate_size // tensor
    if kernel is grouped.grouped_linear and not grouped.fits(hidden, width, itemsize=itemsize):
        return (
            f"torch's kernel takes rows of a multiple of {grouped.ROW_BYTES} bytes, and those of hidden_size {hidden} have {hidden * itemsize}, "
            f"those of moe_intermediate_size {text.moe_intermediate_size} / tensor-parallel size {tensor} have {width * itemsize}"
        )
    return None
