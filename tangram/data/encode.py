"""A conversation as tokens, labels and patches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from tangram.data.conversation import IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER, Conversation
from tangram.data.media import Media, Medium
from tangram.data.patches import PixelBytes
from tangram.data.template import PLACEHOLDER, ChatTemplate, Piece
from tangram.data.tokenizer import Tokenizer
from tangram.errors import ConfigError, DataError

if TYPE_CHECKING:
    import numpy as np

Pixels: TypeAlias = "PixelBytes | np.ndarray"
"""Patches of a medium; as an array: their values, fp32."""
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
    image_pixels: Sequence[Pixels] | None = None
    """Of the same images, ``[t * h * w, C * T * P * P]`` each; None where pixels are not wanted."""
    video_pixels: Sequence[Pixels] | None = None
    turns_dropped: int = 0
    """Turns left out because of the cutoff."""


@dataclass(frozen=True)
class _Part:
    """What a turn is made of: a text, or the tokens of a medium."""

    text: str
    """As the tokenizer is given it; of a medium what stands for it."""
    learnt: bool = False
    ids: list[int] | None = None
    """Of a medium; None: those of the text."""
    joins: bool = False
    """The text is tokenised together with the part before, as the model's own processor does with the time of a video's first step."""


@dataclass
class _Turn:
    images: int
    videos: int
    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)


class SampleEncoder:
    """Renders the template, expands placeholders, makes labels and reads media.

    Learnt are what the assistant says, its calls of tools included, and the token that ends its turn. ``mask_history`` learns only the last
    answer that is kept. ``train_on_prompt`` learns every token, the system prompt and the template's own texts included. The tokens of media
    are never learnt, nor are the times between those of a video.

    Args:
        media: None for a model without a vision encoder.
        cutoff: longest sample, tokens.
        truncation: what goes of a longer one. "turns": whole turns from its end; if its first turn does not fit, that is an error. "sample": any
            longer sample is an error. Neither an answer nor the tokens of a medium are ever cut.
        needs_pixels: False: only the headers of media files are read, and the pixels are None.

    Raises:
        ConfigError: ``train_on_prompt`` with ``mask_history``, or a token of the template that the tokenizer does not have.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        media: Media | None,
        cutoff: int,
        *,
        truncation: Literal["turns", "sample"] = "turns",
        train_on_prompt: bool = False,
        mask_history: bool = False,
        needs_pixels: bool = True,
    ) -> None:
        if train_on_prompt and mask_history:
            raise ConfigError("basic_parameters: train_on_prompt and mask_history exclude each other; set one of them to false")
        self.tokenizer = tokenizer
        self.template = template.bind(tokenizer.special)
        self.media = media
        self.cutoff = cutoff
        self.truncation = truncation
        self.train_on_prompt = train_on_prompt
        self.mask_history = mask_history
        self.needs_pixels = needs_pixels
        self._media_ids = {token: tokenizer.id(token) for token in template.media.all} if media else {}
        self._media_numbers = frozenset(self._media_ids.values())
        bos = tokenizer.special.get("bos_token") if template.begins_with_bos else None
        # Its text stays empty: behind it Llama's tokenizers would not put the space that a sample's first word has.
        self._opening = [] if bos is None else [_Part("", train_on_prompt, [tokenizer.id(bos)])]

    def __call__(self, sample: Conversation) -> EncodedSample:
        """Encode one conversation.

        Raises:
            DataError: a medium that cannot be used, a conversation longer than the cutoff that ``truncation`` does not shorten, placeholders that
                do not fit the media, media tokens written out in the text, or no label at all; the message names the sample.
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
            encoded.video_pixels = [self.media.video_pixels(video, sample.where) for video in sample.videos[: len(encoded.videos)]]

    def tokens(self, sample: Conversation) -> EncodedSample:
        """Encode one conversation without pixels; of media files only the headers are read.

        Raises:
            DataError: as a call, but for what only decoding finds.
        """
        self._check_media(sample)
        images = [self.media.image(path, sample.where) for path in sample.images] if self.media else []
        videos = [self.media.video(video, sample.where) for video in sample.videos] if self.media else []
        rendered = self.template.turns(sample)
        self._check_placeholders(sample, rendered)
        kept = self._fitting(sample.where, rendered, images, videos)
        encoded = EncodedSample(sample.id, turns_dropped=len(rendered) - len(kept))
        while len(kept) < len(rendered):
            # A template may write a turn otherwise when it is the last: what is kept must be what it writes for those turns alone.
            again = self.template.turns(replace(sample, messages=sample.messages[: 2 * len(kept)]))
            if again == rendered[: len(kept)]:
                break
            rendered, kept = again, self._fitting(sample.where, again, images, videos)
            encoded.turns_dropped += len(rendered) - len(kept)
        for number, turn in enumerate(kept):
            encoded.input_ids += turn.ids
            encoded.labels += [IGNORE] * len(turn.ids) if self.mask_history and number + 1 < len(kept) else turn.labels
        encoded.images = images[: sum(turn.images for turn in kept)]
        encoded.videos = videos[: sum(turn.videos for turn in kept)]
        if all(label == IGNORE for label in encoded.labels):
            raise DataError(f"{sample.where}: 0 supervised tokens; the sample teaches nothing, so remove it or correct the template")
        return encoded

    def blank(self) -> EncodedSample:
        """A row of one token without a label: it adds nothing to loss or gradients."""
        pixels: list[Pixels] | None = [] if self.needs_pixels else None
        return EncodedSample(id=-1, input_ids=[self.tokenizer.pad_id], labels=[IGNORE], image_pixels=pixels, video_pixels=pixels)

    def _check_media(self, sample: Conversation) -> None:
        tokens = self.template.media
        for kind, found, token in (("images", sample.images, tokens.image), ("videos", sample.videos, tokens.video)):
            if found and self.media is None:
                raise DataError(f"{sample.where}: holds {len(found)} {kind} but the model has no image_encoder")
            if found and token is None:
                raise DataError(f"{sample.where}: holds {len(found)} {kind} but the model has no token for {kind}; remove the sample")

    def _check_placeholders(self, sample: Conversation, rendered: list[list[Piece]]) -> None:
        """The reader of records has compared those of the messages; the descriptions of tools may hold some, and a template may lose some."""
        for placeholder, media in ((IMAGE_PLACEHOLDER, sample.images), (VIDEO_PLACEHOLDER, sample.videos)):
            marks = sum(_count_of(placeholder, turn) for turn in rendered)
            if marks != len(media):
                raise DataError(
                    f"{sample.where}: {marks} {placeholder} placeholders in what the template {self.template.name} writes but "
                    f"{len(media)} files; each file needs one placeholder, and tools may not hold the word"
                )

    def _fitting(self, where: str, rendered: list[list[Piece]], images: Sequence[Medium], videos: Sequence[Medium]) -> list[_Turn]:
        """The leading turns that fit the cutoff, at least one."""
        turns: list[_Turn] = []
        length = 0
        for turn in self._encoded(where, rendered, images, videos):
            turns.append(turn)
            length += len(turn.ids)
            if length > self.cutoff and self.truncation == "turns":
                break
        if length <= self.cutoff:
            return turns
        if len(turns) > 1 and self.truncation == "turns":
            return turns[:-1]
        cells = [self._media_ids.get(token or "") for token in (self.template.media.image, self.template.media.video)]
        media = sum(number in cells for turn in turns for number in turn.ids)
        raise DataError(
            f"{where}: {'the first turn takes' if self.truncation == 'turns' else 'takes'} {length} tokens ({media} of media) but the cutoff "
            f"(cutoff_len, else seq_length) is {self.cutoff}; raise it, or lower image_max_pixels or video_max_pixels, or shorten the sample"
        )

    def _encoded(self, where: str, rendered: list[list[Piece]], images: Sequence[Medium], videos: Sequence[Medium]) -> Iterator[_Turn]:
        """Ids and labels of one turn after another."""
        pictures, films = iter(images), iter(videos)
        laid_out = ([*([] if number else self._opening), *self._parts(turn, pictures, films)] for number, turn in enumerate(rendered))
        if self.tokenizer.adds_space:
            # Parts on their own would each get a space in front.
            turns = list(laid_out)
            dealt = iter(self.tokenizer.encode_parts([part.text for parts in turns for part in parts]))
            found = ((parts, [next(dealt) for _ in parts]) for parts in turns)
        else:
            found = ((parts, self._tokenised(parts)) for parts in laid_out)
        for pieces, (parts, ids) in zip(rendered, found, strict=True):
            turn = _Turn(_count_of(IMAGE_PLACEHOLDER, pieces), _count_of(VIDEO_PLACEHOLDER, pieces))
            for part, tokens in zip(parts, ids, strict=True):
                self._add(turn, part, tokens, where)
            yield turn

    def _add(self, turn: _Turn, part: _Part, tokens: list[int], where: str) -> None:
        if part.ids is not None:
            tokens = part.ids
        elif not self._media_numbers.isdisjoint(tokens):
            token = next(token for token, number in self._media_ids.items() if number in tokens)
            raise DataError(
                f"{where}: the text holds the media token {token!r} written out; write {IMAGE_PLACEHOLDER} or {VIDEO_PLACEHOLDER} and list the file"
            )
        turn.ids += tokens
        turn.labels += tokens if part.learnt else [IGNORE] * len(tokens)

    def _parts(self, pieces: list[Piece], images: Iterator[Medium], videos: Iterator[Medium]) -> Iterator[_Part]:
        for piece in pieces:
            for text in PLACEHOLDER.split(piece.text):
                if text == IMAGE_PLACEHOLDER:
                    yield self._medium(self.template.media.image, self._count(next(images)))
                elif text == VIDEO_PLACEHOLDER:
                    yield from self._video(next(videos))
                else:
                    yield _Part(text, piece.answer or self.train_on_prompt)

    def _video(self, video: Medium) -> Iterator[_Part]:
        tokens, count = self.template.media, self._count(video)
        if not tokens.timestamps:
            yield self._medium(tokens.video, count)
            return
        for step, seconds in zip(range(video.grid[0]), video.timestamps, strict=True):
            yield _Part(f"<{seconds:.1f} seconds>", joins=step == 0)
            yield self._medium(tokens.video, count // video.grid[0])

    def _medium(self, token: str | None, count: int) -> _Part:
        """The tokens of an image, or of a video or one step of it."""
        assert token is not None  # _check_media
        tokens = self.template.media
        text = tokens.start + token + tokens.end
        start, end = [[self._media_ids[token]] if token else [] for token in (tokens.start, tokens.end)]
        return _Part(text, ids=[*start, *[self._media_ids[token]] * count, *end])

    def _count(self, medium: Medium) -> int:
        assert self.media is not None  # _check_media
        return self.media.tokens(medium)

    def _tokenised(self, parts: Sequence[_Part]) -> list[list[int]]:
        """Ids of each part's text; none for media."""
        ids: list[list[int]] = []
        for number, part in enumerate(parts):
            if part.joins:
                ids[-1:] = self.tokenizer.encode_parts([parts[number - 1].text, part.text])
            else:
                following = parts[number + 1] if number + 1 < len(parts) else None
                later = part.ids is not None or not part.text or (following is not None and following.joins)
                ids.append([] if later else self.tokenizer.encode(part.text))
        return ids


def _count_of(placeholder: str, pieces: list[Piece]) -> int:
    return sum(piece.text.count(placeholder) for piece in pieces)
