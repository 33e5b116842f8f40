"""Whether the library of core attention that a component asks for fits the run."""

from __future__ import annotations

from importlib.util import find_spec

from tangram.config.model import ModelConfig
from tangram.config.run import RunConfig
from tangram.errors import ConfigError
from tangram.platform.attention import AUTO, LIBRARIES, TORCH, no_ring

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def check_attention(model: ModelConfig, run: RunConfig) -> str:
    """Check what can be known without a device; what was found in a few words.

    Args:
        model: the assembled model.

    Raises:
        ConfigError: the library is not installed, does not take the component's heads or the run's type, or has no ring.
    """
    for name, section in model.layered.items():
        backend = section.attention_backend
        if backend in (AUTO, TORCH):
            continue
        library = LIBRARIES[backend]
        misfit = library.misfit(_DTYPES[run.training.dtype], section.head_dim, section.attention_dropout)
        if misfit is not None:
            raise ConfigError(f"{name}: attention_backend {backend} {misfit}; set auto or torch")
        if section is model.text_decoder and run.parallel.context_parallel_ring > 1 and not library.ring:
            raise ConfigError(f"{name}: {no_ring(backend)}")
        if find_spec(library.package) is None:
            raise ConfigError(f"{name}: attention_backend {backend} needs the package {library.package}; install it, or set auto or torch")
    return ", ".join(f"{name} by {section.attention_backend}" for name, section in model.layered.items())
