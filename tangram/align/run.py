"""One batch through Hugging Face's model and through the split model, compared."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tangram.align.assemble import Assembled, assemble
from tangram.align.batch import read_batch, write_batch
from tangram.align.compare import TOLERANCES, Report, Row, compare, logits_row
from tangram.align.default_batch import default_batch, with_positions
from tangram.align.launch import finish, running
from tangram.align.observation import Observation, write_observation
from tangram.align.reference import load_reference, observe
from tangram.align.sharded import Sharded, read_run_file, write_run_file
from tangram.align.standin import runnable_directory
from tangram.align.task import RESULT_FILE, Curve, Dtype, Split, Task, TraceTo, gradient_file, logits_file
from tangram.align.trace.seen import Chosen
from tangram.align.trace.store import TraceWriter
from tangram.checkpoints.expert_stacks import turned_stacks
from tangram.checkpoints.hf_directory import HFDirectory
from tangram.checkpoints.reader import TensorInfo
from tangram.config.context import check_context
from tangram.config.fsdp2_sizes import sizes
from tangram.config.model import ModelConfig
from tangram.config.parsing import read_mapping
from tangram.errors import CheckpointError, ConfigError, name_some
from tangram.families.base import Family, get_family
from tangram.families.plugins import load_plugins
from tangram.placement.proof import prove_table
from tangram.placement.table import padded_vocabulary

TORCH_DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Subject:
    """A Hugging Face directory, ready to be run.

    Args:
        directory: with weights and a config whose special tokens can be embedded.
        plugins: what the processes import first.
        replaced: special tokens that stand-ins replaced; see ``tangram.align.standin``.
    """

    directory: Path
    family: Family
    model: ModelConfig
    plugins: tuple[str, ...] = ()
    replaced: dict[str, int] = field(default_factory=dict)


def open_subject(hf_dir: Path, work: Path, plugins: Sequence[str] = (), backends: Iterable[str] = ("megatron",)) -> Subject:
    """Read the config of ``hf_dir``.

    Args:
        work: folder for a changed copy of the config, where one is needed.
        plugins: Python files or folders to import first.
        backends: that are to run it.

    Raises:
        CheckpointError: no such directory.
        ConfigError: its config.json is missing or cannot be represented, a backend does not run the family, or a plug-in cannot be imported.
    """
    load_plugins(plugins)
    if not hf_dir.is_dir():
        raise CheckpointError(f"{hf_dir}: no such directory; give a Hugging Face model directory, or write a small one with 'tangram tiny'")
    family = get_family(str(read_mapping(hf_dir / "config.json").get("model_type")))
    for backend in sorted(set(backends)):
        family.check_backend(backend)
    directory, replaced = runnable_directory(hf_dir, work / "hf")
    model = family.from_hf_config(read_mapping(directory / "config.json"))
    return Subject(directory, family, model, tuple(str(Path(plugin).resolve()) for plugin in plugins), replaced)


@dataclass(frozen=True)
class Outcome:
    """What an alignment found."""

    report: Report
    split: Split | Sharded
    loss: float
    reference_loss: float
    batch: Mapping[str, torch.Tensor]
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Everything but the tensors, as JSON types."""
        return {
            **self.report.as_dict(),
            "backend": self.split.backend,
            "split": self.split.model_dump(),
            "loss": self.loss,
            "reference_loss": self.reference_loss,
            "batch": {name: list(tensor.shape) for name, tensor in self.batch.items()},
            "notes": list(self.notes),
        }


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """A temporary folder, kept where the block fails, so that logs can be read."""
    work = Path(tempfile.mkdtemp(prefix="tangram-align-"))
    yield work
    shutil.rmtree(work)


