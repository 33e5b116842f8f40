"""Small vocabularies made on the spot: one token a character, and one like Llama's."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as FastTokenizer

from tangram.data.media import Medium
from tangram.data.tokenizer import PAD, TURN_END, TURN_START, Tokenizer

QWEN_TOKENS = (PAD, TURN_START, TURN_END, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_pad|>")


def characters(special: Sequence[str] = QWEN_TOKENS, **names: str) -> Tokenizer:
    """Every printable ASCII character is a token of its own.

    Args:
        special: special tokens, whole.
        names: as in tokenizer_config.json: ``eos_token=...``.
    """
    fast = FastTokenizer(models.WordLevel({character: number for number, character in enumerate(string.printable)}, unk_token="?"))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    fast.decoder = decoders.Fuse()
    fast.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return Tokenizer(fast, "characters", names)


def like_llama(corpus: Sequence[str], first_only: bool) -> FastTokenizer:
    """Pieces that begin with the space before a word, and bytes for what is unknown.

    Args:
        first_only: True: a space is put in front of a text alone, as in newer files; False: behind each special token too.
    """
    fast = FastTokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    fast.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<image>"]
    fast.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False))
    if first_only:
        fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        fast.pre_tokenizer = None
        fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", fast.token_to_id("<s>"))])
    return fast


class Shapes:
    """Media whose paths are their shapes: ``4x6`` is a grid of 4 x 6 patches, ``3x4x6`` a video of three steps."""

    def image(self, path: str, where: str) -> Medium:
        height, width = map(int, path.split("x"))
        return Medium((1, height, width))

    def video(self, video: Any, where: str) -> Medium:
        steps, height, width = map(int, video.paths[0].split("x"))
        return Medium((steps, height, width), 1.0, tuple(0.25 + step for step in range(steps)))

    def image_pixels(self, path: str, where: str) -> Any:
        return f"pixels of {path}"

    def video_pixels(self, video: Any, where: str) -> Any:
        return f"pixels of {video.paths[0]}"

    def tokens(self, medium: Medium) -> int:
        steps, height, width = medium.grid
        return steps * height * width // 4
