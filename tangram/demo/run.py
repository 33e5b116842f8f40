"""The demo from beginning to end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tangram.align.reference import no_progress_bars
from tangram.align.run import Outcome, align
from tangram.align.task import Split
from tangram.checkpoints.convert import convert_hf_to_mm, convert_mm_to_hf
from tangram.checkpoints.dcp_reader import DCPReader
from tangram.checkpoints.export import export_hf
from tangram.checkpoints.hf_directory import HFDirectory
from tangram.checkpoints.options import HFOptions, ParallelOptions, ToHFOptions, ToMMOptions
from tangram.checkpoints.reader import read_whole, same_bits
from tangram.demo.data import KINDS, DemoData, write_data
from tangram.demo.drawing import draw_split
from tangram.demo.evaluate import Answered, Answerer, Score, scores
from tangram.demo.page import Check, Page, render_page
from tangram.demo.plot import plot_losses, read_losses
from tangram.demo.recipe import FAMILY, Recipe, write_run_file
from tangram.errors import ConfigError, TangramError
from tangram.families.base import get_family

SHOWN = 12
"""Held-out questions and photographs on the page."""
Say = Callable[[str], None]


class DemoError(TangramError):
    """A part of the demo did not do what it should."""


@dataclass
class Findings:
    """What the parts found, for the report."""

    seconds: dict[str, float] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    answers: list[Answered] = field(default_factory=list)
    photos: list[Answered] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)

    @contextmanager
    def timed(self, part: str, say: Say) -> Iterator[None]:
        """Say what begins, and keep how long it took."""
        say(f"{part} ...")
        start = time.perf_counter()
        yield
        self.seconds[part] = round(time.perf_counter() - start, 1)
        say(f"{part}: {self.seconds[part]:.1f} s")

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


def run_demo(folder: Path, recipe: Recipe, say: Say, *, force: bool = False) -> Findings:
    """Everything, into ``folder``.

    Args:
        say: takes the lines for the terminal.
        force: replace an earlier demo that lies in ``folder``.

    Raises:
        ConfigError: ``folder`` is not empty, or a package of the demo is missing.
        DemoError: training failed.
    """
    _make_room(folder, force)
    found = Findings()
    hf_init, mm, ckpt, hf_final = (folder / name for name in ("hf_init", "mm", "ckpt", "hf_final"))
    with found.timed("pictures and questions", say):
        data = write_data(folder / "data", recipe.photo_repeats, recipe.heldout_per_kind)
    with found.timed("random model", say), no_progress_bars():
        get_family(FAMILY).tiny(hf_init, recipe.seed, True, recipe.sizes)
    with found.timed("conversion", say):
        found.checks.append(_convert(hf_init, mm, recipe, folder))
    with found.timed("training", say):
        _train(write_run_file(recipe, folder), folder / "train.log", recipe.steps, say)
        found.losses = _whole(read_losses(folder / "metrics.jsonl"), recipe.steps, folder / "train.log")
    with found.timed("export", say):
        reader = DCPReader(ckpt)
        export_hf(reader, hf_final, get_family(FAMILY), files_from=hf_init, hf_config=dict(reader.manifest.hf_config))
    with found.timed("comparison with transformers", say):
        found.checks += _compare(hf_final, ckpt, recipe)
    with found.timed("questions", say):
        answerer = Answerer(hf_final, recipe.image_min_pixels, recipe.image_max_pixels)
        found.answers, found.photos = answerer.answer(data.heldout), answerer.answer(data.photos)
        found.scores = scores(found.answers, data)
        found.checks.append(_sight(found.scores))
    _write_report(folder, recipe, data, found)
    return found


def _make_room(folder: Path, force: bool) -> None:
    if folder.exists() and any(folder.iterdir()):
        if not force:
            raise ConfigError(f"{folder}: not empty; give another folder, or --force to replace an earlier demo")
        if not (folder / "run.yaml").is_file():
            raise ConfigError(f"{folder}: not replaced, since it is no earlier demo: it has no run.yaml; give another folder")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)


def _convert(hf_init: Path, mm: Path, recipe: Recipe, folder: Path) -> Check:
    """Write ``mm``, convert it back, and hold the two Hugging Face directories against each other."""
    parallel = ParallelOptions(llm_pp_layers=list(recipe.llm_pp_layers), vit_pp_layers=list(recipe.vit_pp_layers), tp_size=recipe.tensor)
    there = ToMMOptions(mm_dir=str(mm), hf_config=HFOptions(hf_dir=str(hf_init)), parallel_config=parallel)
    report = convert_hf_to_mm(there, FAMILY)
    back = folder / "hf_back"
    convert_mm_to_hf(ToHFOptions(mm_dir=str(mm), hf_config=there.hf_config, save_hf_dir=str(back)), FAMILY)
    one, other = HFDirectory(hf_init), HFDirectory(back)
    same = one.names() == other.names() and all(same_bits(read_whole(one, name), read_whole(other, name)) for name in one.names())
    one.close()
    other.close()
    shutil.rmtree(back)
    verdict = "the same bits came back" if same else "other bits came back"
    return Check(same, f"{report.tensors} tensors were cut for {report.ranks} processes and put together again: {verdict}.")


def _train(run_file: Path, log: Path, steps: int, say: Say) -> None:
    """Train as a user does, ``tangram train run.yaml``, with its output in ``log`` and every tenth of it said."""
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "tangram", "train", str(run_file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as process, log.open("w") as file:
        assert process.stdout is not None
        last, done = "", 0
        try:
            for line in process.stdout:
                file.write(line)
                file.flush()
                last = line.strip() or last
                if " iteration " in line:
                    done += 1
                    if done % max(1, steps // 10) == 0:
                        say(f"  {_short(line)}")
        except BaseException:
            process.terminate()
            raise
    if process.returncode != 0:
        raise DemoError(f"training ended with status {process.returncode}: {_fault(log) or last}; see {log}")


def _whole(losses: list[float], steps: int, log: Path) -> list[float]:
    """The losses of a training that made all of its steps; one that is told to stop (SIGTERM) saves and ends with status 0."""
    if len(losses) != steps:
        raise DemoError(f"training ended after {len(losses)} of {steps} steps; see {log}, and start the demo again with --force")
    return losses


def _short(line: str) -> str:
    """Step, time and loss of a log line."""
    fields = [part.strip() for part in line[line.index("iteration ") :].split("|")]
    return " | ".join(part for part in fields if part.startswith(("iteration ", "elapsed time", "loss:", "grad norm")))


def _fault(log: Path) -> str:
    """The line of ``log`` that says what went wrong, if one does."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.strip() for line in lines if "error:" in line), "")


