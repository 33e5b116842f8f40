"""Chat templates: conversations to pieces of text, each trained on or not. Named in data.json; a family names its default."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tangram.data.conversation import Message
from tangram.errors import ConfigError, suggest


@dataclass(frozen=True)
class Piece:
    """A run of text that is tokenised on its own, so that an answer's tokens are those that the model would produce after the prompt."""

    text: str
    answer: bool = False
    """True: what the assistant says, with the token that ends its turn."""


@dataclass(frozen=True)
class Template:
    """The texts around the parts of a conversation; ``{content}`` stands for the part.

    Args:
        default_system: system prompt of conversations that have none; None: they go without.
        answer_end: ends an answer and is learnt with it.
        after_answer: follows ``answer_end``; not learnt.
        image_token: the token that is repeated for every merged cell of an image.
        media_start, media_end: stand around an image's tokens.
        media_tokens: all tokens that never carry a label.
    """

    system: str
    user: str
    answer_end: str
    after_answer: str
    image_token: str
    media_start: str
    media_end: str
    media_tokens: tuple[str, ...]
    default_system: str | None = None

    def turns(self, system: str | None, messages: Sequence[Message]) -> Iterator[list[Piece]]:
        """The pieces of each pair of user and assistant messages; the system prompt belongs to the first."""
        prompt = system if system is not None else self.default_system
        opening = "" if prompt is None else self.system.replace("{content}", prompt)
        for question, answer in zip(messages[::2], messages[1::2], strict=True):
            yield [
                Piece(opening + self.user.replace("{content}", question.content)),
                Piece(answer.content + self.answer_end, answer=True),
                Piece(self.after_answer),
            ]
            opening = ""


_templates: dict[str, Template] = {}


def register_template(name: str, template: Template) -> None:
    """Add a template.

    Raises:
        ConfigError: the name is taken.
    """
    if name in _templates:
        raise ConfigError(f"template {name!r} is registered already")
    _templates[name] = template


def get_template(name: str | None) -> Template:
    """The template of that name.

    Args:
        name: None: neither data.json nor the family names one.

    Raises:
        ConfigError: no such template, or no name.
    """
    if name is None:
        raise ConfigError("this model family has no chat template here; register one in a plug-in and name it in basic_parameters.template")
    if name not in _templates:
        raise ConfigError(f"unknown template {name!r}{suggest(name, _templates)}; known: {', '.join(sorted(_templates))}")
    return _templates[name]


register_template(
    "qwen2vl",
    Template(
        system="<|im_start|>system\n{content}<|im_end|>\n",
        user="<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n",
        answer_end="<|im_end|>",
        after_answer="\n",
        image_token="<|image_pad|>",
        media_start="<|vision_start|>",
        media_end="<|vision_end|>",
        media_tokens=("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_pad|>"),
        default_system="You are a helpful assistant.",
    ),
)
register_template("qwen3_vl", replace(get_template("qwen2vl"), default_system=None))
