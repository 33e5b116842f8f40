"""Keys of a run file of the ``fsdp2`` backend that are no fields of ``Fsdp2Config``: MindSpeed-MM's that mean nothing here, the other backend's,
and keys that stand in the wrong section."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from tangram.config.fsdp2 import Fsdp2Config
from tangram.config.parsing import section_at
from tangram.config.public_keys import DATA, Entry, NoEffect, OffBy, Only, Path
from tangram.errors import ConfigError

_OFF = Only((False, None), "it is not supported yet")
_KERNEL = NoEffect("kernels are those of transformers")
_NO_READER = NoEffect("nothing reads it in MindSpeed-MM either")

FSDP2: dict[Path, dict[str, Entry]] = {
    ("parallel",): {
        "tensor_parallel_size": Only((1,), "layers are not split over ranks; use backend megatron, whose parallel.tensor_model_parallel_size does"),
        "tp_plan": NoEffect("layers are not split over ranks; use backend megatron"),
        "ring_attention_size": Only((1,), "samples are shared out over ranks by parallel.ulysses_parallel_size"),
    },
    ("parallel", "ep_plan"): {"_gradient_divide_factor": NoEffect("gradients are exact sums")},
    ("model",): {
        "mtp_num_layers": Only((0, None), "multi-token prediction is not supported"),
        "mtp_loss_scaling_factor": NoEffect("multi-token prediction is not supported"),
        **dict.fromkeys(("gdn_implementation", "causal_conv1d_implementation", "kda_implementation", "use_grouped_expert_matmul"), _KERNEL),
        **dict.fromkeys(("skip_gdn_recompute", "skip_flash_attn_recompute", "skip_kda_recompute"), _OFF),
    },
    ("features",): {
        "enable_ep_balance": Only((False, None), "experts stay where they are"),
        "ep_balance_plan": NoEffect("experts stay where they are"),
        "skip_moe_pad_tokens": Only((False, None), "padding is no target of the loss; packing leaves none"),
    },
    ("features", "loss_cfg"): {"router_aux_loss_offload": Only((False, None), "it is not supported yet")},
    ("training",): {
        "mem_fraction_static": NoEffect("it belongs to adamw_swap; parallel.fsdp_plan.cpu_offload keeps the optimizer in host memory"),
        "allow_hf32": Only((None,), "the device's default is used"),
        "load_strict": Only((True,), "a weight that is missing or left over is always an error"),
        "load_rank0_and_broadcast": Only((False,), "each rank reads only its own part of the files"),
        "val_micro_batch_size": Only((None,), "validation uses micro_batch_size"),
        "lora": OffBy("enable", "adapters are merged into weights by mm-convert, and not trained"),
        "quantization_plan": OffBy("recipe_name", "mxfp8 needs Ascend 950 and is not supported"),
        "max_steps": NoEffect("train_iters says how many steps"),
        "save_steps": NoEffect("save_interval says how often"),
        "load_checkpoint_path": NoEffect("load names the weights"),
        "ckpt_manager": Only(("dcp",), "save_format chooses the format"),
        "enable_full_determinism": NoEffect("use_deter_comp switches it on"),
        "profile": NoEffect("tools.profile is the profiler"),
    },
}
"""What MindSpeed-MM's FSDP2 files may hold besides; for ``tools`` see ``tangram.config.public_keys``."""

FSDP2_DATA: dict[Path, dict[str, Entry]] = {
    **DATA,
    (): {"val_dataset_param": Only((None,), "basic_parameters.val_dataset names validation data, which are read as the others are")},
    ("dataset_param", "basic_parameters"): {
        **DATA["dataset_param", "basic_parameters"],
        "stage": Only(("sft", None), "conversations are what is trained on"),
    },
    ("dataloader_param",): {
        **DATA["dataloader_param",],
        "persistent_workers": Only((True, None), "workers always persist"),
    },
}
"""The same for ``data``."""

_DTYPES = ("param_dtype", "reduce_dtype", "output_dtype")
VALUES: dict[Path, dict[Any, str]] = {
    **{("parallel", "fsdp_plan", key): {"fp16": "it needs its losses scaled, which is not done; write bf16"} for key in _DTYPES},
    ("training", "optimizer"): {"adamw_swap": "write adamw, and parallel.fsdp_plan.cpu_offload: true to keep its state in host memory"},
    ("training", "save_format"): {"auto": "write dcp, which a run can be resumed from, or hf"},
    ("parallel", "ep_plan", "dispatcher"): {"mc2": "it is an operation of Ascend NPUs; write alltoall"},
    ("model", "attn_implementation"): {"native-sparse": "write sdpa or flash_attention_2"},
    ("data", "dataloader_param", "collate_param", "ignore_pad_token_for_loss"): {False: "padding is never trained on; remove it, or write true"},
    ("data", "dataloader_param", "dataloader_mode"): {"base": "it ignores batch size and ranks; write sampler"},
}
"""Values of MindSpeed-MM that are no values here, and what to write."""

_ALIASES: dict[Path, Path] = {
    ("dataloader_param", "collate_param", "collator_id"): ("dataloader_param", "collate_param", "model_name"),
    ("dataloader_param", "collate_param", "pad_to_multiple_of"): ("dataloader_param", "pad_to_multiple_of"),
}
"""Keys of ``data`` with two names."""

