"""What every optimisation gives back: a way to undo it, or the reason why it does not apply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Undo = Callable[[], Any]


class UnsuitableError(Exception):
    """Gives the reason why an optimisation does not suit this machine or this network."""
