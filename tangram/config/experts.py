"""Which splits of experts the megatron backend runs, said before any process starts."""

from __future__ import annotations

from tangram.config.model import ExpertKeys, ModelConfig
from tangram.errors import ConfigError


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
