"""Documents name tests and files that exist, and say of data.json what its schema says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from tangram.cli.main import main
from tangram.config.data import DataConfig
from tests.trial import records, write_pictures, write_trial

ROOT = Path(__file__).parent.parent


def test_every_test_that_public_reports_names_exists() -> None:
    text = (ROOT / "docs" / "public-reports.md").read_text(encoding="utf-8")
    file = ""
    for path, name in re.findall(r"`(tests/[\w/]+\.py)?(?:::(\w+))?`", text):
        file = path or file
        if not path and not name:
            continue
        source = (ROOT / file).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in source, f"{file} has no {name}"


def schema_keys(section: type[BaseModel], prefix: str = "") -> dict[str, str]:
    """Key and default as the page writes them. Of nested sections only ``collate_param`` is part of the name; the others have a table of their own."""
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


def test_the_example_of_data_json_passes_the_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "data-json.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    trial = write_trial(tmp_path, micro_batch_size=1, eval_interval=2, eval_iters=1)
    (tmp_path / "full.json").write_text(example)
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "Qwen2.5-VL-7B-Instruct").symlink_to(trial.hf)
    (tmp_path / "data").mkdir()
    write_pictures(tmp_path / "data")
    (tmp_path / "data" / "train.json").write_text(json.dumps(records()))
    content = yaml.safe_load(trial.run_file.read_text())
    trial.run_file.write_text(yaml.safe_dump({**content, "data": {"config": "full.json"}}))
    assert main(["check", str(trial.run_file)]) == 0, capsys.readouterr()


def test_links_between_documents_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


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
