"""Whether a model's vision encoder can be divided over fewer tensor-parallel ranks than its text decoder."""

from __future__ import annotations

from tangram.config.model import ModelConfig
from tangram.errors import ConfigError


def check_vision_tensor(model: ModelConfig, size: int | None, tensor: int) -> None:
    """Check ``vision_tensor_model_parallel_size``.

    Raises:
        ConfigError: it does not divide ``tensor``, the text decoder's; there is no vision encoder; or the encoder has dropout, which the copies,
            having pictures of different size, would not draw alike where they must.
    """
    if size is None:
        return
    if tensor % size:
        raise ConfigError(
            f"vision_tensor_model_parallel_size {size} does not divide tensor_model_parallel_size {tensor}, whose ranks hold the copies of the "
            f"vision encoder; use {' or '.join(str(n) for n in range(1, tensor + 1) if tensor % n == 0)}"
        )
    if model.image_encoder is None:
        raise ConfigError(f"vision_tensor_model_parallel_size {size} has no effect: the model has no image_encoder; leave it out")
    encoder = model.image_encoder.vision_encoder
    dropout = [f"{name} {value:g}" for name in ("attention_dropout", "hidden_dropout") if (value := getattr(encoder, name))]
    if size < tensor and dropout:
        raise ConfigError(
            f"vision_tensor_model_parallel_size {size} with vision_encoder.{dropout[0]}: tensor-parallel ranks that encode different pictures "
            "would not draw alike afterwards; set the dropout to 0, or leave the size out"
        )
