"""Whether a run is the baseline's run at all: split, seed, data, and what else decides numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tangram.align.gate.recorded import Recorded
from tangram.align.gate.verdict import Finding

GROUPS: Mapping[str, Sequence[str]] = {
    "topology": ("backend", "world_size", "split"),
    "seed": ("seed",),
    "data": ("data",),
    "tokenizer": ("tokenizer",),
    "model": ("family", "dtype", "loss_type", "callbacks"),
    "batch": ("global_batch_size",),
    "settings": ("schedule",),
}
"""Finding -> keys of ``tangram.training.run_facts.facts_of``."""


def told_alike(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Facts as a run of today tells them. Runs of the megatron backend once told experts, rings, sequence parallelism and balance of vision work by
    the keys of their run file, where these were not the default."""
    split = facts.get("split")
    if facts.get("backend") != "megatron" or not isinstance(split, Mapping) or "ring" in split or "tensor" not in split:
        return facts
    split = dict(split)
    algorithm, degree = split.pop("context_parallel_algo", "ulysses_cp_algo"), split.pop("ulysses_degree_in_cp", 1)
    split.pop("vision_tensor_model_parallel_size", None)
    ways = {
        "ring": 1 if algorithm == "ulysses_cp_algo" else split.get("context", 1) // degree,
        "expert": split.pop("expert_model_parallel_size", 1),
        "sequence_parallel": split.pop("sequence_parallel", False),
        "vision_balance": split.pop("encoder_dp_balance", False),
    }
    return {**facts, "split": {**split, **ways}}


def compare_facts(base: Recorded, run: Recorded) -> dict[str, Callable[[], Finding]]:
    """A comparison per group."""
    base, run = (replace(one, facts=[told_alike(facts) for facts in one.facts]) for one in (base, run))
    return {name: _group(name, keys, base, run) for name, keys in GROUPS.items()}


def machine_notes(base: Recorded, run: Recorded) -> list[str]:
    """Devices and versions that differ: no fault by themselves, but where to look for one."""
    if not base.facts or not run.facts:
        return []
    notes = []
    for key in ("device", "packages"):
        odd = _differences({key: base.facts[0].get(key)}, {key: run.facts[-1].get(key)})
        notes += [f"{name} {_short(mine)}, in the baseline {_short(theirs)}" for name, (theirs, mine) in odd.items()]
    return notes


def _group(name: str, keys: Sequence[str], base: Recorded, run: Recorded) -> Callable[[], Finding]:
    def compare() -> Finding:
        if not base.facts:
            return Finding(name, None, found="the baseline does not say")
        if not run.facts:
            said = _words({key: base.facts[0].get(key) for key in keys})
            return Finding(name, False, said, "not said", "", "the same", "the run does not say its own")
        # A run that was resumed has said it once for each part.
        for facts in run.facts:
            odd = _differences({key: base.facts[0].get(key) for key in keys}, {key: facts.get(key) for key in keys})
            if odd:
                theirs, mine = ({key: pair[side] for key, pair in odd.items()} for side in (0, 1))
                found = "another " + ", ".join(f"{key}: {_short(pair[1])} in place of {_short(pair[0])}" for key, pair in odd.items())
                return Finding(name, False, _words(theirs), _words(mine), "", "the same", found)
        said = _words({key: base.facts[0].get(key) for key in keys})
        return Finding(name, True, said, said, "", "the same")

    return compare


def _differences(base: Any, run: Any, name: str = "") -> dict[str, tuple[Any, Any]]:
    """What differs, by name; mappings are looked into."""
    if not (isinstance(base, Mapping) and isinstance(run, Mapping)):
        return {} if base == run else {name: (base, run)}
    found: dict[str, tuple[Any, Any]] = {}
    for key in [*base, *(key for key in run if key not in base)]:
        found |= _differences(base.get(key), run.get(key), key)
    return found


def _words(values: Mapping[str, Any]) -> str:
    return ", ".join(_short(value) if len(values) == 1 else f"{key} {_short(value)}" for key, value in values.items())


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key} {_short(entry)}" for key, entry in value.items())
    text = "none" if value is None or value == [] else str(value)
    return text.replace("sha256:", "")[:12] + text.partition(" with ")[1] + text.partition(" with ")[2] if text.startswith("sha256:") else text
