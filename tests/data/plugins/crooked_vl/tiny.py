"""A small checkpoint of a crooked family: Qwen2.5-VL's, under the names of ``state_dict()``, which transformers reads for any ``model_type``."""

import json

from safetensors.torch import load_file, save_file

from tangram.families.qwen2_5_vl import QWEN2_5_VL


def tiny_of(name):
    def write(out, seed, tied, spec, *, force=False) -> None:
        QWEN2_5_VL.tiny(out, seed, tied, spec, force=force)
        config, weights = out / "config.json", out / "model.safetensors"
        config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": name}))
        save_file({QWEN2_5_VL.canonical_name(key): value for key, value in load_file(weights).items()}, weights, metadata={"format": "pt"})

    return write
