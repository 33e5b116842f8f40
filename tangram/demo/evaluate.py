"""Let an exported model answer questions about pictures, and count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tangram.align.reference import forward_arguments, load_reference
from tangram.config.data import PreprocessParameters
from tangram.config.parsing import read_mapping
from tangram.data.collate import Collator
from tangram.data.conversation import Conversation, Message
from tangram.data.encode import IGNORE, EncodedSample, SampleEncoder
from tangram.data.images import ImageProcessor
from tangram.data.media import Media
from tangram.data.template import get_template
from tangram.data.tokenizer import TURN_END, load_tokenizer
from tangram.demo.data import DemoData, Question
from tangram.families.base import get_family

BATCH = 50
LONGEST_ANSWER = 12
"""Tokens, the end of the turn included."""


@dataclass(frozen=True)
class Answered:
    """A question and what the model said."""

    question: Question
    said: str

    @property
    def right(self) -> bool:
        return self.said == self.question.answer


@dataclass(frozen=True)
class Score:
    """Accuracy on the held-out questions of one type.

    Args:
        majority: the most frequent true answer; ``majority_accuracy`` is what always giving it would reach.
    """

    kind: str
    right: int
    count: int
    majority: str
    majority_accuracy: float

    @property
    def accuracy(self) -> float:
        return self.right / self.count

    @property
    def sees(self) -> bool:
        """True where the model answers better than the majority answer by more than three standard errors of its own accuracy, so
        not by luck."""
        error = (self.accuracy * (1 - self.accuracy) / self.count) ** 0.5
        return self.accuracy - 3 * error > self.majority_accuracy


def scores(answers: Sequence[Answered], data: DemoData) -> list[Score]:
    """One score per question type, in the order of appearance."""
    found = []
    for kind in dict.fromkeys(answer.question.kind for answer in answers):
        mine = [answer for answer in answers if answer.question.kind == kind]
        found.append(Score(kind, sum(answer.right for answer in mine), len(mine), *data.majority(kind)))
    return found


class Answerer:
    """A Hugging Face model that answers by greedy decoding.

    Args:
        hf_dir: exported model, with tokenizer and image processor files.
        min_pixels, max_pixels: limits on a picture's size, as in training.
    """

    def __init__(self, hf_dir: Path, min_pixels: int, max_pixels: int) -> None:
        config = read_mapping(hf_dir / "config.json")
        family = get_family(config["model_type"])
        model = family.from_hf_config(config)
        assert model.image_encoder is not None
        limits = PreprocessParameters(model_name_or_path=str(hf_dir), image_min_pixels=min_pixels, image_max_pixels=max_pixels)
        self.tokenizer = load_tokenizer(hf_dir, model)
        images = ImageProcessor.from_config(limits, model.image_encoder.vision_encoder)
        self._encode = SampleEncoder(self.tokenizer, get_template(family.template), Media(images), cutoff=model.text_decoder.max_position_embeddings)
        self._collate = Collator(family.rope_index, model, self.tokenizer.pad_id)
        self._end = self.tokenizer.id(TURN_END)
        self.model: Any = load_reference(hf_dir)

    def answer(self, questions: Sequence[Question]) -> list[Answered]:
        """Answer all questions, in their order."""
        found: dict[int, str] = {}
        # Questions of like length go together, so that little is computed for padding.
        prompts = [self._prompt(number, question) for number, question in enumerate(questions)]
        prompts.sort(key=lambda prompt: len(prompt.input_ids))
        for start in range(0, len(prompts), BATCH):
            part = prompts[start : start + BATCH]
            for prompt, said in zip(part, self._continue(part), strict=True):
                found[prompt.id] = said
        return [Answered(question, found[number]) for number, question in enumerate(questions)]

    def _prompt(self, number: int, question: Question) -> EncodedSample:
        messages = (Message("user", f"<image>{question.text}"), Message("assistant", question.answer))
        sample = self._encode(Conversation(number, question.text, None, messages, (str(question.image),)))
        asked = next(place for place, label in enumerate(sample.labels) if label != IGNORE)
        return EncodedSample(sample.id, sample.input_ids[:asked], [IGNORE] * asked, sample.images, image_pixels=sample.image_pixels)

    @torch.no_grad()
    def _continue(self, prompts: Sequence[EncodedSample]) -> Iterator[str]:
        """The most likely continuation of every prompt up to the end of its turn."""
        rows = [EncodedSample(p.id, list(p.input_ids), list(p.labels), p.images, image_pixels=p.image_pixels) for p in prompts]
        said: list[list[int]] = [[] for _ in rows]
        open_rows = set(range(len(rows)))
        for _ in range(LONGEST_ANSWER):
            batch = self._collate([[row] for row in rows])
            hidden = self.model.model(**forward_arguments(self.model, batch)).last_hidden_state
            last = batch["attention_mask"].sum(dim=1) - 1
            # The head runs on the last position of each row alone: its vocabulary is most of this model's work.
            tokens = self.model.lm_head(hidden[torch.arange(len(rows)), last]).argmax(dim=-1).tolist()
            for number in sorted(open_rows):
                if tokens[number] == self._end:
                    open_rows.discard(number)
                else:
                    said[number].append(tokens[number])
            if not open_rows:
                break
            for row, token in zip(rows, tokens, strict=True):
                row.input_ids.append(token)
                row.labels.append(IGNORE)
        return iter([self.tokenizer.decode(tokens).strip() for tokens in said])