def align(
    hf_dir: Path,
    splits: Sequence[Split | Sharded],
    *,
    dtype: Dtype = "fp32",
    batch_file: Path | None = None,
    micro_batch_size: int | None = None,
    dump: Path | None = None,
    tolerance: float | None = None,
    plugins: Sequence[str] = (),
    checkpoint: Path | Sequence[Path] | None = None,
    pack: bool = False,
    trace_to: Path | None = None,
    trace_only: Sequence[str] = (),
) -> list[Outcome]:
    """Compare the split model with Hugging Face's on one batch.

    All splits run in one launch of processes, each on as many as it needs.

    Args:
        splits: at least one; of either backend.
        batch_file: ``batch.safetensors``; None: a batch of real pictures and text, see ``default_batch``.
        micro_batch_size: rows per micro-batch; None: two micro-batches.
        dump: folder for the batch, and the logits and gradients of the last split.
        tolerance: None: that of ``dtype``, see ``TOLERANCES``.
        plugins: Python files or folders to import first; they register families and components.
        checkpoint: a training checkpoint, or an ``mp_rank`` directory of the split, whose weights the split model takes; that ``hf_dir`` holds
            the same model is then what is shown. One for all splits, or one for each.
        pack: run all rows once more, packed into one as training packs samples. Each then counts twice, in loss and gradients alike, so that
            both stay those of the reference, which sees each row alone; logits of the packed row are compared sample by sample.
        trace_to: folder for traces (``tangram.align.trace``): ``reference``, and ``split``, or ``split_0``, ``split_1``, ... of several splits.
        trace_only: patterns of the modules in them; none: all.

    Raises:
        TangramError: the directory, split, or batch cannot be used, or a process failed.
    """
    with workplace() as work:
        subject = open_subject(hf_dir, work, plugins, {split.backend for split in splits})
        for split in splits:
            check_split(subject, split)
        batch, notes = prepare_batch(subject, batch_file)
        file = write_batch(batch, work)
        weights = [checkpoint] * len(splits) if checkpoint is None or isinstance(checkpoint, Path) else list(checkpoint)
        tasks = [
            make_task(subject, split, file, work / f"split_{number}", dtype=dtype, micro_batch_size=micro_batch_size, checkpoint=own, pack=pack)
            for number, (split, own) in enumerate(zip(splits, weights, strict=True))
        ]
        check_run_files(tasks)
        if trace_to is not None:
            tasks = with_traces(tasks, trace_to, trace_only)
        with running(tasks, work) as process:
            reference = load_reference(subject.directory, TORCH_DTYPES[dtype])
            if trace_to is None:
                expected = observe(reference, batch)
            else:
                expected = observe_traced(reference, batch, subject, trace_to / "reference", trace_only)
            finish(process, tasks, work)
        expected = canonical(expected, subject)
        outcomes = []
        for task in tasks:
            actual, extra = collect(task)
            wanted, frozen = without_frozen(expected, task)
            limit = TOLERANCES[dtype] if tolerance is None else tolerance
            if pack:
                rows, mask = len(expected.logits), batch["attention_mask"]
                extra.append(logits_row("logits of the packed row", actual.logits[rows:], expected.logits, mask))
                actual = replace(actual, logits=actual.logits[:rows])
            report = compare(actual, wanted, batch["attention_mask"], limit, extra=extra, sixteen_bits=dtype != "fp32")
            outcomes.append(Outcome(report, task.split, actual.loss, expected.loss, batch, (*notes, *frozen)))
            if dump is not None and task is tasks[-1]:
                write_batch(batch, dump)
                write_observation(actual, dump)
        return outcomes


def with_traces(tasks: Sequence[Task], folder: Path, only: Sequence[str]) -> list[Task]:
    """The tasks, each with a trace in a folder of its own."""
    names = ["split"] if len(tasks) == 1 else [f"split_{number}" for number in range(len(tasks))]
    return [
        task.model_copy(update={"trace": TraceTo(folder=str((folder / name).resolve()), only=list(only))})
        for task, name in zip(tasks, names, strict=True)
    ]


def observe_traced(
    reference: torch.nn.Module, batch: Mapping[str, torch.Tensor], subject: Subject, folder: Path, only: Sequence[str]
) -> Observation:
    """``observe``, and a trace of it.

    Raises:
        ConfigError: a pattern of ``only`` names no module.
    """
    from tangram.align.trace.on_hf import ReferenceTrace

    chosen = Chosen(only)
    traced = ReferenceTrace(reference, subject.model, subject.family.canonical_name, TraceWriter(folder, 0), "transformers", chosen, "fp32")
    chosen.check(traced.modules.names, "--trace-only")
    traced.begin(batch)
    expected = observe(reference, batch)
    weights = replace(expected, gradients={name: parameter.detach() for name, parameter in reference.named_parameters()})
    traced.finish(canonical(weights, subject).gradients, canonical(expected, subject).gradients)
    return expected


def check_split(subject: Subject, split: Split | Sharded) -> None:
    """Refuse a split of the megatron backend that the model does not allow, before any process starts.

    Raises:
        ConfigError: layer lists that do not fit, or heads that context-parallel ranks cannot share.
        PlacementError: heads, or another size, that tensor parallelism does not divide.
    """
    if isinstance(split, Sharded):
        return
    check_context(subject.model.text_decoder.model_copy(update={"attention_dropout": 0.0}), split.parallel)
    padded = padded_vocabulary(subject.model.text_decoder.vocab_size, split.tensor)
    prove_table(subject.family.tensor_table(subject.model, padded), split.topology(subject.model))


