"""The tables of docs/fsdp2.md, made of the schema: ``python -m tangram.config.fsdp2_page`` writes them below the page's last heading of its own."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

import tangram.config.fsdp2 as schema
from tangram.config.fsdp2_keys import FSDP2, FSDP2_DATA, OTHERS, VALUES
from tangram.config.parsing import section_at
from tangram.config.public_keys import NoEffect, OffBy, Only

PAGE = Path(__file__).parents[2] / "docs" / "fsdp2.md"
HEADING = "## All keys\n"


def page(prose: str) -> str:
    """``prose`` with the tables behind ``HEADING`` as the schema has them now."""
    own = prose.partition(HEADING)[0]
    return own + HEADING + "\n" + "\n".join([*_keys(), "", *_refused()]) + "\n"


def _keys() -> Iterator[str]:
    yield "`data` holds the keys of [data-json.md](data-json.md) and `dataloader_param.num_workers`, the processes that read (`2`); `tools` those of"
    yield "tools.json."
    for section in ("parallel", "model", "features", "training"):
        yield from ("", f"### {section}", "", "| key | default | meaning |", "|---|---|---|")
        nested = section_at(schema.Fsdp2Config, (section,))
        assert nested is not None
        yield from _rows(nested, "")


def _rows(section: type[BaseModel], prefix: str) -> Iterator[str]:
    said = _docstrings(section)
    for name, field in section.model_fields.items():
        nested = section_at(section, (name,))
        if nested is not None and isinstance(field.annotation, type):
            yield from _rows(nested, f"{prefix}{name}.")
            continue
        default = "required" if field.is_required() else "null" if field.default is None else f"`{json.dumps(field.default)}`"
        yield f"| `{prefix}{name}` | {default} | {said[name]} |"


def _docstrings(section: type[BaseModel]) -> dict[str, str]:
    """What stands below each field."""
    body = ast.parse(inspect.getsource(section)).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            plain = " ".join(str(ast.literal_eval(text.value)).split()).rstrip(".")
            found[field.target.id] = plain.replace("see ``tangram.losses.modes``", "see above").replace("None:", "null:").replace("``", "`")
    return found


def _refused() -> Iterator[str]:
    yield from ("### Keys of MindSpeed-MM that are no keys here", "", "| key | taken | because |", "|---|---|---|")
    added = {("data", *place): {k: v for k, v in entries.items() if v not in _shared()} for place, entries in FSDP2_DATA.items()}
    for place, entries in {**FSDP2, **added}.items():
        for key, entry in entries.items():
            match entry:
                case Only():
                    taken = f"as {' or '.join(json.dumps(value) for value in entry.values)}"
                case OffBy():
                    taken = f"while its `{entry.switch}` is off"
                case NoEffect():
                    taken = "no: remove it"
                case _:
                    raise AssertionError(f"{key}: a kind of entry that this page does not know")
            yield f"| `{'.'.join((*place, key))}` | {taken} | {entry.why} |"
    for place, values in VALUES.items():
        for value, mend in values.items():
            yield f"| `{'.'.join(place)}: {json.dumps(value)}` | no | {mend} |"
    yield from ("", "### Keys of the other backends", "", "| key | here |", "|---|---|")
    yield from (f"| `{key}` | {mend} |" for key, mend in OTHERS.items())


def _shared() -> list[object]:
    """Entries that docs/public-keys.md lists already."""
    from tangram.config.public_keys import DATA

    return [entry for entries in DATA.values() for entry in entries.values()]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
