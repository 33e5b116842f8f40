"""The tokenizer of a Hugging Face folder, read without transformers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from tangram.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

    from tangram.config.model import ModelConfig

IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
TURN_START, TURN_END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"


class Tokenizer:
    """Text to ids and back; special tokens inside a text are taken as such.

    Args:
        fast: the ``tokenizers`` object.
        where: the file it was read from, for messages.
    """

    def __init__(self, fast: FastTokenizer, where: str = "tokenizer") -> None:
        self._fast = fast
        self.where = where

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read ``tokenizer.json``.

        Raises:
            ConfigError: the file is missing or damaged.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"{path}: no such file; model_name_or_path must name a folder with tokenizer.json "
                "(transformers' AutoTokenizer.from_pretrained(...).save_pretrained(folder) writes it)"
            )
        return _read(str(path.resolve()), path.stat().st_mtime_ns)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._fast.encode(text, add_special_tokens=False).ids
        return ids

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

    @cached_property
    def _highest_id(self) -> int:
        return max(self.vocabulary().values())


@lru_cache(maxsize=4)
def _read(path: str, modified: int) -> Tokenizer:
    """Read a tokenizer file once per process (a second or so for 150,000 tokens); ``modified`` makes a changed file another one."""
    from tokenizers import Tokenizer as FastTokenizer

    try:
        return Tokenizer(FastTokenizer.from_file(path), path)
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{path}: not a tokenizer file: {' '.join(str(error).split())}") from None


def load_tokenizer(folder: str | Path, model: ModelConfig) -> Tokenizer:
    """The tokenizer of ``folder``, checked against the special ids and the vocabulary size of ``model``.

    Raises:
        ConfigError: missing or damaged files, or ids that differ.
    """
    tokenizer = Tokenizer.from_folder(folder)
    wanted = {VISION_START: model.vision_start_token_id, IMAGE: model.img_context_token_id, VIDEO: model.video_token_id}
    present = {token: number for token, number in wanted.items() if number is not None and model.image_encoder}
    tokenizer.check_ids(present, model.text_decoder.vocab_size)
    return tokenizer