def canonical(observed: Observation, subject: Subject) -> Observation:
    """What transformers found, under canonical names, and with stacked experts as ``[experts, in, out]``, whatever its version has."""
    observed = replace(observed, gradients={subject.family.canonical_name(name): value for name, value in observed.gradients.items()})
    shapes = {name: shape for name, shape in HFDirectory(subject.directory, subject.family).shapes.items() if len(shape) == 3}
    infos = {name: TensorInfo(tuple(observed.gradients[name].shape), torch.float32) for name in shapes if name in observed.gradients}
    other = turned_stacks(shapes, infos, "transformers") if infos else frozenset()
    gradients = {name: value.transpose(1, 2) if name in other else value for name, value in observed.gradients.items()}
    return replace(observed, gradients=gradients)


def without_frozen(expected: Observation, task: Task) -> tuple[Observation, list[str]]:
    """The reference without gradients of parameters that the task froze, and a note that says how many."""
    frozen = json.loads(_written(task.folder / RESULT_FILE).read_text(encoding="utf-8"))["frozen"]
    kept = {name: value for name, value in expected.gradients.items() if name not in set(frozen)}
    note = [f"{len(frozen)} frozen parameters have no gradient to compare: {name_some(frozen)}"] if frozen else []
    return replace(expected, gradients=kept), note


def check_run_files(tasks: Sequence[Task]) -> None:
    """Read the run files of the fsdp2 backend as the processes will.

    Raises:
        ConfigError: settings that the schema does not have, or that do not fit each other or the number of processes.
    """
    for task in tasks:
        if isinstance(task.split, Sharded):
            settings = read_run_file(task.folder, task.split).fsdp2
            assert settings is not None
            sizes(settings.parallel, task.split.processes)


def prepare_batch(subject: Subject, batch_file: Path | None) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The batch to run, with 3-D positions, and notes for the report."""
    notes = [f"special tokens outside the vocabulary, replaced on both sides: {subject.replaced}"] if subject.replaced else []
    if batch_file is None:
        batch, note = default_batch(subject.directory, subject.family, subject.model)
        return batch, [*notes, note]
    batch = read_batch(batch_file, subject.model)
    return with_positions(batch, subject.family, subject.model), notes


def make_task(
    subject: Subject,
    split: Split | Sharded,
    batch_file: Path,
    out: Path,
    *,
    dtype: Dtype = "fp32",
    micro_batch_size: int | None = None,
    seed: int | None = None,
    checkpoint: Path | None = None,
    pack: bool = False,
    curve: Curve | None = None,
) -> Task:
    """What the processes are told, in part by a run file that is written to ``out``. Without ``micro_batch_size`` the batch becomes two
    micro-batches, or as many as there are copies of the model where these are more."""
    if micro_batch_size is None:
        rows = read_batch(batch_file, subject.model)["input_ids"].shape[0]
        micro_batch_size = -(-rows // max(2, split.processes if isinstance(split, Sharded) else split.data))
    if isinstance(split, Sharded):
        training = curve or Curve(steps=1, lr=1e-3)
        how: dict[str, Any] = {"steps": training.steps, "lr": training.lr, "clip_grad": training.clip_grad, "seed": seed or 0}
        write_run_file(out, split, subject.directory.resolve(), subject.family.name, dtype=dtype, micro_batch_size=micro_batch_size, **how)
    return Task(
        name=str(split),
        hf_dir=str(subject.directory.resolve()),
        model=subject.model,
        plugins=list(subject.plugins),
        split=split,
        dtype=dtype,
        seed=seed,
        checkpoint=str(checkpoint.resolve()) if checkpoint else None,
        batch=str(batch_file.resolve()),
        micro_batch_size=micro_batch_size,
        pack=pack,
        curve=curve,
        out=str(out.resolve()),
    )


def collect(task: Task) -> tuple[Observation, list[Row]]:
    """Put together what the ranks of a finished task wrote.

    Returns:
        The split model's observation, with the logits of a packed row below those of the batch, and a row that says how far ranks which hold
        the same elements of a gradient differ.

    Raises:
        PlacementError: elements of a gradient or of the logits that no rank gave.
        ConfigError: a rank left no file.
    """
    ranks = range(task.split.processes)
    gradients = list(assemble([_written(gradient_file(task.folder, rank)) for rank in ranks]))
    logits = list(assemble([_written(logits_file(task.folder, rank)) for rank in ranks]))
    result = json.loads(_written(task.folder / RESULT_FILE).read_text(encoding="utf-8"))
    assert len(logits) == 1, "one tensor of logits"
    observed = Observation(result["loss"], logits[0].tensor, {one.name: one.tensor for one in gradients})
    return observed, [_replica_row(gradients)]


def _written(path: Path) -> Path:
    if not path.is_file():
        raise ConfigError(f"{path}: the processes of the split model ended without writing it")
    return path


def _replica_row(gradients: Sequence[Assembled]) -> Row:
    worst = max(gradients, key=lambda one: one.disagreement)
    where = f", worst {worst.name}" if worst.disagreement else ""
    return Row(f"ranks that hold the same gradient{where}", "replicas", worst.disagreement, 1.0)
