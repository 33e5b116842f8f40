"""Registers the families that ship with Tangram; importing it twice is harmless."""

from tangram.families.base import register_family
from tangram.families.llava import LLAVA
from tangram.families.qwen2_5_vl import QWEN2_5_VL
from tangram.families.qwen2_vl import QWEN2_VL
from tangram.families.qwen3_vl import QWEN3_VL
from tangram.families.qwen3_vl_moe import QWEN3_VL_MOE

for _family in (QWEN2_VL, QWEN2_5_VL, QWEN3_VL, QWEN3_VL_MOE, LLAVA):
    register_family(_family)
