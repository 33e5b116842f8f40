"""Where the numbers of steps go besides log and metrics.jsonl: TensorBoard and Weights & Biases, under the names that metrics.jsonl has.

Their packages are imported only where they are asked for, on the rank that reports. Numbers that are not finite are written as such.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from tangram.config.parsing import read_yaml
from tangram.config.run import RunConfig
from tangram.config.tools import TensorboardConfig, WandbConfig
from tangram.config.yaml_config import dump
from tangram.errors import ConfigError
from tangram.training.logs import LOGGER
from tangram.training.records import StepRecord, row_of

ID_FILE = "wandb_id"
"""In ``tools.wandb.dir``: what a resumed run goes on with."""


class Writer(Protocol):
    """One place for records."""

    def write(self, record: StepRecord) -> None:
        """Add one step."""

    def close(self) -> None:
        """Everything is out."""


def open_writers(run: RunConfig, resumed_step: int) -> list[Writer]:
    """Those that ``tools`` asks for.

    Args:
        resumed_step: steps after it are written anew.

    Raises:
        ConfigError: a service refuses the run.
    """
    makers: list[tuple[bool, Callable[[], Writer]]] = [
        (run.tools.tensorboard.enable, lambda: TensorboardWriter(run.tools.tensorboard, run.training.save, resumed_step)),
        (run.tools.wandb.enable, lambda: WandbWriter(run.tools.wandb, run, resumed_step)),
    ]
    return [make() for wanted, make in makers if wanted]


def numbers_of(record: StepRecord) -> dict[str, float]:
    """All fields that are numbers, but the step."""
    return {name: float(value) for name, value in row_of(record).items() if name not in ("step", "samples_digest")}


class TensorboardWriter:
    """Event files. Events of steps that a resumed run repeats are purged, so that each curve has one point per step."""

    def __init__(self, tensorboard: TensorboardConfig, save: str | None, resumed_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = tensorboard.log_dir or str(Path(save or ".", "tensorboard"))
        self._events: Any = SummaryWriter(folder, purge_step=resumed_step + 1 if resumed_step else None)
        LOGGER.info("TensorBoard: tensorboard --logdir %s", folder)

    def write(self, record: StepRecord) -> None:
        """Scalars of one step, on the disk when this returns."""
        for name, value in numbers_of(record).items():
            self._events.add_scalar(name, value, record.step)
        self._events.flush()

    def close(self) -> None:
        """Close the file."""
        self._events.close()


class WandbWriter:
    """A run of Weights & Biases. A resumed run goes on with the id of the first; steps that it repeats are left out by the service."""

    def __init__(self, settings: WandbConfig, run: RunConfig, resumed_step: int) -> None:
        import wandb

        folder = Path(settings.dir or run.training.save or ".")
        folder.mkdir(parents=True, exist_ok=True)
        known = folder / ID_FILE
        number = settings.id or (known.read_text(encoding="utf-8").strip() if resumed_step and known.is_file() else None)
        given = {key: getattr(settings, key) for key in ("project", "name", "entity", "group", "mode")}
        try:
            self._run: Any = wandb.init(
                **given, tags=settings.tags or None, dir=str(folder), id=number, resume="allow" if number else None, config=_as_plain(run)
            )
        except wandb.errors.Error as error:
            why = " ".join(str(error).split())
            raise ConfigError(f"tools.wandb: {why}; log in with `wandb login`, set mode to offline, or set enable to false") from None
        known.write_text(f"{self._run.id}\n", encoding="utf-8")

    def write(self, record: StepRecord) -> None:
        """Numbers of one step."""
        self._run.log(numbers_of(record), step=record.step)

    def close(self) -> None:
        """Wait until all is sent, or written where nothing is sent."""
        self._run.finish()


def _as_plain(run: RunConfig) -> dict[str, Any]:
    """The run file, whose every value is plain."""
    content: dict[str, Any] = read_yaml(dump(run))
    return content
