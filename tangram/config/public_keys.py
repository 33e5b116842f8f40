"""Keys of MindSpeed-MM's public model.json, data.json and tools.json that are no fields here.

Four kinds, so that a public file ports with few edits and nothing in it is passed over in silence:

- a key that only repeats another value is accepted if it agrees with it (``Repeats``),
- a key that may switch something on that is not there is accepted while it leaves it off (``Only``),
- a section of something that is not there is accepted while it is switched off (``OffBy``),
- a key without effect is an error that says why (``NoEffect``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tangram.config.parsing import Section, section_at
from tangram.errors import ConfigError

Raw = Mapping[str, Any]


@dataclass(frozen=True)
class RunFacts:
    """What the run says of values that the files may repeat; None: not known yet, so not compared."""

    dtype: str | None = None
    seq_length: int | None = None
    sequence_parallel: bool | None = None
    context_parallel_size: int | None = None
    tensor_model_parallel_size: int | None = None
    vision_tensor_model_parallel_size: int | None = None
    """None, and the one above known: that one."""


@dataclass(frozen=True)
class Repeats:
    """A key that says again what ``of`` says; ``value`` computes it, and returns None where it cannot."""

    of: str
    value: Callable[[Raw, RunFacts], Any]


@dataclass(frozen=True)
class Only:
    """A key that may only have the values that say what is done anyway."""

    values: tuple[Any, ...]
    why: str


@dataclass(frozen=True)
class NoEffect:
    """A key that nothing here reads."""

    why: str


@dataclass(frozen=True)
class OffBy:
    """A whole section of something that is not there; taken while its key ``switch`` leaves it off."""

    switch: str
    why: str


Entry = Repeats | Only | NoEffect | OffBy
Path = tuple[str, ...]


def _dtype(raw: Raw, facts: RunFacts) -> str | None:
    return facts.dtype


def _rope_scaling(raw: Raw, facts: RunFacts) -> dict[str, Any] | None:
    """null repeats nothing."""
    if raw.get("rope_scaling") is None:
        return None
    return {"mrope_interleaved": raw.get("mrope_interleaved", False), "mrope_section": raw.get("mrope_section"), "rope_type": "default"}


_OFF = Only((False, None), "it is not supported yet")
_NULL = Only((None,), "it is not supported yet")
_ROPE_FUSION = NoEffect("rotary positions are fused where the platform can")
_TYPES: dict[str, Entry] = {
    "params_dtype": Repeats("the run's dtype", _dtype),
    "bf16": Repeats("the run's dtype", lambda raw, facts: None if facts.dtype is None else facts.dtype == "bf16"),
    "fp16": Repeats("the run's dtype", lambda raw, facts: None if facts.dtype is None else facts.dtype == "fp16"),
}
_STAGES = "the stages of a component are the numbers above 0 in its pipeline_num_layers"
_CONTEXT = "parallel.context_parallel_size (--context-parallel-size) holds for all components, and its ranks encode whole pictures of their own"
_HETERO: dict[str, Entry] = {"pp": Only((None,), _STAGES), "cp": Only((None,), _CONTEXT)}
_SPLITS: dict[str, Entry] = {
    "context_parallel_size": Repeats(
        "parallel.context_parallel_size (--context-parallel-size), which holds for all components",
        lambda raw, facts: None if raw.get("context_parallel_size") is None else facts.context_parallel_size,
    ),
    "sequence_parallel": Repeats(
        "parallel.sequence_parallel (--sequence-parallel), which holds for all components",
        lambda raw, facts: None if raw.get("sequence_parallel") is None else facts.sequence_parallel,
    ),
    "canonical_model": _OFF,
}

MODEL: dict[Path, dict[str, Entry]] = {
    (): {
        "text_encoder": _NULL,
        "video_encoder": _NULL,
        "audio_encoder": _NULL,
        "reward_process": _OFF,
        "patch": NoEffect("there are no patches to switch; weights of a Hugging Face directory load without one"),
        "lora_apply_modules": _NULL,
        "lora_mixed_training": _OFF,
        "lora_save_full_weight": _OFF,
    },
    ("image_encoder",): {
        "tp": Repeats(
            "parallel.vision_tensor_model_parallel_size (--vision-tensor-model-parallel-size; absent: --tensor-model-parallel-size)",
            lambda raw, facts: None if raw.get("tp") is None else facts.vision_tensor_model_parallel_size or facts.tensor_model_parallel_size,
        ),
        **_HETERO,
    },
    ("image_encoder", "vision_encoder"): {
        **_TYPES,
        **_SPLITS,
        "intermediate_size": Repeats("ffn_hidden_size", lambda raw, facts: raw.get("ffn_hidden_size")),
        "num_query_groups": Repeats("num_attention_heads", lambda raw, facts: raw.get("num_attention_heads")),
        "kv_channels": Repeats("hidden_size / num_attention_heads", lambda raw, facts: _ratio(raw, "hidden_size", "num_attention_heads")),
        "llm_hidden_size": NoEffect("vision_projector.hidden_size is the width that the text decoder gets"),
        "use_fused_rotary_pos_emb": _ROPE_FUSION,
        "bias_activation_fusion": Only((False,), "there is no such fusion"),
        "post_layer_norm": Only((False,), "there is no norm after the last block"),
        "attention_mask_type": Only(("general",), "masks follow from the images and windows"),
        "use_vit_dp": _OFF,
        "custom_recompute_split": _NULL,
    },
    ("image_encoder", "vision_projector"): {
        **_TYPES,
        **_SPLITS,
        "num_layers": Only((1,), "a projector is one MLP"),
        "gated_linear_unit": Only((False,), "a projector is a plain MLP"),
        "bias_activation_fusion": Only((False,), "there is no such fusion"),
        "use_postshuffle_norm": Only((False, None), "the projector's norm comes before merging; that of DeepStack mergers always after it"),
    },
    ("text_decoder",): {
        **_TYPES,
        **_SPLITS,
        "tp": Repeats(
            "parallel.tensor_model_parallel_size (--tensor-model-parallel-size)",
            lambda raw, facts: None if raw.get("tp") is None else facts.tensor_model_parallel_size,
        ),
        **_HETERO,
        "seq_length": Repeats("the run's seq_length", lambda raw, facts: facts.seq_length),
        "disable_bias_linear": Repeats("add_bias_linear, negated", lambda raw, facts: not raw.get("add_bias_linear", False)),
        "group_query_attention": Repeats(
            "num_query_groups < num_attention_heads", lambda raw, facts: raw.get("num_query_groups") != raw.get("num_attention_heads")
        ),
        "use_qk_norm": Repeats("qk_layernorm", lambda raw, facts: raw.get("qk_layernorm", False)),
        "rope_scaling": Repeats("mrope_section and mrope_interleaved", _rope_scaling),
        "use_fused_rotary_pos_emb": _ROPE_FUSION,
        "bias_activation_fusion": Only((False,), "there is no such fusion"),
        "attention_softmax_in_fp32": NoEffect("the attention kernels accumulate in fp32 by themselves"),
        "parallel_output": Only((True,), "logits stay split over tensor-parallel ranks in training"),
        "use_remove_padding": _OFF,
        "use_te": _OFF,
        "num_moe_experts": Only((None,), "experts are for model_id qwen3_vl_moe"),
        "tokenizer_type": NoEffect("model_name_or_path of data.json names the tokenizer"),
        "is_encoder_decoder": _OFF,
        "use_infer_fa": _OFF,
    },
}

_ON_THE_FLY = NoEffect("samples are processed when they are needed, by num_workers of the run")

DATA: dict[Path, dict[str, Entry]] = {
    ("dataset_param", "preprocess_parameters"): {
        "use_fast_tokenizer": Only((True,), "the fast tokenizer is used"),
        "split_special_tokens": _OFF,
        "image_resolution": NoEffect("image_max_pixels and image_min_pixels bound the size"),
        "video_resolution": NoEffect("video_max_pixels and video_min_pixels bound the size"),
        "image_do_pan_and_scan": _OFF,
        "crop_to_patches": _OFF,
        "use_audio_in_video": _OFF,
        "audio_sampling_rate": NoEffect("audio is not supported yet"),
        "trust_remote_code": _OFF,
        "fix_mistral_regex": _OFF,
    },
    ("dataset_param", "basic_parameters"): {
        "preprocess_on_fly": Only((True,), "samples are processed when they are needed"),
        "async_preprocess": _ON_THE_FLY,
        "async_preprocess_buffer_size": _ON_THE_FLY,
        "tool_format": _NULL,
        "neat_packing": NoEffect("samples that share a row never see each other"),
        "use_pmcc_data": _OFF,
    },
    ("dataset_param", "attr"): {
        **dict.fromkeys(("audios", "chosen", "rejected"), _NULL),
        "packing": Only((False, None), "basic_parameters.packing switches it on"),
        **dict.fromkeys(("ranking", "pretrain"), _OFF),
    },
    ("dataloader_param",): {
        "batch_size": NoEffect("micro_batch_size of the run is used"),
        "num_workers": NoEffect("num_workers of the run is used"),
        "seed": NoEffect("the run's seed is used"),
        "persistent_workers": NoEffect("workers always persist"),
        "data_sharding": _OFF,
        "priority_mode": _NULL,
    },
}

TOOLS: dict[Path, dict[str, Entry]] = {
    (): {"sorafeature": NoEffect("it belongs to video generation")},
    ("profile",): {
        "profile_type": Only(("static",), "only the static profiler is there"),
        "dynamic_param": NoEffect("only the static profiler is there"),
    },
}


def _ratio(raw: Raw, above: str, below: str) -> int | None:
    try:
        return int(raw[above] // raw[below])
    except (KeyError, TypeError, ZeroDivisionError):
        return None


def take_public_keys(
    section: type[Section], raw: dict[str, Any], table: Mapping[Path, Mapping[str, Entry]], where: str, facts: RunFacts | None = None
) -> dict[str, Any]:
    """A copy of ``raw`` without the table's keys, which have been checked. A key that ``section`` has a field for is left alone.

    Raises:
        ConfigError: keys without effect (all of them in one line), or a key whose value is not the only one that holds here.
    """
    useless: list[str] = []
    whys: dict[str, None] = {}

    def walk(part: dict[str, Any], path: Path) -> dict[str, Any]:
        nested = section_at(section, path)
        known = nested.model_fields if nested else {}
        entries = table.get(path, {})
        kept = {}
        for key, value in part.items():
            entry = None if key in known else entries.get(key)
            if entry is None:
                kept[key] = walk(value, (*path, key)) if isinstance(value, dict) else value
            elif isinstance(entry, NoEffect):
                useless.append(".".join((*path, key)))
                whys[f"{key}: {entry.why}"] = None
            else:
                _check(entry, part, value, f"{where}: {'.'.join((*path, key))}", facts or RunFacts())
        return kept

    result = walk(raw, ())
    if len(useless) == 1:
        raise ConfigError(f"{where}: {useless[0]!r} is a MindSpeed-MM key without effect here; remove it ({next(iter(whys)).split(': ', 1)[1]})")
    if useless:
        raise ConfigError(f"{where}: MindSpeed-MM keys without effect here; remove them: {', '.join(useless)} ({'; '.join(whys)})")
    return result


def _check(entry: Repeats | Only | OffBy, part: Raw, value: Any, where: str, facts: RunFacts) -> None:
    if isinstance(entry, OffBy):
        if value is not None and (not isinstance(value, dict) or value.get(entry.switch)):
            raise ConfigError(f"{where} cannot be had here: {entry.why}; remove it")
        return
    if isinstance(entry, Only):
        if not any(value == v and type(value) is type(v) for v in entry.values):
            allowed = " or ".join(_json(v) for v in entry.values)
            raise ConfigError(f"{where}: {_json(value)} cannot be had here, only {allowed}: {entry.why}; remove the key")
        return
    expected = entry.value(part, facts)
    if expected is not None and value != expected:
        raise ConfigError(f"{where}: {_json(value)} does not agree with {entry.of}, which is {_json(expected)}; correct it or remove the key")


def _json(value: Any) -> str:
    return {None: "null", True: "true", False: "false"}.get(value, repr(value)) if isinstance(value, (bool, type(None))) else repr(value)


def keys_markdown() -> str:
    """docs/public-keys.md."""
    lines = [
        "# Keys of MindSpeed-MM's files",
        "",
        "What happens to a key of a public model.json, data.json or tools.json that is no key here. A key in none of these tables is an unknown key.",
        "This page is written by `python -m tangram.config.public_keys`.",
        "",
    ]
    for name, table in (("model.json", MODEL), ("data.json", DATA), ("tools.json", TOOLS)):
        lines += [f"## {name}", "", "| key | taken | because |", "|---|---|---|"]
        for path, entries in table.items():
            for key, entry in entries.items():
                match entry:
                    case Repeats():
                        taken, because = "if it agrees", f"it repeats {entry.of}"
                    case Only():
                        taken, because = f"as {' or '.join(_json(value) for value in entry.values)}", entry.why
                    case OffBy():
                        taken, because = f"while its `{entry.switch}` is off", entry.why
                    case NoEffect():
                        taken, because = "no: remove it", entry.why
                lines.append(f"| `{'.'.join((*path, key))}` | {taken} | {because} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    import sys

    sys.stdout.write(keys_markdown())
