"""Checkpoints whose special tokens lie outside their own vocabulary, as tests like to cut them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = ("vision_start_token_id", "vision_end_token_id", "video_token_id", "image_token_id")


def vocabulary(config: dict[str, Any]) -> int:
    """Rows of the embedding that a Hugging Face config.json names."""
    return int(config.get("text_config", {}).get("vocab_size", config.get("vocab_size", 0)))


def runnable_directory(hf_dir: Path, work: Path) -> tuple[Path, dict[str, int]]:
    """A directory with the weights of ``hf_dir`` whose special tokens can be embedded.

    A model with a vocabulary of 320 entries cannot embed ``image_token_id`` 151655. There the last entries of the vocabulary stand in, for
    both sides of a comparison alike, in a copy of config.json in ``work``; the weights are linked, not copied.

    Returns:
        The directory (``hf_dir`` itself where nothing has to stand in), and what each replaced key of config.json became.
    """
    config = json.loads((hf_dir / "config.json").read_text(encoding="utf-8"))
    size = vocabulary(config)
    outside = [key for key in SPECIAL_TOKENS if config.get(key) is not None and config[key] >= size]
    if not outside:
        return hf_dir, {}
    replaced = {key: size - 1 - number for number, key in enumerate(SPECIAL_TOKENS)}
    work.mkdir(parents=True, exist_ok=True)
    for file in hf_dir.iterdir():
        if file.name != "config.json":
            (work / file.name).symlink_to(file.resolve())
    nested = {**config["text_config"], **{k: v for k, v in replaced.items() if k in config["text_config"]}} if "text_config" in config else {}
    changed = {**config, **replaced, **({"text_config": nested} if nested else {})}
    (work / "config.json").write_text(json.dumps(changed, indent=1), encoding="utf-8")
    return work, replaced
