"""The assembled vision-language model: one chunk of the pipeline."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from tangram.config.model import Grid, ImageEncoderConfig, ModelConfig
from tangram.errors import DataError
from tangram.losses.modes import samples_of
from tangram.losses.vocab_parallel import vocab_parallel_token_losses
from tangram.models.config import BuildOptions, get_model_config
from tangram.models.context import installed
from tangram.models.experts import routing_of
from tangram.models.media import media_places, own_rows, put_rows
from tangram.models.media_balance import BalancedMedia
from tangram.models.media_share import MediaShare
from tangram.models.payload import activation_shapes, pack, pending_features, unpack
from tangram.models.regions import collect, collect_context, divide, split_of, spread_over_context
from tangram.models.registry import find_component
from tangram.models.sequence import SequenceSplit
from tangram.models.text_plan import text_plan
from tangram.models.vision_groups import encoder_groups, installed_copies
from tangram.placement.topology import Chunk, Topology


class ImageEncoder(MegatronModule):
    """Vision encoder and projector, as far as this chunk holds them.

    ``post_process`` says that the projector is here.
    """

    def __init__(self, section: ImageEncoderConfig, options: BuildOptions, chunk: Chunk, groups: ProcessGroupCollection) -> None:
        super().__init__(config=get_model_config(section.vision_encoder, options))
        self.section, self.tp_group = section, groups.tp
        self.pre_process, self.post_process = chunk.vision_first, chunk.vision_last
        encoder, projector = section.vision_encoder, section.vision_projector
        self.encoder: Any = find_component(encoder)(encoder, options, chunk.vision, chunk.vision_first, groups)
        if encoder.deepstack_layers:
            self.encoder.add_mergers(projector)  # type: ignore[operator]
        if self.post_process:
            self.projector = find_component(projector)(projector, options, groups)

    def forward(self, hidden: Tensor, grids: list[Grid]) -> tuple[Tensor, list[Tensor]]:
        """Pixels or the previous stage's output -> hidden states [places, 1, h_vision] or, at the end, media tokens [n, 1, h_text]; and the
        DeepStack features [n, h_text] made here.

        With sequence parallelism hidden states are this rank's part; media tokens and features are always whole.
        """
        answer = self.encoder(hidden, grids)
        hidden, *features = answer if isinstance(answer, tuple) else (answer,)
        if self.post_process:
            hidden = self.encoder.restore_order(self.projector(self.encoder.projector_input(hidden, grids)), grids)
        return hidden, features

    def freeze(self, freeze_encoder: bool = False, freeze_projector: bool = False) -> None:
        """Take the encoder's or the projector's parameters out of training; those that take no part are never in it."""
        _freeze(self.encoder, freeze_encoder)
        for parameter in self.encoder.idle_parameters():
            parameter.requires_grad_(False)
            parameter.idle = not freeze_encoder
        if self.post_process:
            _freeze(self.projector, freeze_projector)


def _freeze(module: nn.Module, freeze: bool) -> None:
    for parameter in module.parameters():
        parameter.requires_grad_(not freeze)


class VLMModel(MegatronModule):
    """One chunk of an assembled model.

    Args:
        config: TransformerConfig of the whole, with the pipeline's sizes; the schedules read it.
    """

    def __init__(
        self, config: TransformerConfig, model: ModelConfig, options: BuildOptions, chunk: Chunk, topology: Topology, padded_vocab: int
    ) -> None:
        super().__init__(config=config)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        self.model, self.chunk, self.topology, self.tp_group = model, chunk, topology, groups.tp
        self.context, self.copies = installed(topology.context), installed_copies(topology)
        self.model_type = ModelType.encoder_or_decoder
        self.vp_stage = chunk.vp_rank if topology.virtual > 1 else None
        self.pre_process = chunk.position == 0
        self.post_process = chunk.position == len(topology.order) - 1
        self.share_embeddings_and_output_weights = not model.text_decoder.untie_embeddings_and_output_weights
        self.add_image_encoder, self.add_text_decoder = chunk.has_vision, chunk.has_text
        self.input_tensor: Tensor | None = None
        self.trained_before = True
        self.image_encoder: ImageEncoder | None = None
        self.media_share: MediaShare | BalancedMedia | None = None
        """What the image encoder runs on in this micro-batch, for those who watch it."""
        self.text_decoder: Any = None
        if chunk.has_vision:
            assert model.image_encoder is not None
            own = replace(options, tensor_model_parallel_size=topology.tensor_of("vision"), sequence_parallel=topology.divides_sequence("vision"))
            self.image_encoder = ImageEncoder(model.image_encoder, own, chunk, encoder_groups(groups, topology))
        if chunk.has_text:
            self.text_decoder = find_component(model.text_decoder)(
                model.text_decoder,
                options,
                chunk.text,
                first=chunk.text_first,
                last=chunk.text_last,
                shares_weight=self.share_embeddings_and_output_weights and chunk.text_first and chunk.text_last,
                padded_vocab=padded_vocab,
                groups=groups,
            )

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor | None] | None) -> None:
        """Take the previous stage's output; megatron-core's schedules call it before ``forward``."""
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """The word embedding or the output weight that this chunk holds, if any."""
        if self.chunk.text_first:
            return self.text_decoder.word_embeddings
        return self.text_decoder.output_layer.weight if self.chunk.text_last else None

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)

    def freeze(self, freeze_text_decoder: bool = False, freeze_image_encoder: bool = False, freeze_image_projection: bool = False) -> None:
        """Take whole components out of training."""
        before = self.topology.order[: self.chunk.position]
        self.trained_before = any(
            (chunk.has_vision and not freeze_image_encoder)
            or (chunk.vision_last and not freeze_image_projection)
            or (chunk.has_text and not freeze_text_decoder)
            for chunk in before
        )
        if self.image_encoder is not None:
            self.image_encoder.freeze(freeze_image_encoder, freeze_image_projection)
        if self.text_decoder is not None:
            _freeze(self.text_decoder, freeze_text_decoder)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_padded: Tensor | None = None,
        loss_weight: Tensor | None = None,
    ) -> dict[str, Any] | Tensor:
        """Run this chunk on one micro-batch.

        Args:
            input_ids: [b, s].
            position_ids: [3, b, s].
            attention_mask: [b, s], 1 for real tokens, or bool [b, s, s], True where a query sees a key; None: all real. Not looked at in a
                packed row.
            labels: [b, s], not shifted, -100 where not supervised. In a packed row the first label of each sample is -100.
            pixel_values: [n_patches, channels * frames * side * side]; None without images, and where the chunk needs none.
            image_grid_thw: [n_images, 3].
            pixel_values_videos: as ``pixel_values``.
            video_grid_thw: [n_videos, 3].
            cu_seqlens: [k + 1], the real lengths of a packed row's k samples added up; None: each row is one sample.
            cu_seqlens_padded: [k + 1], where each begins and the row ends; given with ``cu_seqlens``.
            loss_weight: scalar int64, what the micro-batch adds to the loss's denominator; needed in training where routers add to the loss.

        Returns:
            The tensor for the next chunk; on the last one a dict. With labels, ``loss_dict`` holds ``token_losses`` [n], fp32, of the n
            supervised positions and the number of the sample that each belongs to, ``samples`` [n], and ``logits`` is None: the head runs on
            those positions alone. Without labels, ``logits`` is [b, s, padded_vocab / TP]. Over context-parallel ranks both are whole on each,
            and gradients lead to its own tokens alone, so that sums over ranks count each token once.

        Raises:
            DataError: the image or video placeholders in ``input_ids`` are not as many as the tokens of the images or videos.
        """
        images, videos = _grids(image_grid_thw), _grids(video_grid_thw)
        hidden, features = self._received({"input_ids": input_ids, "image_grid_thw": image_grid_thw, "video_grid_thw": video_grid_thw})
        if self.image_encoder is not None:
            pixels = [patches for patches in (pixel_values, pixel_values_videos) if patches is not None]
            hidden, made = self._encode_media(hidden, pixels, images + videos, input_ids.device)
            features += made
        if self.text_decoder is None:
            assert hidden is not None
            return self._hand_on(hidden, features)
        split = split_of(input_ids.shape[1], self.config, self.tp_group, context=self.context)
        places = None
        if self.chunk.text_first or features:
            places = media_places(input_ids, (self.model.img_context_token_id, self.model.video_token_id))
        if self.chunk.text_first:
            merged = self._merge(self.text_decoder.embed(input_ids), input_ids, hidden, places, images, videos)
            hidden = divide(merged, split, self.tp_group)
        plan = text_plan(split, self.context, attention_mask, cu_seqlens, cu_seqlens_padded, input_ids.device)
        due = len(self.chunk.text)
        added = own_rows(features[:due], places, input_ids.shape[0], split, self.tp_group)
        routing = routing_of(self.model.text_decoder, split, input_ids, attention_mask, cu_seqlens, cu_seqlens_padded, loss_weight)
        hidden = self.text_decoder(hidden, split.take_context(split.pad(position_ids, -1), -1), plan, *added, routing)
        if not self.chunk.text_last:
            return self._hand_on(hidden, features[due:])
        hidden = collect(hidden, split, self.tp_group)
        if labels is None:
            logits = collect_context(self.text_decoder.project(hidden), split, self.context)
            return {"loss_dict": {}, "logits": logits.transpose(0, 1)}
        return {"loss_dict": self._losses(hidden, labels, cu_seqlens_padded, split), "logits": None}

    def _received(self, batch: dict[str, Tensor | None]) -> tuple[Tensor | None, list[Tensor]]:
        """The previous chunk's hidden states, none on the first chunk, and the DeepStack features that are still to be added."""
        if self.input_tensor is None:
            return None, []
        received = self.input_tensor
        if not self.trained_before and torch.is_grad_enabled():
            # No activations are kept for a gradient that nobody needs. The previous stage waits for one all the same.
            received.grad = torch.zeros_like(received)
            received = received.detach()
        hidden, *features = unpack(received, activation_shapes(self.topology, self.model, self.chunk.position - 1, batch))
        return hidden, features

    def _hand_on(self, hidden: Tensor, features: list[Tensor]) -> Tensor:
        """What the next chunk takes apart again."""
        due = pending_features(self.model, self.chunk)
        assert len(features) == due, f"chunk {self.chunk.position} has {len(features)} DeepStack features to hand on, by deepstack_layers {due}"
        return pack([hidden, *features])

    def _encode_media(self, hidden: Tensor | None, pixels: list[Tensor], grids: list[Grid], device: torch.device) -> tuple[Tensor, list[Tensor]]:
        """Run the vision path on all images, then all videos, of which context ranks and copies of the encoder have some each.

        See ``ImageEncoder.forward``.
        """
        assert self.image_encoder is not None
        section = self.image_encoder.section.vision_encoder
        share: MediaShare | BalancedMedia = MediaShare(section, grids, self.context, self.copies)
        if self.topology.vision_balance:
            share = BalancedMedia(section, grids, parallel_state.get_data_parallel_group(True), self.topology.context, device, self.copies)
        if self.chunk.vision_first:
            assert pixels or not grids, f"grids of {len(grids)} images and videos without their pixels"
            hidden = share.own_pixels(pixels, self.config.params_dtype, device)
        assert hidden is not None
        self.media_share = share
        hidden, features = self.image_encoder(hidden, share.own_grids)
        return share.collect(hidden) if self.chunk.vision_last else hidden, [share.collect(rows) for rows in features]

    def _merge(
        self, embeddings: Tensor, input_ids: Tensor, media: Tensor | None, places: Tensor | None, images: list[Grid], videos: list[Grid]
    ) -> Tensor:
        """Put the tokens of all images, then all videos [n, 1, h] where their placeholders stand in the text embeddings [s, b, h]."""
        for kind, token, grids in (("image", self.model.img_context_token_id, images), ("video", self.model.video_token_id, videos)):
            wanted, given = int((input_ids == (-1 if token is None else token)).sum()), self._tokens(grids)
            if wanted != given:
                raise DataError(
                    f"the micro-batch has {wanted} {kind} placeholder tokens but its {kind}s give {given}; "
                    f"the text and the {kind}s do not belong together"
                )
        return embeddings if media is None or places is None else put_rows(embeddings, places, media[:, 0])

    def _tokens(self, grids: list[Grid]) -> int:
        if self.model.image_encoder is None:
            return 0
        return sum(map(self.model.image_encoder.vision_encoder.tokens, grids))

    def _losses(self, hidden: Tensor, labels: Tensor, cu_seqlens_padded: Tensor | None, split: SequenceSplit) -> dict[str, Tensor]:
        """Of all supervised positions, on every context rank; the graph of each leads to its own alone."""
        rows, positions = (labels[:, 1:] != -100).nonzero(as_tuple=True)
        here, local = split.context_local_of(positions)
        section, targets, hidden = self.model.text_decoder, labels[rows, positions + 1][here], hidden[local, rows[here]]
        if section.loss_chunk_size is None:
            losses = vocab_parallel_token_losses(self.text_decoder.project(hidden), targets, section.vocab_size, self.tp_group)
        else:
            losses = self.text_decoder.chunked_losses(hidden, targets, section.loss_chunk_size)
        return {"token_losses": spread_over_context(losses, here, self.context), "samples": samples_of(rows, positions, cu_seqlens_padded)}


def _grids(thw: Tensor | None) -> list[Grid]:
    return [(t, h, w) for t, h, w in thw.tolist()] if thw is not None else []


def build_model_chunk(model: ModelConfig, chunk: Chunk, topology: Topology, dtype: torch.dtype, padded_vocab: int) -> VLMModel:
    """Build one chunk for this rank, its parameters uninitialised and without gradients' graph.

    Needs megatron-core's parallel state.
    """
    on_cpu = not torch.cuda.is_available()
    options = BuildOptions(
        dtype=dtype,
        tensor_model_parallel_size=topology.tensor,
        sequence_parallel=topology.sequence_parallel,
        expert_model_parallel_size=topology.expert,
        on_cpu=on_cpu,
    )
    config = get_model_config(model.text_decoder, options)
    config.pipeline_model_parallel_size = topology.pipeline
    config.virtual_pipeline_model_parallel_size = topology.virtual if topology.virtual > 1 else None
    config.pipeline_dtype = dtype
    config.variable_seq_lengths = True
    config.calculate_per_token_loss = True
    assert parallel_state.get_tensor_model_parallel_world_size() == topology.tensor
    return VLMModel(config, model, options, chunk, topology, padded_vocab)
