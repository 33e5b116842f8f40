"""The text decoder on megatron-core layers: embedding, a run of layers, final norm and head, wherever it is cut over the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from tangram.config.model import TextDecoderConfig
from tangram.families.qwen3_vl.config import Qwen3TextDecoderConfig
from tangram.losses.chunk import chunked_token_losses
from tangram.models.attention import SegmentPlan
from tangram.models.config import BuildOptions, get_model_config
from tangram.models.experts import Routing
from tangram.models.norms import NORMS
from tangram.models.registry import find_layer_spec
from tangram.models.rope import text_angles
from tangram.models.stack import LayerStack


class DecoderStack(LayerStack):
    """Layers and, on the last stage, the final norm."""

    final_layernorm: MegatronModule


class OutputLayer(ColumnParallelLinear):
    """The head. Whatever reads its weight goes through a call of it: with ``overlap_param_gather`` a weight is up to date only after its module's
    forward hook."""

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        use: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits, as megatron-core's; or what ``use`` makes of the weight [padded_vocab / TP, h]."""
        if use is not None:
            return use(self.weight if weight is None else weight), None
        output: tuple[Tensor, Tensor | None] = super().forward(input_, weight, runtime_gather_output)
        return output


class TextDecoder(MegatronModule):
    """Layers ``numbers`` of the decoder.

    Args:
        first: holds the word embedding.
        last: holds the final norm and the output layer.
        shares_weight: the output layer uses the word embedding of this very chunk and has no weight of its own.
    """

    def __init__(
        self,
        section: TextDecoderConfig,
        options: BuildOptions,
        numbers: range,
        *,
        first: bool,
        last: bool,
        shares_weight: bool,
        padded_vocab: int,
        groups: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=get_model_config(section, options))
        self.section, self.tp_group = section, groups.tp
        self.pre_process, self.post_process, self.shares_weight = first, last, shares_weight
        # The embedding and the head see whole sequences on every rank.
        undivided = get_model_config(section, replace(options, sequence_parallel=False))
        if first:
            self.embedding = LanguageModelEmbedding(
                undivided,
                vocab_size=padded_vocab,
                max_sequence_length=section.max_position_embeddings,
                position_embedding_type="rope",
                scatter_to_sequence_parallel=False,
                tp_group=groups.tp,
            )
        self.decoder = DecoderStack(self.config, find_layer_spec(section), numbers, groups)
        if last:
            self.decoder.final_layernorm = NORMS[section.normalization](self.config, section.hidden_size, section.layernorm_epsilon)
            self.output_layer = OutputLayer(
                section.hidden_size,
                padded_vocab,
                config=undivided,
                init_method=undivided.init_method,
                bias=False,
                skip_bias_add=False,
                gather_output=False,
                skip_weight_param_allocation=shares_weight,
                tp_group=groups.tp,
            )

    @property
    def word_embeddings(self) -> Tensor:
        """The embedding matrix of this tensor-parallel rank, [padded_vocab / TP, h]."""
        return self.embedding.word_embeddings.weight

    def embed(self, input_ids: Tensor) -> Tensor:
        """[b, s] -> [s, b, h]."""
        return self.embedding(input_ids=input_ids, position_ids=None)

    def angles(self, position_ids: Tensor) -> Tensor:
        """Rotary angles [s, b, 1, head_dim] of positions [3, b, s]."""
        section = self.section
        return text_angles(position_ids, section.head_dim, section.rope_theta, section.mrope_section)

    def forward(
        self,
        hidden: Tensor,
        position_ids: Tensor,
        plan: SegmentPlan | None,
        features: Sequence[Tensor] = (),
        places: Tensor | None = None,
        routing: Routing | None = None,
    ) -> Tensor:
        """Run the layers and, on the last stage, the final norm: [s, b, h] -> [s, b, h].

        With sequence parallelism ``hidden`` is this rank's part; positions [3, b, s] and the plan are those of the whole.

        Args:
            features: DeepStack features [n, h], added after the first layers here, one for each.
            places: [n], where they are added; see ``tangram.models.media``.
            routing: what experts must know of the micro-batch.
        """
        hidden, _ = self.decoder(hidden, self.angles(position_ids), [plan] * len(self.decoder.numbers), features, places, routing)
        return self.decoder.final_layernorm(hidden) if self.post_process else hidden

    def chunked_losses(self, hidden: Tensor, targets: Tensor, chunk_size: int) -> Tensor:
        """Cross-entropy of each token, fp32 [n], from hidden states [n, h], without logits of them all. See ``chunked_token_losses``."""
        # As in the output layer's own forward: the gradient of the hidden states is summed over the parts of the vocabulary.
        copied = copy_to_tensor_model_parallel_region(hidden, group=self.tp_group)

        def losses(weight: Tensor) -> Tensor:
            return chunked_token_losses(copied, weight, targets, chunk_size, vocab_size=self.section.vocab_size, tp_group=self.tp_group)

        found, _ = self.output_layer(hidden, weight=self.word_embeddings if self.shares_weight else None, use=losses)
        return found

    def project(self, hidden: Tensor) -> Tensor:
        """Logits over this rank's part of the padded vocabulary: [..., h] -> [..., padded_vocab / TP]."""
        logits, _ = self.output_layer(hidden, weight=self.word_embeddings if self.shares_weight else None)
        return logits


class Qwen3TextDecoder(TextDecoder):
    """The decoder of Qwen3-VL: rotary pairs may go to time, height and width in turn."""

    section: Qwen3TextDecoderConfig

    def angles(self, position_ids: Tensor) -> Tensor:
        section = self.section
        interleaved = section.mrope_interleaved
        return text_angles(position_ids, section.head_dim, section.rope_theta, section.mrope_section, interleaved=interleaved)
