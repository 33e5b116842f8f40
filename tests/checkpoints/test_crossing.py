"""A checkpoint crosses between all splits of both backends, its optimizer's state included, bit by bit.

One process trains and saves; then each split loads what the one before it has saved, saves that again, and has saved what the one process had. So
any of them goes on where any other stopped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tangram.align.batch import write_batch
from tangram.align.run import make_task, open_subject, prepare_batch
from tangram.align.sharded import Sharded
from tangram.align.task import Curve, Split, TaskList
from tangram.families.base import get_family
from tangram.families.tiny import TinySpec
from tests.align.matrix import FAMILIES, REFUSED, SPLITS
from tests.checkpoints.cases_crossing import SAMPLES, STEPS
from tests.ranks import on_ranks

CASES = Path(__file__).with_name("cases_crossing.py")
EXPERTS = ["parallel.expert_parallel_size=2", 'parallel.ep_plan.apply_modules=["model.language_model.layers.{*}.mlp.experts"]']
FSDP2 = {
    "FSDP2": Sharded(),
    "FSDP2 on 2": Sharded(processes=2),
    "FSDP2 on 4": Sharded(processes=4),
    "HSDP, 2 x 2": Sharded(processes=4, settings=["parallel.fully_shard_parallel_size=2"]),
    "FSDP2 on 2, EP2": Sharded(processes=2, settings=EXPERTS),
    "FSDP2 on 4, EP2": Sharded(processes=4, settings=EXPERTS),
}
ALL: dict[str, Split | Sharded] = {
    **{name: split.model_copy(update={"distributed_optimizer": split.data * split.context > 1}) for name, split in SPLITS.items()},
    "TP2 x SP x DP2": Split(tensor=2, sequence_parallel=True, data=2, distributed_optimizer=True),
    "EP2 of DP4": Split(data=4, expert=2, distributed_optimizer=True),
    "TP4 x SP, vision TP2": Split(tensor=4, sequence_parallel=True, vision_tensor=2),
    **FSDP2,
}
"""Copies share out the optimizer's state, so that its stretches cut fused weights anywhere."""
EACH = ["TP2 x SP x DP2", "FSDP2 on 2", "PP2 x VPP2, vision over two chunks"]
"""What every family crosses: each way to cut its own weights."""
OF_EXPERTS = ["EP2", "FSDP2 on 2, EP2", "PP2 x EP2", "FSDP2 on 4, EP2", "TP2 x SP x EP2", "EP2 of DP4"]
OTHERS = [
    *("PP2", "FSDP2", "PP3, uneven", "HSDP, 2 x 2", "PP4, vision and text over two stages each", "FSDP2 on 4", "CP2, ring", "TP2 x SP"),
    *("DP2 x PP2, vision balanced", "TP2 x SP x PP2 x CP2, ring", "CP4, hybrid", "TP2 x SP x PP2"),
    *("TP4 x SP, vision TP2", "TP2, vision TP1", "TP2 x SP x PP2, vision TP1 over two stages"),
]
"""Ways to cut weights in which a family has nothing of its own, so one crosses them."""
CROSSED = dict.fromkeys(FAMILIES, EACH) | {"qwen3_vl_moe": [*EACH, *OF_EXPERTS], "qwen3_vl": [*EACH, *OTHERS]}
STEPPED = {"TP2 x SP x DP2", "FSDP2 on 2", "PP2 x VPP2, vision over two chunks", "EP2", "TP4 x SP, vision TP2", "TP2, vision TP1"}
"""Where a step shows whether what was loaded lies where the model looks for it: what is misplaced both ways is saved as it was loaded."""
NOISE = "k_proj.bias"
"""Of keys that turn slowly, or not at all, most of the gradient is rounding, and Adam makes steps of that."""


def way(split: Split | Sharded) -> object:
    """What decides where a weight and its moments lie. Ranks that share tokens, or have others, share the optimizer's state alike."""
    if isinstance(split, Sharded):
        return split
    layers = [split.vit_pp_layers, split.llm_pp_layers, split.pipeline, split.virtual]
    return str([split.tensor, split.vision_tensor, *layers, split.data * split.context, split.expert])


def test_every_way_to_cut_is_crossed_by_a_family_that_runs_it() -> None:
    assert {str(way(ALL[name])) for names in CROSSED.values() for name in ["one process", *names]} == {str(way(split)) for split in ALL.values()}
    assert all(not REFUSED[family] & set(names) for family, names in CROSSED.items())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_is_the_same_wherever_it_was_loaded_and_saved(family: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {} if family == "llava" else {"max_pixels": 56 * 56}
    sizes |= {"kv_heads": 4} if "TP4 x SP, vision TP2" in CROSSED[family] else {}
    spec = TinySpec(hidden=32, vision_hidden=16, vocab=163, weight_std=0.1, **sizes)
    get_family(family).tiny(tmp_path / "hf", 0, family == "qwen2_5_vl", spec)
    subject = open_subject(tmp_path / "hf", tmp_path)
    batch = write_batch(prepare_batch(subject, None)[0], tmp_path)
    names = ["one process", *CROSSED[family]]
    tasks = [
        make_task(subject, ALL[name], batch, tmp_path / str(number), micro_batch_size=1, curve=Curve(steps=6, lr=1e-3))
        for number, name in enumerate(names)
    ]
    (tmp_path / "tasks.json").write_text(TaskList(tasks=tasks).model_dump_json())
    stepped = [0, *(number for number, name in enumerate(names) if name in STEPPED)]
    ranks = on_ranks(TaskList(tasks=tasks).processes, CASES, "cross", str(tmp_path / "tasks.json"), stepped, patience=500)
    expected = ranks[0][0]["saved"]
    assert len(set(expected.values())) <= 2 and min(expected.values()) > 80, expected
    for number, name in enumerate(names[1:], start=1):
        for rank in range(tasks[number].split.processes):
            facts = ranks[rank][sum(rank < task.split.processes for task in tasks[:number])]
            assert facts["position"] == (STEPS, STEPS * SAMPLES, 1) and facts["schedule"] == [], name
            assert facts.get("saved", expected) == expected, name
            if number in stepped:
                # Not the largest: what is no number is not larger than any.
                apart = {key: error for key, error in facts["later"].items() if not (error <= 1e-6 or key.endswith(NOISE))}
                assert not apart, (name, apart)
