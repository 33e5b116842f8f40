"""What a sample is once its record has been read and checked, whatever format the record had."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER, AUDIO_PLACEHOLDER = "<image>", "<video>", "<audio>"
"""Marks in a text; each stands for the next medium of its kind."""

Role = Literal["user", "assistant", "observation", "function_call"]
ASKING: tuple[Role, ...] = ("user", "observation")
"""Roles of even places; an observation is what a tool answered."""
ANSWERING: tuple[Role, ...] = ("assistant", "function_call")
"""Roles of odd places, which are learnt."""


@dataclass(frozen=True)
class Message:
    role: Role
    content: str


@dataclass(frozen=True)
class Video:
    """One video: a file, or its frames as image files."""

    paths: tuple[str, ...]
    """The file alone, or the frames in order."""
    is_frames: bool = False
    sample_fps: float | None = None
    """Frames per second of a list of frames; None: not said."""


@dataclass(frozen=True)
class Conversation:
    """One sample, checked: asking and answering roles take turns, and the texts hold as many placeholders as there are media."""

    id: int
    """Index in the dataset."""
    where: str
    """File and record, for messages."""
    system: str | None
    messages: tuple[Message, ...]
    images: tuple[str, ...] = ()
    """Paths, media folder included."""
    videos: tuple[Video, ...] = ()
    tools: str | None = None
    """JSON list of tool descriptions, as the record gives it."""

    def media_paths(self) -> list[str]:
        """Files of the images, then those of the videos."""
        return [*self.images, *(path for video in self.videos for path in video.paths)]
