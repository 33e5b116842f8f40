"""Whether a model's attention can be shared by context-parallel ranks."""

from __future__ import annotations

from tangram.config.model import TextDecoderConfig
from tangram.config.run import ParallelConfig
from tangram.errors import ConfigError


def check_context(text: TextDecoderConfig, parallel: ParallelConfig) -> str:
    """Check heads and dropout; what was found in a few words.

    Raises:
        ConfigError: heads that Ulysses ranks cannot share, or dropout of scores that travel round a ring.
    """
    size, ring, tensor = parallel.context_parallel_size, parallel.context_parallel_ring, parallel.tensor_model_parallel_size
    if size == 1:
        return "off"
    ulysses = size // ring
    if ring > 1 and text.attention_dropout > 0:
        raise ConfigError(
            f"text_decoder.attention_dropout {text.attention_dropout:g} cannot be drawn where keys travel round a ring "
            f"(context_parallel_algo {parallel.context_parallel_algo}); set it to 0, or use ulysses_cp_algo"
        )
    if text.num_attention_heads % tensor or text.num_query_groups % tensor:
        return f"not looked at: heads do not divide by tensor_model_parallel_size {tensor}"
    heads, groups = text.num_attention_heads // tensor, text.num_query_groups // tensor
    fits = [n for n in range(1, heads + 1) if heads % n == 0 and (groups % n == 0 or n % groups == 0)]
    if ulysses not in fits:
        split = f" / tensor_model_parallel_size {tensor}" if tensor > 1 else ""
        raise ConfigError(
            f"{ulysses} Ulysses ranks cannot share {text.num_attention_heads} attention heads and {text.num_query_groups} key/value heads{split} "
            f"= {heads} and {groups}: they must divide the first, and the second or be a multiple of it; use {' or '.join(map(str, fits))}, or "
            "megatron_cp_algo, which shares no heads"
        )
    parts = [f"{ulysses} ranks share {heads} heads"] if ulysses > 1 else []
    parts += [f"a ring of {ring}"] if ring > 1 else []
    return f"{size} ranks: " + " in ".join(parts)