def _compare(hf_final: Path, ckpt: Path, recipe: Recipe) -> list[Check]:
    """The split model, restored from the checkpoint, against transformers on the export."""
    split = Split(tensor=recipe.tensor, pipeline=recipe.pipeline, vit_pp_layers=list(recipe.vit_pp_layers), llm_pp_layers=list(recipe.llm_pp_layers))
    (outcome,) = align(hf_final, [split], checkpoint=ckpt)
    return [_logits_check(outcome), _gradients_check(outcome)]


def _logits_check(outcome: Outcome) -> Check:
    row, report = outcome.report.worst("logits"), outcome.report
    if row is None:
        return Check(False, f"logits cannot be compared: {'; '.join(report.failures)}")
    what = f"transformers loads the export and gives the logits ({' x '.join(map(str, row.shape))}) of the split model"
    text = f"{what} on {row.shape[0]} conversations over photographs: relative error {row.error:.1e}."
    return Check(row.within(report.tolerance), text)


def _gradients_check(outcome: Outcome) -> Check:
    report = outcome.report
    count = sum(row.kind == "gradient" for row in report.rows)
    worst = report.worst("gradient")
    largest = f"largest relative error {worst.error:.1e}" if worst else "none"
    text = f"All {count} gradients of the split model, put together by name, are those of transformers: {largest}."
    return Check(report.passed, text if report.passed else f"{text} {'; '.join(report.failures)}")


def _sight(results: Sequence[Score]) -> Check:
    """At least one type of question is answered better than without looking."""
    seen = [score for score in results if score.sees]
    best = max(results, key=lambda score: score.accuracy - score.majority_accuracy)
    figures = f"{best.kind}: {100 * best.accuracy:.1f} % against {100 * best.majority_accuracy:.1f} %"
    if not seen:
        return Check(False, f"No question type is answered better than by its most frequent answer ({figures}).")
    count = sum(score.count for score in results)
    return Check(True, f"On {count} questions about unseen pictures the model answers better than the most frequent answer of the type ({figures}).")


