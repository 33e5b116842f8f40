"""Documents name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

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
