"""Parametrisations of which `make test` runs the first examples, and `make test-thorough` the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def examples(values: Iterable[Any], first: int) -> list[Any]:
    """Return values for `parametrize`, tuples for several names: all but the first ones are marked thorough."""
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*row, marks=() if i < first else pytest.mark.thorough) for i, row in enumerate(rows)]
