"""What a training checkpoint says of the run that wrote it, and how one is found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from tangram.errors import CheckpointError
from tangram.placement.topology import Topology

FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
TRACKER_FILE = "latest_checkpointed_iteration.txt"
PACKAGES = ("tangram-mm", "torch", "megatron-core", "transformers")


@dataclass(frozen=True)
class RunFacts:
    """What identifies a run.

    Args:
        family: model family.
        topology: the split.
        data_parallel: data-parallel size.
        hf_config: content of config.json.
        tokenizer_hash: of the tokenizer's files.
        dataset_fingerprint: changes when the samples or their order do.
        seed: of init and data order.
        schedule: learning-rate schedule: name -> value.
        axes: sizes of the split that ``topology`` does not know: ``fully_shard``, ``ulysses`` and ``experts`` of the fsdp2 backend.
    """

    family: str
    topology: Topology
    data_parallel: int
    hf_config: Mapping[str, Any]
    tokenizer_hash: str
    dataset_fingerprint: str
    seed: int
    schedule: Mapping[str, Any]
    axes: Mapping[str, int] = field(default_factory=dict)

    def split(self) -> dict[str, Any]:
        """The split as plain data."""
        topology = self.topology
        return {
            "tensor": topology.tensor,
            # This one and context are absent where they say nothing, so that checkpoints from before there were any read alike.
            **({"vision_tensor": topology.tensor_of("vision")} if topology.vision_copies > 1 else {}),
            "pipeline": topology.pipeline,
            "virtual": topology.virtual,
            **({"context": topology.context} if topology.context > 1 else {}),
            **self._ways(),
            "data_parallel": self.data_parallel,
            "vit_pp_layers": [list(row) for row in topology.vision],
            "llm_pp_layers": [list(row) for row in topology.text],
            **self.axes,
        }

    def has_ranks_of(self, manifest: Manifest) -> bool:
        """Whether each rank does what the rank of its number did, so that it can go on with its random state. Over how many of them weights are
        sharded decides nothing of that."""
        mine, theirs = ({key: value for key, value in split.items() if key != "fully_shard"} for split in (self.split(), manifest.split))
        # A checkpoint of before these were told says nothing of them.
        untold = self._ways().keys() - theirs.keys()
        return {key: value for key, value in mine.items() if key not in untold} == theirs

    def _ways(self) -> dict[str, Any]:
        """How ranks of the megatron backend share the work, as far as the sizes before do not say it: always, so that what lacks one is known to
        be of before it was told."""
        if self.axes:
            return {}
        topology = self.topology
        return {
            "ring": topology.ring,
            "expert": topology.expert,
            "sequence_parallel": topology.sequence_parallel,
            "vision_balance": topology.vision_balance,
        }


@dataclass(frozen=True)
class Manifest:
    """Content of manifest.json."""

    step: int
    """Optimizer steps taken, skipped ones included."""
    consumed_samples: int
    """The data position: samples that the steps have used, over all data-parallel ranks."""
    family: str
    split: Mapping[str, Any]
    hf_config: Mapping[str, Any]
    tokenizer_hash: str
    dataset_fingerprint: str
    seed: int | None
    """None: the weights were imported and belong to no run yet, so tokenizer, dataset and schedule are those of the run that loads them."""
    schedule: Mapping[str, Any]
    optimizer: bool
    """Whether optimizer state was saved."""
    rng: bool
    """Whether random states were saved."""
    grad_scaler: Mapping[str, float]
    extra: Mapping[str, Any]
    """What the training loop adds."""
    packages: Mapping[str, str] = field(default_factory=lambda: package_versions())
    format_version: int = FORMAT_VERSION

    @classmethod
    def of(cls, facts: RunFacts, **others: Any) -> Manifest:
        return cls(
            family=facts.family,
            split=facts.split(),
            hf_config=facts.hf_config,
            tokenizer_hash=facts.tokenizer_hash,
            dataset_fingerprint=facts.dataset_fingerprint,
            seed=facts.seed,
            schedule=facts.schedule,
            **others,
        )

    @classmethod
    def imported(cls, family: str, topology: Topology, hf_config: Mapping[str, Any]) -> Manifest:
        """Of weights that no run has trained: step 0, to be continued with any data, tokenizer and seed."""
        facts = RunFacts(family, topology, 1, hf_config, tokenizer_hash="", dataset_fingerprint="", seed=0, schedule={})
        return replace(cls.of(facts, step=0, consumed_samples=0, optimizer=False, rng=False, grad_scaler={}, extra={}), seed=None)

    def text(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def package_versions() -> dict[str, str]:
    """Versions of the packages that decide numbers; those not installed are left out."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def read_manifest(folder: Path) -> Manifest:
    """Read and check manifest.json.

    Raises:
        CheckpointError: missing, damaged, or of another format version.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise CheckpointError(f"{folder}: no training checkpoint there ({MANIFEST_FILE} is missing); give the folder of a finished one")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged: {error}; use another checkpoint") from None
    version = raw.get("format_version") if isinstance(raw, dict) else None
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{path}: format version {version!r}, this Tangram reads {FORMAT_VERSION}; use the Tangram that wrote it")
    if set(raw) != {entry.name for entry in fields(Manifest)}:
        odd = sorted(set(raw) ^ {entry.name for entry in fields(Manifest)})
        raise CheckpointError(f"{path}: damaged: keys {', '.join(odd)} are missing or unknown; use another checkpoint")
    for entry in fields(Manifest):
        annotation, _, alternative = str(entry.type).partition(" | ")
        kind = _KINDS[annotation.partition("[")[0]]
        value = raw[entry.name]
        if value is None and alternative == "None":
            continue
        negative = isinstance(value, int) and value < 0
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool) or negative:
            raise CheckpointError(f"{path}: damaged: {entry.name} is {value!r}, expected {_NAMES[kind]}; use another checkpoint")
    return Manifest(**raw)


_KINDS: Mapping[str, type] = {"int": int, "str": str, "bool": bool, "Mapping": dict}
_NAMES = {int: "a whole number", str: "a string", bool: "true or false", dict: "a mapping"}


def check_same_run(manifest: Manifest, facts: RunFacts, where: str) -> None:
    """Check that a run can continue what a checkpoint began.

    Raises:
        CheckpointError: another family or tokenizer, or a data position that means nothing for this run's data.
    """
    if manifest.family != facts.family:
        raise CheckpointError(f"{where}: a checkpoint of family {manifest.family!r}, this run trains {facts.family!r}; load one of its own")
    if manifest.seed is None:
        return
    for what, saved, here in (
        ("tokenizer", manifest.tokenizer_hash, facts.tokenizer_hash),
        ("dataset", manifest.dataset_fingerprint, facts.dataset_fingerprint),
        ("seed", manifest.seed, facts.seed),
    ):
        if saved != here:
            raise CheckpointError(
                f"{where}: its {what} is {saved}, this run's is {here}; step {manifest.step} (sample {manifest.consumed_samples}) cannot be "
                f"continued with another {what}: restore it, or start anew from the weights (tangram export, then load the exported folder)"
            )


def schedule_changes(manifest: Manifest, facts: RunFacts) -> list[str]:
    """Differences of the learning-rate schedule, one phrase each."""
    names = sorted({*manifest.schedule, *facts.schedule}) if manifest.seed is not None else []
    pairs = [(name, manifest.schedule.get(name), facts.schedule.get(name)) for name in names]
    return [f"{name} was {saved}, is {here}" for name, saved, here in pairs if saved != here]


def iteration_folder(step: int) -> str:
    return f"iter_{step:07}"


def find_checkpoint(path: str | Path) -> Path:
    """The folder of one checkpoint: ``path`` itself, or the newest below it by the tracker file.

    Raises:
        CheckpointError: nothing there, or no training checkpoint.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such folder; correct the path to load from")
    if not path.is_dir():
        raise CheckpointError(f"{path}: is a file; a checkpoint is a folder")
    if (path / MANIFEST_FILE).is_file():
        return path
    tracker = path / TRACKER_FILE
    if not tracker.is_file():
        finished = sorted(folder.name for folder in path.glob("iter_*") if (folder / MANIFEST_FILE).is_file())
        found = f"; finished checkpoints in it: {', '.join(finished)}; name one of them" if finished else ""
        state = "is empty" if not any(path.iterdir()) else f"holds no training checkpoint (neither {MANIFEST_FILE} nor {TRACKER_FILE})"
        raise CheckpointError(f"{path}: {state}{found or '; correct the path to load from'}")
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if not text.isdecimal():
        raise CheckpointError(f"{tracker}: says {text[:40]!r}, which is no step of a training checkpoint; name the checkpoint's own folder")
    folder = path / iteration_folder(int(text))
    if not folder.is_dir():
        # A run killed while it replaced a checkpoint leaves the old one beside its name.
        aside = sorted(path.glob(f"{folder.name}.old-*"))
        if not aside:
            raise CheckpointError(f"{tracker}: names step {text}, but {folder} is missing; name another checkpoint's folder")
        folder = aside[0]
    return folder


def is_training_checkpoint(path: str | Path) -> bool:
    """Whether ``find_checkpoint`` would look for one here: a checkpoint's folder, or one whose tracker names a step."""
    path = Path(path)
    tracker = path / TRACKER_FILE
    if (path / MANIFEST_FILE).is_file() and (path / ".metadata").is_file():
        return True
    return tracker.is_file() and tracker.read_text(encoding="utf-8", errors="replace").strip().isdecimal() and any(path.glob("iter_*/.metadata"))
