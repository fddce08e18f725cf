"""The results of an optimisation: functions that undo it, or an error with the reason why it does not apply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Undo = Callable[[], Any]


class UnsuitableError(Exception):
    """An optimisation does not suit this machine or this network, for the given reason."""