_SHARDS = "weights are shared out by parallel.fully_shard_parallel_size"
OTHERS: dict[str, str] = {
    **dict.fromkeys(("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"), _SHARDS),
    **dict.fromkeys(("vit_pp_layers", "llm_pp_layers", "use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"), _SHARDS),
    "vision_tensor_model_parallel_size": _SHARDS,
    "make_vocab_size_divisible_by": "the vocabulary is not padded",
    "sequence_parallel": "no tensor is split over ranks but weights, and whole layers are gathered",
    "context_parallel_size": "write parallel.ulysses_parallel_size",
    **dict.fromkeys(("context_parallel_algo", "ulysses_degree_in_cp"), "ranks share tokens by Ulysses; write parallel.ulysses_parallel_size"),
    "encoder_dp_balance": "each rank encodes the pictures of its own samples",
    "moe_token_dispatcher_type": "write parallel.ep_plan.dispatcher",
    "moe_grouped_gemm": "experts run one after the other",
    "attention_backend": "write model.attn_implementation",
    "expert_model_parallel_size": "write parallel.expert_parallel_size",
    "global_batch_size": "write training.gradient_accumulation_steps: the global batch is micro_batch_size x data-parallel size x that",
    "min_lr": "write training.lr_min",
    "lr_warmup_init": "write training.lr_start",
    "lr_warmup_fraction": "write training.lr_warmup_ratio",
    "lr_warmup_iters": "write training.lr_warmup_ratio, a part of all steps",
    "lr_decay_iters": "write training.lr_decay_ratio, a part of all steps",
    "eval_interval": "write training.val_interval",
    "eval_iters": "write training.val_iters",
    "deterministic": "write training.use_deter_comp",
    "dtype": "write parallel.fsdp_plan.param_dtype",
    "hf_dir": "write model.model_name_or_path",
    "overrides": "the model is what config.json of model.model_name_or_path says",
    "cast_weights": "weights are always kept in fp32; parallel.fsdp_plan.param_dtype is what is computed with",
    **dict.fromkeys(("freeze_vision_encoder", "freeze_vision_projector", "freeze_text_decoder"), "name the modules in model.freeze"),
    **dict.fromkeys(
        ("recompute_granularity", "recompute_method", "recompute_num_layers"), "write features.recompute and features.recompute_plan.apply_modules"
    ),
    "sharding_size": "write parallel.fully_shard_parallel_size",
    "sub_modules_to_wrap": "write parallel.fsdp_plan.apply_modules",
    "recompute_modules": "write features.recompute_plan.apply_modules",
    "offload_to_cpu": "write parallel.fsdp_plan.cpu_offload",
}
"""Settings of the other backends, and what is written here."""


def take_aliases(data: dict[str, Any], where: str) -> dict[str, Any]:
    """A copy of the section ``data`` in which each key has its first name.

    Raises:
        ConfigError: both names are given, and differ.
    """
    taken = _copied(data)
    for alias, name in _ALIASES.items():
        given, target = _parent(taken, alias), _parent(taken, name)
        if given is None or alias[-1] not in given:
            continue
        assert target is not None, "the target lies on the alias's own path"
        value = given.pop(alias[-1])
        if value is not None and target.setdefault(name[-1], value) != value:
            raise ConfigError(f"{where}: {'.'.join(alias)} {value!r} and {'.'.join(name)} {target[name[-1]]!r} say the same thing; give one of them")
    return taken


def _copied(value: Any) -> Any:
    return {key: _copied(inner) for key, inner in value.items()} if isinstance(value, dict) else value


def _parent(content: Any, path: Path) -> dict[str, Any] | None:
    for part in path[:-1]:
        content = content.get(part) if isinstance(content, dict) else None
    return content if isinstance(content, dict) else None


def check_values(raw: Mapping[str, Any], where: str) -> None:
    """Refuse values that MindSpeed-MM has and this backend has not.

    Raises:
        ConfigError: with what to write.
    """
    for path, known in VALUES.items():
        content: Any = raw
        for part in path:
            content = content.get(part) if isinstance(content, dict) else None
        if isinstance(content, (str, bool)) and content in known:
            shown = str(content).lower() if isinstance(content, bool) else repr(content)
            raise ConfigError(f"{where}: {'.'.join(path)} {shown} cannot be had here; {known[content]}")


def check_places(raw: Mapping[str, Any], where: str) -> None:
    """Say of a key that stands in the wrong place, or is the other backend's, what to write.

    Raises:
        ConfigError: the first such key. Keys that nobody knows are left for the schema to refuse.
    """
    homes = _homes()
    for path in _unknown(raw, Fsdp2Config, ()):
        name, shown = path[-1], ".".join(path)
        found = [home for home in homes.get(name, ()) if home != path]
        if len(found) == 1:
            raise ConfigError(f"{where}: {shown!r} belongs under {'.'.join(found[0][:-1])}: write {'.'.join(found[0])}")
        if name in OTHERS:
            raise ConfigError(f"{where}: {shown} is a setting of another backend; here {OTHERS[name]}")
        if found:
            raise ConfigError(f"{where}: {shown!r} belongs elsewhere: write {' or '.join('.'.join(home) for home in found)}")


def _homes() -> dict[str, list[Path]]:
    """Where each key of the schema stands, nested sections included; their own names too."""
    homes: dict[str, list[Path]] = {}

    def walk(section: type[BaseModel], prefix: Path) -> None:
        for name in section.model_fields:
            path = (*prefix, name)
            if prefix:
                homes.setdefault(name, []).append(path)
            nested = section_at(section, (name,))
            if nested is not None:
                walk(nested, path)

    walk(Fsdp2Config, ())
    return homes


def _unknown(raw: Any, section: type[BaseModel] | None, prefix: Path) -> Iterator[Path]:
    if not isinstance(raw, Mapping) or section is None:
        return
    for key, value in raw.items():
        path = (*prefix, str(key))
        if key not in section.model_fields:
            yield path
        else:
            yield from _unknown(value, section_at(section, (key,)), path)
