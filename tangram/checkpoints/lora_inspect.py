"""What is in the directory of a LoRA adapter."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from tangram.checkpoints.kinds import has_rank_folders
from tangram.checkpoints.lora_adapter import open_adapter, read_adapter_manifest
from tangram.checkpoints.lora_config import read_adapter_config
from tangram.checkpoints.reader import count_elements
from tangram.checkpoints.safetensors_io import SafetensorsFile

if TYPE_CHECKING:
    from tangram.checkpoints.inspect import Inspection


def describe_adapter(found: Inspection, path: Path, hf_dir: str | Path | None) -> None:
    """Fill in a description; without a base at hand, names and shapes are not checked, and that is said."""
    ranks = has_rank_folders(path)
    found.format = f"LoRA adapter, {'mp_rank directory' if ranks else 'PEFT directory'}"
    found.add_files(sorted(path.glob("*/mp_rank_*/*.pt" if ranks else "*.safetensors")))
    with found.noting():
        config = read_adapter_config(path)
        targets = config.targets if isinstance(config.targets, str) else ", ".join(sorted(config.targets))
        found.facts |= {"rank": config.rank, "alpha": config.alpha, "rslora": bool(config.raw.get("use_rslora")), "targets": targets}
        found.facts["base"] = config.base
    manifest = None
    with found.noting():
        manifest = read_adapter_manifest(path)
    if manifest is not None:
        found.split = {
            "tensor_parallel": manifest.tensor_parallel,
            "pipeline_parallel": len(manifest.llm_pp_layers[0]),
            "vit_pp_layers": manifest.vit_pp_layers,
            "llm_pp_layers": manifest.llm_pp_layers,
        }
    if not ranks:
        with found.noting():
            infos = SafetensorsFile(path / "adapter_model.safetensors").infos if found.files else {}
            found.add_tensors(infos)
            found.parameters = sum(count_elements(info.shape) for info in infos.values())
    if found.problems:
        return
    base_known = manifest is not None or hf_dir is not None or (config.base is not None and Path(config.base, "config.json").is_file())
    if not base_known:
        found.facts["not checked"] = "names and shapes, since the base is not here; give its directory with --hf"
        return
    with found.noting():
        adapter = open_adapter(path, base_dir=hf_dir)
        found.family, found.key_layout = adapter.family.name, adapter.key_layout
        found.facts["adapted modules"] = dict(sorted(Counter(module.rpartition(".")[2] for module in adapter.ranks).items()))
        if ranks:
            stored = adapter.reader.names()
            found.add_tensors(stored)
            found.parameters = sum(count_elements(info.shape) for info in stored.values())
