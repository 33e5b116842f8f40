"""Another language model's weights for the text decoder: a directory of a text-only model such as Qwen2 or Vicuna."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tangram.checkpoints.derived_readers import SubsetReader
from tangram.checkpoints.hf_directory import TIED_HEAD, HFDirectory
from tangram.checkpoints.reader import AliasReader, CanonicalReader, read_whole, same_bits
from tangram.config.model import TextDecoderConfig
from tangram.errors import CheckpointError, ConfigError
from tangram.placement.blocks import check_names

if TYPE_CHECKING:
    from tangram.checkpoints.conversion import ModelSplit

_FROM_TEXT_ONLY = ((r"^model\.(?!language_model\.)", "model.language_model."),)
_TO_TEXT_ONLY = ((r"^model\.language_model\.", "model."),)
_EMBEDDING = "model.language_model.embed_tokens.weight"


class LanguageModel:
    """Weights of a text-only model under the canonical names of a vision-language model's text decoder.

    Args:
        path: Hugging Face directory with keys ``model.layers.*``, ``model.embed_tokens.weight``, ``model.norm.weight`` and ``lm_head.weight``.
        split: of the vision-language model.

    Raises:
        ConfigError: sizes that do not fit, with both numbers.
        CheckpointError, PlacementError: tensors missing, unexpected or damaged.
    """

    def __init__(self, path: str, split: ModelSplit) -> None:
        self._hf = HFDirectory(path, replace(split.family, from_hub=_FROM_TEXT_ONLY, to_hub=_TO_TEXT_ONLY))
        _compare(path, self._hf.config, split.model.text_decoder)
        names = split.component_names("text")
        source: CanonicalReader = self._hf
        held = set(self._hf.names())
        self._repeats_head = split.tied and TIED_HEAD in held
        if not split.tied and TIED_HEAD not in held and self._hf.config.get("tie_word_embeddings"):
            source = AliasReader(source, {TIED_HEAD: _EMBEDDING})
            held.add(TIED_HEAD)
        check_names(sorted(held - {TIED_HEAD} if self._repeats_head else held), names, path)
        wrong = [name for name in names if source.names()[name].shape != split.shapes[name]]
        if wrong:
            raise CheckpointError(
                f"{path}: {min(wrong)} has shape {source.names()[min(wrong)].shape}, the text decoder {split.shapes[min(wrong)]}; "
                f"{len(wrong)} tensors do not fit"
            )
        self.reader: CanonicalReader = SubsetReader(source, names)

    @property
    def fingerprint(self) -> str:
        """As ``HFDirectory.fingerprint``."""
        return self._hf.fingerprint

    def check_head(self) -> None:
        """Check that a head of its own equals the embedding where the vision-language model ties them; it would be lost.

        Raises:
            CheckpointError: it differs.
        """
        if self._repeats_head and not same_bits(read_whole(self._hf, TIED_HEAD), read_whole(self._hf, _EMBEDDING)):
            raise CheckpointError(
                f"{self._hf.path}: {TIED_HEAD} differs from the embedding, but the vision-language model ties them and has no place for it; "
                "use a language model with tied embeddings"
            )


def _compare(path: str, config: dict[str, Any], text: TextDecoderConfig) -> None:
    """Compare what changes the numbers; a key that is absent has the default of transformers' Llama, Qwen2 and Qwen3."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    heads = config.get("num_attention_heads")
    head_dim = config.get("head_dim") or (text.head_dim if not heads else config.get("hidden_size", 0) // heads)
    kind = rope.get("rope_type", rope.get("type", "default"))
    compared = [
        ("num_hidden_layers", config.get("num_hidden_layers"), text.num_layers),
        ("hidden_size", config.get("hidden_size"), text.hidden_size),
        ("intermediate_size", config.get("intermediate_size"), text.ffn_hidden_size),
        ("num_attention_heads", heads, text.num_attention_heads),
        ("num_key_value_heads", config.get("num_key_value_heads", heads), text.num_query_groups),
        ("vocab_size", config.get("vocab_size"), text.vocab_size),
        ("head_dim", head_dim, text.head_dim),
        ("hidden_act", config.get("hidden_act", "silu"), text.activation_func),
        ("rms_norm_eps", config.get("rms_norm_eps", 1e-6), text.layernorm_epsilon),
        ("rope_theta", config.get("rope_theta") or rope.get("rope_theta") or 10000.0, text.rope_theta),
        ("rope_scaling", "default" if kind == "mrope" else kind, "default"),
        ("use_sliding_window", bool(config.get("use_sliding_window")), False),
    ]
    found = [f"{key} is {theirs} there but {ours} in the vision-language model" for key, theirs, ours in compared if theirs not in (None, ours)]
    if found:
        raise ConfigError(f"{path}: does not fit as text decoder: {'; '.join(found)}; give a language model of the same sizes")
