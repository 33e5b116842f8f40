"""From a Hugging Face directory to a model whose weights are still to be put in."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from tangram.backends.fsdp2.head import chunked, put_loss_head
from tangram.backends.fsdp2.models import CLASSES, with_chunk_loss
from tangram.backends.fsdp2.registry import model_register
from tangram.config.fsdp2 import Fsdp2Config, Fsdp2Model
from tangram.config.fsdp2_plans import check_paths
from tangram.config.patterns import match_each
from tangram.config.sources import read_hf_config
from tangram.errors import ConfigError
from tangram.families.plugins import told
from tangram.platform import current
from tangram.platform.operators.fuse import fuse


class ModelHub:
    """Builds models of run files."""

    @staticmethod
    def build(config: Fsdp2Config) -> nn.Module:
        """The model in fp32, frozen where the run file says so, with the platform's fused operators, without the weights of the files.

        With ``init_model_with_meta_device`` its parameters take no memory yet; buffers are always real, for constructors compute them.

        Raises:
            ConfigError: the directory is no model's, the class is unknown, or a pattern of any plan matches nothing.
        """
        model = _built(config, on_meta=config.training.init_model_with_meta_device)
        fuse(model, current().name)
        return model

    @staticmethod
    def skeleton(config: Fsdp2Config) -> nn.Module:
        """The same without memory for any parameter: modules, names and shapes.

        Raises:
            ConfigError: as ``build``.
        """
        return _built(config, on_meta=True)


def _built(config: Fsdp2Config, on_meta: bool) -> nn.Module:
    from transformers import AutoConfig

    source = config.model
    try:
        hf = AutoConfig.from_pretrained(
            source.model_name_or_path,
            trust_remote_code=source.trust_remote_code,
            attn_implementation=source.attn_implementation,
            local_files_only=True,
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.model_name_or_path {source.model_name_or_path}: {' '.join(str(error).split())}") from error
    except (Exception, SystemExit) as error:  # code of the directory or of a plug-in can fail in any way
        raise ConfigError(f"model.model_name_or_path {source.model_name_or_path}: its config cannot be made: {told(error)}") from error
    if torch.are_deterministic_algorithms_enabled() and hasattr(hf, "_experts_implementation"):
        hf._experts_implementation = "eager"  # a loop; transformers' own choice is torch's grouped product, which does not promise to repeat itself
    _prepare_routers(hf, config.features.loss_cfg.router_aux_loss_coef)
    model_class: Any = model_class_of(source.model_id, hf)
    if chunked(config.features):
        model_class = with_chunk_loss(model_class)
    try:
        with _on_meta() if on_meta else _seeded(config.training.seed):
            model = model_class._from_config(hf, dtype=torch.float32)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # a constructor of a plug-in can fail in any way
        raise _not_built(source, model_class, error) from error
    if hasattr(model, "tie_weights"):
        # On the meta device modules were given parameters of their own.
        model.tie_weights()
    check_paths(config, [path for path, _ in model.named_modules() if path])
    if chunked(config.features):
        put_loss_head(model, config.features)
    freeze(model, source.freeze)
    return model


def _not_built(source: Fsdp2Model, model_class: type, error: BaseException) -> ConfigError:
    own = source.model_id is not None and source.model_id not in CLASSES
    where = f"model.model_id {source.model_id}" if own else f"model.model_name_or_path {source.model_name_or_path}"
    mend = "correct the plug-in" if own else "is it of another version of transformers?"
    return ConfigError(f"{where}: {model_class.__name__} cannot be built of its config.json ({told(error)}); {mend}")


def model_class_of(model_id: str | None, hf: Any) -> type:
    """The registered class; without an id that of the model type, or the one of transformers that config.json names.

    Raises:
        ConfigError: unknown.
    """
    import transformers

    if model_id is not None:
        return model_register.get(model_id)
    # Configs of 4.57 answer for their text part.
    names = getattr(hf, "architectures", None) or read_hf_config(hf.name_or_path).get("architectures") or []
    if names == [CLASSES.get(hf.model_type)]:
        return model_register.get(hf.model_type)
    if not names or not inspect.isclass(getattr(transformers, names[0], None)):
        raise ConfigError(f"config.json names the architectures {names}, of which transformers has none; give model.model_id and a plug-in")
    return getattr(transformers, names[0])


def _prepare_routers(hf: Any, coefficient: float) -> None:
    """Leave the auxiliary loss of routers to the engine, which knows of how many micro-batches it is the mean.

    Raises:
        ConfigError: the run file wants it, and the model has no routers.
    """
    text = hf.get_text_config()
    if hasattr(text, "router_aux_loss_coef"):
        text.router_aux_loss_coef = 0.0
    elif coefficient > 0:
        raise ConfigError(f"features.loss_cfg.router_aux_loss_coef {coefficient}: {hf.model_type} has no experts, so no routers; remove it")


def freeze(model: nn.Module, patterns: list[str]) -> None:
    """Switch off the gradients of all parameters of the modules that match.

    Raises:
        ConfigError: as ``match_each``.
    """
    modules = dict(model.named_modules())
    for paths in match_each(patterns, [path for path in modules if path], "model.freeze").values():
        for path in paths:
            modules[path].requires_grad_(False)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """What constructors draw is the run's seed's, on every rank; torch's own generator is as before afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _on_meta() -> AbstractContextManager[Any]:
    from accelerate import init_empty_weights

    return init_empty_weights(include_buffers=False)
