"""Whatever stands in a record, it becomes a conversation or a fault that names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tangram.config.data import DatasetAttr
from tangram.data.conversation import Conversation
from tangram.data.dataset import ConversationDataset
from tangram.errors import DataError
from tests.data.test_formats import turns

Write = Callable[..., str]

KEYS = st.sampled_from(
    ["messages", "conversations", "role", "from", "content", "value", "images", "image", "videos", "audios"]
    + ["system", "tools", "instruction", "input", "output", "history", "tool_calls", "type", "text"]
)
WORDS = st.sampled_from(["user", "assistant", "human", "gpt", "system", "tool", "<image>", "<video> <audio>", "a.png", "", "text", "image", "{}"])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
NAMES = KEYS | st.text(max_size=3)
TREES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=5), max_leaves=12)
MESSAGES = st.lists(st.fixed_dictionaries({"role": WORDS | TREES, "content": WORDS | TREES}, optional={"tool_calls": TREES}), max_size=4)
COLUMNS = {"images": TREES, "videos": TREES, "tools": TREES}
SAMPLES = st.dictionaries(KEYS, TREES, max_size=5) | st.fixed_dictionaries({"messages": MESSAGES}, optional=COLUMNS)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(SAMPLES | TREES, max_size=5), st.sampled_from(["sharegpt", "openai", "alpaca"]), st.integers(0, 5))
@example([{"messages": [[[]]] * 2, "images": "\0"}], "sharegpt", 0)
@example([{"messages": turns("role", "content", ("user", "<image>"), ("assistant", "a")), "images": "x" * 5000}], "sharegpt", 0)
def test_no_record_crashes_and_none_is_dropped(write_json: Write, records: list[Any], formatting: Any, place: int) -> None:
    """Conversations and faults are together as many as the records, and each fault names file and record."""
    good = {"messages": turns("role", "content", ("user", "q"), ("assistant", "a")), "instruction": "q", "output": "a"}
    records = [*records[:place], good, *records[place:]]
    attr = DatasetAttr(formatting=formatting, system="system", tools="tools", history="history")
    text = json.dumps(records).encode("utf-8", "surrogatepass")
    path = Path(write_json([]))
    path.write_bytes(text)
    data = ConversationDataset.of_files([str(path)], attr)
    faults = dict(data.faults())
    fine = [sample.id for sample in (whole(data, index) for index in range(len(data))) if sample is not None]
    broken = dict(data.faults(files=False))
    assert sorted([*fine, *broken]) == list(range(len(records)))
    assert [sample.id for sample in data.samples.walk(range(len(records))) if isinstance(sample, Conversation)] == fine
    assert set(broken) <= set(faults)
    for index, fault in faults.items():
        assert "data.json" in str(fault) and f"record {index}" in str(fault) and "\n" not in str(fault)


def whole(data: ConversationDataset, index: int) -> Conversation | None:
    try:
        return data[index]
    except DataError:
        return None
