"""Schemas of MaskBench (arXiv 2501.10868) beside the repository, where they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

_PATH = Path(__file__).parents[2] / "shared" / "schemas" / "maskbench.jsonl"


def schemas() -> list[dict[str, Any]]:
    """Return the schemas, each with a name and with instances. The test is skipped where they are not."""
    if not _PATH.is_file():
        pytest.skip(f"there are no schemas at {_PATH}")
    return [json.loads(line) for line in _PATH.read_text().splitlines()]