def shown(answers: Sequence[Answered], count: int) -> list[Answered]:
    """The first answers, taking turns between question types and never a picture twice."""
    kinds = dict.fromkeys(answer.question.kind for answer in answers)
    queues = [[answer for answer in answers if answer.question.kind == kind] for kind in kinds]
    found: list[Answered] = []
    pictures: set[Path] = set()
    while any(queues) and len(found) < count:
        for queue in queues:
            fresh = next((answer for answer in queue if answer.question.image not in pictures), None)
            queue[:] = queue[queue.index(fresh) + 1 :] if fresh is not None else []
            if fresh is not None and len(found) < count:
                pictures.add(fresh.question.image)
                found.append(fresh)
    return found


def next_commands(folder: Path, recipe: Recipe) -> list[str]:
    """What a reader may run next, with the demo's own files."""
    vision, text = (str(list(layers)).replace(" ", "") for layers in (recipe.vit_pp_layers, recipe.llm_pp_layers))
    split = f"--tp {recipe.tensor} --vit-pp-layers {vision} --llm-pp-layers {text}"
    return [
        f"tangram align --hf {folder}/hf_final --checkpoint {folder}/ckpt {split}    # the comparison again, as a table",
        f"tangram align --hf {folder}/hf_final --pp 2 --vpp 2                        # another split, the same numbers",
        f"tangram train {folder}/run.yaml training.train_iters={recipe.steps + 100} model.load=ckpt    # train on",
        f"tangram export {folder}/ckpt my_model --hf {folder}/hf_init --dtype bfloat16",
    ]


def _write_report(folder: Path, recipe: Recipe, data: DemoData, found: Findings) -> None:
    plot_losses(found.losses, folder / "loss.png")
    hf = HFDirectory(folder / "hf_final")
    model, parameters = hf.model, sum(info.shape[0] * (info.nbytes // info.shape[0]) // info.dtype.itemsize for info in hf.names().values())
    hf.close()
    split = Split(tensor=recipe.tensor, pipeline=recipe.pipeline, vit_pp_layers=list(recipe.vit_pp_layers), llm_pp_layers=list(recipe.llm_pp_layers))
    content: dict[str, Any] = {
        "passed": found.passed,
        "parameters": parameters,
        "processes": recipe.processes,
        "recipe": {**asdict(recipe), "sizes": asdict(recipe.sizes)},
        "training_samples": data.samples,
        "loss": {"first": found.losses[0], "last_20": sum(found.losses[-20:]) / len(found.losses[-20:])},
        "seconds": found.seconds,
        "scores": {s.kind: {**asdict(s), "accuracy": s.accuracy, "better_than_majority": s.sees} for s in found.scores},
        "checks": [asdict(check) for check in found.checks],
        "answers": [
            {
                "image": os.path.relpath(a.question.image, folder),
                "kind": a.question.kind,
                "question": a.question.text,
                "answer": a.said,
                "truth": a.question.answer,
            }
            for a in [*found.answers, *found.photos]
        ],
    }
    (folder / "report.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    facts = [
        (f"{parameters / 1e6:.1f} M", "weights, random at the start"),
        (f"{recipe.processes} processes", f"tensor {recipe.tensor} x pipeline {recipe.pipeline}"),
        (f"{recipe.steps} steps", f"of {recipe.global_batch_size} samples in {found.seconds['training']:.0f} s"),
        *((f"{100 * score.accuracy:.0f} %", f"of unseen {score.kind} questions right") for score in found.scores),
    ]
    page = Page(
        facts=facts,
        curve=folder / "loss.png",
        split=draw_split(model, split.topology(model)),
        scores=found.scores,
        heldout=shown(found.answers, SHOWN),
        photos=shown(found.photos, SHOWN),
        checks=found.checks,
        commands=next_commands(folder, recipe),
    )
    (folder / "report.html").write_text(render_page(page), encoding="utf-8")


__all__ = ["KINDS", "DemoError", "Findings", "next_commands", "run_demo", "shown"]
