"""Families and splits of the megatron backend: what runs, held against transformers by ``test_matrix``, and what is refused and why.

``python -m tests.align.matrix`` writes the table of docs/parallelism.md.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from tangram.align.batch import write_batch
from tangram.align.default_batch import STEPS, SyntheticRow, synthetic_batch
from tangram.align.run import Subject as AlignSubject
from tangram.align.run import make_task, open_subject
from tangram.align.task import Split
from tangram.config.preflight_rules import GATES, RULES, Subject
from tangram.errors import TangramError
from tangram.families.base import get_family
from tangram.families.tiny import TinySpec

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"
HEADING = "## What runs\n"
LEGEND = """Each entry that runs is a test (`tests/align/test_matrix.py`): in fp32 the loss, the logits and every gradient lie within 1e-5 of
transformers' (norm-wise), on micro-batches of pictures of several sizes, of a video, of text alone, and of all of these packed into one
row. `tangram align --pack` does the same with a model of yours. What does not run is refused by `tangram check`."""

SPLITS = {
    "one process": Split(),
    "TP2": Split(tensor=2),
    "TP2 x SP": Split(tensor=2, sequence_parallel=True),
    "PP2": Split(pipeline=2),
    "PP3, uneven": Split(pipeline=3, llm_pp_layers=[0, 1, 3]),
    "PP4, vision and text over two stages each": Split(pipeline=4, vit_pp_layers=[2, 2, 0, 0], llm_pp_layers=[0, 0, 1, 3]),
    "PP2 x VPP2, vision over two chunks": Split(pipeline=2, virtual=2, vit_pp_layers=[[3, 1], [0, 0]], llm_pp_layers=[[0, 1], [1, 2]]),
    "TP2 x SP x PP2": Split(tensor=2, sequence_parallel=True, pipeline=2, vit_pp_layers=[2, 2], llm_pp_layers=[0, 4]),
    "TP2, vision TP1": Split(tensor=2, vision_tensor=1),
    "TP2 x SP x PP2, vision TP1 over two stages": Split(
        tensor=2, vision_tensor=1, sequence_parallel=True, pipeline=2, vit_pp_layers=[2, 2], llm_pp_layers=[0, 4]
    ),
    "CP2, Ulysses": Split(context=2),
    "CP2, ring": Split(context=2, context_algo="ring"),
    "CP4, hybrid": Split(context=4, context_algo="hybrid", ulysses=2),
    "TP2 x SP x PP2 x CP2, ring": Split(tensor=2, sequence_parallel=True, pipeline=2, context=2, context_algo="ring"),
    "DP2, distributed optimizer": Split(data=2, distributed_optimizer=True),
    "DP2 x PP2, vision balanced": Split(data=2, pipeline=2, balance=True, llm_pp_layers=[0, 4]),
    "DP2 x CP2, vision balanced": Split(data=2, context=2, balance=True),
    "EP2": Split(data=2, expert=2),
    "EP2, all-gather": Split(data=2, expert=2, dispatcher="allgather"),
    "TP2 x SP x EP2": Split(tensor=2, sequence_parallel=True, data=2, expert=2),
    "CP2 x EP2, ring": Split(context=2, context_algo="ring", expert=2),
    "PP2 x EP2": Split(pipeline=2, data=2, expert=2),
}
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "llava")
EXPERTS = {name for name, split in SPLITS.items() if split.expert > 1}
REFUSED = {**dict.fromkeys(FAMILIES, EXPERTS), "qwen3_vl_moe": {"TP2", "TP2, vision TP1"}}
"""By family, what ``tangram check`` refuses."""


def write_model(family: str, folder: Path) -> Path:
    """A small model: four layers of each kind, a vocabulary that does not divide; Qwen3-VL with three DeepStack features."""
    deepstack = {"deepstack": (0, 1, 3)} if family.startswith("qwen3") else {}
    get_family(family).tiny(folder, 0, family == "qwen2_5_vl", TinySpec(hidden=32, vocab=515, weight_std=0.1, **deepstack))
    return folder


ROWS: tuple[SyntheticRow, ...] = (
    (((1, 8, 12),), 5, 4),
    (((1, 4, 4), (1, 6, 10)), 7, 3),
    ((), 9, 6),
    ((), 4, 3),
    (((STEPS, 4, 10),), 4, 5),
)
"""Of the batch. By twos they are the micro-batches: a picture beside two of other sizes, text alone, and a video for a model that has videos."""


def write_rows(family: str, hf: Path, folder: Path, rows: Sequence[SyntheticRow] = ROWS) -> Path:
    """A batch for the model in ``hf``."""
    subject = open_subject(hf, folder / "work")
    return write_batch(synthetic_batch(get_family(family), subject.model, rows), folder)


def refusal(subject: AlignSubject, split: Split, folder: Path) -> str | None:
    """What ``tangram check`` says against a split of the subject; None: it runs."""
    try:
        run = make_task(subject, split, folder / "batch.safetensors", folder / "work", micro_batch_size=1).run_config()
        # Virtual stages need as many micro-batches as there are stages.
        training = run.training.model_copy(update={"gradient_accumulation_steps": split.pipeline})
        for _, rule in (*GATES, *RULES):
            rule(Subject(run.model_copy(update={"training": training}), split.processes))
    except TangramError as error:
        return str(error)
    return None


def refusals(family: str, folder: Path) -> dict[str, str]:
    """What ``tangram check`` says against splits of the model in ``folder``, by split; those that run are not in it."""
    subject = open_subject(folder, folder / "work")
    found = {name: refusal(subject, split, folder) for name, split in SPLITS.items()}
    return {name: why.replace(f"the model {family}", "the model") for name, why in found.items() if why is not None}


def table() -> str:
    """The table of the page: a cross where a split is refused, and below it why."""
    with tempfile.TemporaryDirectory() as name:
        found = {family: refusals(family, write_model(family, Path(name, family))) for family in FAMILIES}
    numbers: dict[str, int] = {}
    lines = [f"| split | {' | '.join(FAMILIES)} |", "|---" * (len(FAMILIES) + 1) + "|"]
    for label in SPLITS:
        cells = []
        for family in FAMILIES:
            why = found[family].get(label)
            cells.append("runs" if why is None else f"no [{numbers.setdefault(why, len(numbers) + 1)}]")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{number}. {why}" for why, number in numbers.items())])


def page(prose: str) -> str:
    """``prose`` with the table behind ``HEADING`` as it is now."""
    own = prose.partition(HEADING)[0].rstrip()
    return f"{own}\n\n{HEADING}\n{LEGEND}\n\n{table()}\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
