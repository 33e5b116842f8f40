"""Copies of Qwen2.5-VL, each with one fault: what ``tangram align --trace`` has to find.

transformers runs all of them as Qwen2.5-VL. The config.json of one has ``model_type`` ``crooked_`` and the name of the fault.
"""

from dataclasses import replace

from transformers import AutoConfig, AutoModelForImageTextToText, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from tangram.families import register_family
from tangram.families.qwen2_5_vl import QWEN2_5_VL
from tangram.models.registry import register_component

from .faults import COMPONENTS, FAULTS
from .tiny import tiny_of


def named(name, read):
    """A config reader whose models are of the family ``name``."""
    return lambda hf: read(hf).model_copy(update={"model_id": name})



for model_id, parts in COMPONENTS.items():
    register_component(model_id, *parts)
for fault, changes in FAULTS.items():
    name = f"crooked_{fault}"
    config = type(f"Config_{fault}", (Qwen2_5_VLConfig,), {"model_type": name})
    AutoConfig.register(name, config)
    AutoModelForImageTextToText.register(config, type(f"Model_{fault}", (Qwen2_5_VLForConditionalGeneration,), {"config_class": config}))
    family = replace(QWEN2_5_VL, name=name, model_ids=(), tiny=tiny_of(name), **changes)
    register_family(replace(family, from_hf_config=named(name, family.from_hf_config)))
