"""Documents name tests and files that exist, and say of data.json what its schema says."""

from __future__ import annotations

import json
import re
from pathlib import Path

from pydantic import BaseModel

from tangram.config.data import DataConfig
from tangram.config.fsdp2_page import PAGE
from tangram.config.fsdp2_page import page as with_tables

ROOT = Path(__file__).parent.parent


REPORTS = (ROOT / "docs" / "public-reports.md").read_text(encoding="utf-8")


def test_every_test_that_public_reports_names_exists() -> None:
    file = ""
    for word in re.findall(r"`((?:tests/|::)[^`]*)`", REPORTS):
        if (ROOT / word).is_dir():
            continue
        named = re.fullmatch(r"(tests/[\w/]+\.py)?(?:::(\w+))?", word)
        assert named, f"{word}: neither a file of tests nor a test of one"
        file, name = named[1] or file, named[2]
        source = (ROOT / file).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in source, f"{file} has no {name}"


def test_every_public_report_has_a_test_or_a_reason_why_not() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in REPORTS.splitlines() if line.startswith("| ")]
    for row in rows:
        assert len(row) == 3, row
        if row[2] != "test":  # the head of a table
            assert re.search(r"`tests/|^the same\b|^none\b", row[2]), row[0]


def schema_keys(section: type[BaseModel], prefix: str = "") -> dict[str, str]:
    """Key and default as the page writes them. Of the nested sections only ``collate_param`` is part of the name."""
    found = {}
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found |= schema_keys(inner, f"{name}." if name == "collate_param" else "")
        elif field.is_required():
            found[prefix + name] = "required"
        else:
            found[prefix + name] = "null" if field.default is None else f"`{json.dumps(field.default)}`"
    return found


def test_every_key_of_data_json_is_explained_once_with_its_default() -> None:
    text = (ROOT / "docs" / "data-json.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \| ([^|]+) \|", text, re.MULTILINE)
    assert sorted(rows) == sorted(schema_keys(DataConfig).items())


def test_the_tables_of_the_fsdp2_backend_are_those_of_its_schema() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_tables(text) == text, "run python -m tangram.config.fsdp2_page"
    for name in re.findall(r"`(examples/[\w./]+)`", text):
        assert (ROOT / name).is_file(), name


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*/README.md")]


def test_links_between_documents_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_files_that_documents_name_exist() -> None:
    for page in PAGES:
        text = re.sub(r"https?://\S+", "", page.read_text(encoding="utf-8"))
        for name in re.findall(r"\b((?:tests|tangram|examples|bench|docs)/[\w./-]+\w)", text):
            assert (ROOT / name).exists() or name == "tangram/cli/NAME.py", f"{page.name} names {name}"


def test_every_document_can_be_reached_from_the_readme() -> None:
    seen: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in seen:
            continue
        seen.add(page)
        named = re.findall(r"[\w./-]+\.md", page.read_text(encoding="utf-8"))
        waiting += [path for name in named for path in [page.parent / name, ROOT / name] if path.is_file() and path.suffix == ".md"]
    reached = {path.resolve() for path in seen}
    lost = [page.name for page in (ROOT / "docs").glob("*.md") if page.resolve() not in reached]
    assert not lost, f"no page that README.md leads to names {lost}"


def test_the_page_of_baselines_names_commands_checks_and_keys_that_exist() -> None:
    from tangram.align.gate.compare import CHECKS
    from tangram.cli.main import build_parser
    from tangram.config.run import TrainingConfig
    from tangram.training.rank_records import RankRecord

    text = (ROOT / "docs" / "baselines.md").read_text(encoding="utf-8")
    commands = re.findall(r"^tangram (.*?)(?:\s+#.*)?$", text, re.MULTILINE)
    assert len(commands) >= 5
    for command in commands:
        arguments = build_parser().parse_args(command.split())
        for key in re.findall(r"training\.(\w+)=", command):
            assert key in TrainingConfig.model_fields, command
        assert arguments.command in ("train", "baseline", "gate", "replay")
    # The table of an example has every check, in order; the verdict counts those that are marked ok.
    example = text[text.index("checked  ") : text.index("passed: ")]
    rows = re.findall(r"^(\w+)\s+(ok|-)", example, re.MULTILINE)
    assert [name for name, _ in rows] == list(CHECKS)
    assert f"passed: {sum(mark == 'ok' for _, mark in rows)} checks" in text
    named = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", text, re.MULTILINE))))
    assert set(CHECKS) <= named
    assert {name for name in RankRecord.__dataclass_fields__ if name not in ("step", "loss_of_all")} <= named
