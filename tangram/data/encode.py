"""A conversation as tokens, labels and patches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tangram.data.conversation import IMAGE_PLACEHOLDER, Conversation
from tangram.data.media import Media, Medium
from tangram.data.template import Piece, Template
from tangram.data.tokenizer import PAD, Tokenizer
from tangram.errors import ConfigError, DataError

if TYPE_CHECKING:
    import numpy as np

IGNORE = -100
"""Label of a position that is not learnt."""


@dataclass
class EncodedSample:
    """One row of a micro-batch, not padded yet."""

    id: int
    input_ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    """As long as ``input_ids`` and not shifted."""
    images: list[Medium] = field(default_factory=list)
    """Those whose tokens stand in ``input_ids``."""
    videos: list[Medium] = field(default_factory=list)
    image_pixels: list[np.ndarray] | None = None
    """Of the same images, ``[t * h * w, C * T * P * P]`` fp32 each; None where pixels are not wanted."""
    video_pixels: list[np.ndarray] | None = None
    turns_dropped: int = 0
    """Turns left out because of the cutoff."""


class SampleEncoder:
    """Renders the template, expands placeholders, makes labels and reads images.

    Learnt are what the assistant says and the token that ends its turn. ``mask_history`` learns only the last answer that is kept.
    ``train_on_prompt`` learns every token, the system prompt and the template's own texts included. Media tokens are never learnt.

    A sample longer than ``cutoff`` loses whole turns from its end. If its first turn does not fit, that is an error: neither an answer nor the
    tokens of an image are ever cut.

    Args:
        media: None for a model without a vision encoder.
        cutoff: longest sample, tokens.
        needs_pixels: False: only the headers of media files are read, and the pixels are None.

    Raises:
        ConfigError: ``train_on_prompt`` with ``mask_history``, or a media token that the vocabulary does not hold.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: Template,
        media: Media | None,
        cutoff: int,
        *,
        train_on_prompt: bool = False,
        mask_history: bool = False,
        needs_pixels: bool = True,
    ) -> None:
        if train_on_prompt and mask_history:
            raise ConfigError("basic_parameters: train_on_prompt and mask_history exclude each other; set one of them to false")
        self.tokenizer = tokenizer
        self.template = template
        self.media = media
        self.cutoff = cutoff
        self.train_on_prompt = train_on_prompt
        self.mask_history = mask_history
        self.needs_pixels = needs_pixels
        frame = (template.image_token, template.media_start, template.media_end)
        self._image_id, self._start_id, self._end_id = [tokenizer.id(token) for token in frame] if media else [-1, -1, -1]
        self._media_ids = frozenset(tokenizer.id(token) for token in template.media_tokens) if media else frozenset()

    def __call__(self, sample: Conversation) -> EncodedSample:
        """Encode one conversation.

        Raises:
            DataError: an image that cannot be used, a first turn longer than the cutoff, media tokens written out in the text, or no label at all;
                the message names the sample.
        """
        encoded = self.tokens(sample)
        self.add_pixels(encoded, sample)
        return encoded

    def add_pixels(self, encoded: EncodedSample, sample: Conversation) -> None:
        """Read the pixels of the media that stand in ``encoded``, where pixels are wanted.

        Raises:
            DataError: a file that cannot be decoded.
        """
        if self.media and self.needs_pixels:
            encoded.image_pixels = [self.media.image_pixels(path, sample.where) for path in sample.images[: len(encoded.images)]]
            encoded.video_pixels = []

    def tokens(self, sample: Conversation) -> EncodedSample:
        """Encode one conversation without pixels; of media files only the headers are read.

        Raises:
            DataError: as a call, but for what only decoding finds.
        """
        if sample.images and self.media is None:
            raise DataError(f"{sample.where}: holds {len(sample.images)} images but the model has no image_encoder")
        images = [self.media.image(path, sample.where) for path in sample.images] if self.media else []
        encoded = EncodedSample(sample.id)
        turns = list(self.template.turns(sample.system, sample.messages))
        kept_label_start = 0
        for number, turn in enumerate(turns):
            used = len(encoded.images)
            ids, labels, taken = self._turn(turn, images[used:], sample.where)
            total = len(encoded.input_ids) + len(ids)
            if total > self.cutoff:
                if number == 0:
                    raise DataError(
                        f"{sample.where}: the first turn takes {total} tokens ({sum(map(self._count, images[:taken]))} of images) but the cutoff "
                        f"(seq_length) is {self.cutoff}; raise it, or lower image_max_pixels, or shorten the sample"
                    )
                encoded.turns_dropped = len(turns) - number
                break
            kept_label_start = len(encoded.labels)
            encoded.input_ids += ids
            encoded.labels += labels
            encoded.images += images[used : used + taken]
        if self.mask_history:
            encoded.labels[:kept_label_start] = [IGNORE] * kept_label_start
        if all(label == IGNORE for label in encoded.labels):
            raise DataError(f"{sample.where}: 0 supervised tokens; the sample teaches nothing, so remove it or correct the template")
        return encoded

    def blank(self) -> EncodedSample:
        """A row of one token without a label: it adds nothing to loss or gradients."""
        pixels: list[np.ndarray] | None = [] if self.needs_pixels else None
        return EncodedSample(id=-1, input_ids=[self.tokenizer.id(PAD)], labels=[IGNORE], image_pixels=pixels, video_pixels=pixels)

    def _count(self, medium: Medium) -> int:
        return self.media.tokens(medium) if self.media else 0

    def _turn(self, turn: list[Piece], images: list[Medium], where: str) -> tuple[list[int], list[int], int]:
        """Ids and labels of one turn, and how many of ``images`` it takes."""
        ids: list[int] = []
        labels: list[int] = []
        taken = 0
        for piece in turn:
            for number, text in enumerate(piece.text.split(IMAGE_PLACEHOLDER)):
                if number > 0:
                    media = [self._start_id, *[self._image_id] * self._count(images[taken]), self._end_id]
                    ids += media
                    labels += [IGNORE] * len(media)
                    taken += 1
                tokens = self.tokenizer.encode(text)
                written = self._media_ids.intersection(tokens)
                if written:
                    raise DataError(
                        f"{where}: the text holds the media token {self.tokenizer.decode(sorted(written)[:1])!r} written out; "
                        f"write {IMAGE_PLACEHOLDER} and list the file under images"
                    )
                ids += tokens
                labels += tokens if piece.answer or self.train_on_prompt else [IGNORE] * len(tokens)
        return ids, labels, taken
