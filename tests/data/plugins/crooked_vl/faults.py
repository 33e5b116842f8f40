"""The faults: each is a mistake that somebody who copies a family may make."""

from dataclasses import replace

import torch
from megatron.core import parallel_state
from megatron.core.transformer.spec_utils import ModuleSpec

from tangram.families.qwen2_5_vl.config import from_hf_config
from tangram.families.qwen2_5_vl.tensors import tensor_table
from tangram.models.attention import SegmentAttention
from tangram.models.norms import RMSNorm
from tangram.models.specs import layer_spec
from tangram.models.text import TextDecoder
from tangram.placement.table import Source
from tangram.platform.operators import rms_norm


def with_text(**changes):
    """A config reader whose text decoder is another."""

    def read(hf):
        model = from_hf_config(hf)
        return model.model_copy(update={"text_decoder": model.text_decoder.model_copy(update=changes)})

    return read


def sections_turned_round(hf):
    """Height and width get the frequencies of time, and time theirs."""
    model = from_hf_config(hf)
    return with_text(mrope_section=list(reversed(model.text_decoder.mrope_section)))(hf)


def norms_swapped(model, padded_vocab):
    """The weight of each norm of a decoder layer goes to the other."""
    names = {"model.language_model.layers.{i}.input_layernorm.weight": "model.language_model.layers.{i}.post_attention_layernorm.weight"}
    names |= {new: old for old, new in names.items()}
    return [
        replace(rule, sources=tuple(Source(names.get(source.name, source.name), source.shape, source.stacked) for source in rule.sources))
        for rule in tensor_table(model, padded_vocab)
    ]


class Unscaled(SegmentAttention):
    """Scores are not divided by the root of a head's width."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.scale = 1.0


def unscaled_spec(section) -> ModuleSpec:
    spec = layer_spec(section)
    spec.submodules.self_attention.submodules.core_attention = Unscaled
    return spec


class OneRankNorm(RMSNorm):
    """Its gradient is that of the tokens of the first tensor-parallel rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = parallel_state.get_tensor_model_parallel_rank() == 0
        return rms_norm(x, self.weight if first else self.weight.detach(), self.eps)


def one_rank_spec(section) -> ModuleSpec:
    spec = layer_spec(section)
    spec.submodules.pre_mlp_layernorm = OneRankNorm
    return spec


def windows_everywhere(hf):
    """Vision blocks that see a whole frame see a window."""
    model = from_hf_config(hf)
    encoder = model.image_encoder
    vision = encoder.vision_encoder.model_copy(update={"fullatt_block_indexes": []})
    return model.model_copy(update={"image_encoder": encoder.model_copy(update={"vision_encoder": vision})})


class LoudDecoder(TextDecoder):
    """Embeddings are multiplied by the root of the width, as another family does."""

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().embed(input_ids) * self.section.hidden_size**0.5


COMPONENTS = {
    "crooked_unscaled": (TextDecoder, unscaled_spec),
    "crooked_one_rank": (TextDecoder, one_rank_spec),
    "crooked_loud": (LoudDecoder, layer_spec),
}
FAULTS = {
    "none": {},
    "rope": {"from_hf_config": sections_turned_round},
    "norms": {"tensor_table": norms_swapped},
    "scale": {"from_hf_config": with_text(model_id="crooked_unscaled")},
    "embedding": {"from_hf_config": with_text(model_id="crooked_loud")},
    "vision": {"from_hf_config": windows_everywhere},
    "gradient": {"from_hf_config": with_text(model_id="crooked_one_rank")},
}
