"""The typed form of tools.json."""

from __future__ import annotations

from tangram.config.parsing import Section


class ToolsConfig(Section):
    """Profiling and memory tools."""
