"""The tokenizer of a Hugging Face folder, read without transformers."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from tangram.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

    from tangram.config.model import ModelConfig

IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
TURN_START, TURN_END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
LLAVA_IMAGE = "<image>"

SETTINGS_FILE = "tokenizer_config.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """Text to ids and back; special tokens inside a text are taken as such.

    Args:
        fast: the ``tokenizers`` object.
        where: the file it was read from, for messages.
        special: texts of special tokens by their names in tokenizer_config.json, such as ``eos_token``.
    """

    def __init__(self, fast: FastTokenizer, where: str = "tokenizer", special: Mapping[str, str] | None = None) -> None:
        self._fast = fast
        self.where = where
        self.special = dict(special or {})

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read ``tokenizer.json`` and, where it is there, the special tokens of ``tokenizer_config.json``.

        Raises:
            ConfigError: the first is missing, or one is damaged.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"{path}: no such file; model_name_or_path must name a folder with tokenizer.json "
                "(transformers' AutoTokenizer.from_pretrained(...).save_pretrained(folder) writes it)"
            )
        return cls(_read(str(path.resolve()), path.stat().st_mtime_ns), str(path), _special_tokens(Path(folder) / SETTINGS_FILE))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._fast.encode(text, add_special_tokens=False).ids
        return ids

    def encode_parts(self, parts: Sequence[str]) -> list[list[int]]:
        """Ids of the joined text, dealt to the parts in which they end."""
        found = self._fast.encode("".join(parts), add_special_tokens=False)
        ends = list(accumulate(map(len, parts)))
        dealt: list[list[int]] = [[] for _ in parts]
        for token, (_, end) in zip(found.ids, found.offsets, strict=True):
            dealt[bisect_left(ends, max(end, 1))].append(token)
        return dealt

    @cached_property
    def adds_space(self) -> bool:
        """Whether a text gets a space in front of it, as in Llama's vocabularies: its parts cannot be tokenised on their own then."""
        return bool(self._fast.encode("a", add_special_tokens=False).tokens != ["a"])

    @cached_property
    def pad_id(self) -> int:
        """Id that fills up rows: of ``<|endoftext|>``, or where the vocabulary has none of ``pad_token``, else of ``eos_token``.

        Raises:
            ConfigError: the vocabulary has none of them.
        """
        named = [self.special[name] for name in ("pad_token", "eos_token") if name in self.special]
        return self.id(next((token for token in (PAD, *named) if self._fast.token_to_id(token) is not None), PAD))

    def decode(self, ids: list[int]) -> str:
        """The text of ``ids``, special tokens included."""
        text: str = self._fast.decode(ids, skip_special_tokens=False)
        return text

    def id(self, token: str) -> int:
        """Id of a token.

        Raises:
            ConfigError: the vocabulary does not hold it.
        """
        number: int | None = self._fast.token_to_id(token)
        if number is None:
            raise ConfigError(f"{self.where}: the vocabulary has no token {token!r}; model_name_or_path must hold the model's own tokenizer")
        return number

    def vocabulary(self) -> dict[str, int]:
        """Every token with its id, added ones included."""
        tokens: dict[str, int] = self._fast.get_vocab(with_added_tokens=True)
        return tokens

    def check_ids(self, wanted: Mapping[str, int], vocab_size: int) -> None:
        """Compare the ids of special tokens, and the largest id, with what the model expects.

        Raises:
            ConfigError: with the token and both numbers.
        """
        for token, number in wanted.items():
            if self.id(token) != number:
                raise ConfigError(f"{self.where}: {token!r} has id {self.id(token)} but model.json expects {number}; take both from one model")
        if self._highest_id >= vocab_size:
            raise ConfigError(f"{self.where}: ids reach {self._highest_id} but model.json's vocab_size is {vocab_size}; take both from one model")

    @property
    def _highest_id(self) -> int:
        return _highest_id(self._fast, self._fast.get_vocab_size())


@lru_cache(maxsize=4)
def _highest_id(fast: FastTokenizer, size: int) -> int:
    """Of all tokens; looked up once per file (a third of a second for 150,000 tokens). ``size`` makes one that has grown another one."""
    return max(fast.get_vocab(with_added_tokens=True).values())


@lru_cache(maxsize=4)
def _read(path: str, modified: int) -> FastTokenizer:
    """Read a tokenizer file once per process (a second or so for 150,000 tokens); ``modified`` makes a changed file another one."""
    from tokenizers import Tokenizer as FastTokenizer

    try:
        return FastTokenizer.from_file(path)
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{path}: not a tokenizer file: {' '.join(str(error).split())}") from None


def _special_tokens(path: Path) -> dict[str, str]:
    """Special tokens by name; each stands in the file as a text, as an object with its ``content``, or as null."""
    if not path.is_file():
        return {}
    try:
        raw = json.loads(path.read_text(encoding="utf-8-sig"))
        tokens = {name: raw[name] for name in SPECIAL_TOKENS if raw.get(name) is not None}
        return {name: token if isinstance(token, str) else str(token["content"]) for name, token in tokens.items()}
    except (json.JSONDecodeError, AttributeError, TypeError, KeyError) as error:
        raise ConfigError(f"{path}: not a tokenizer's settings: {error}") from None


def load_tokenizer(folder: str | Path, model: ModelConfig) -> Tokenizer:
    """The tokenizer of ``folder``, checked against the special ids and the vocabulary size of ``model``.

    Raises:
        ConfigError: missing or damaged files, or ids that differ.
    """
    tokenizer = Tokenizer.from_folder(folder)
    # A model without a start token is a LLaVA.
    image = LLAVA_IMAGE if model.vision_start_token_id is None else IMAGE
    wanted = {VISION_START: model.vision_start_token_id, image: model.img_context_token_id, VIDEO: model.video_token_id}
    present = {token: number for token, number in wanted.items() if number is not None and model.image_encoder}
    tokenizer.check_ids(present, model.text_decoder.vocab_size)
    return tokenizer
