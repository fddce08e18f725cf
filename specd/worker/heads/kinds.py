"""The kinds of heads with repositories of their own."""

from __future__ import annotations

from importlib import import_module

from specd.worker.heads import marks
from specd.worker.heads.kind import HeadKind

# Each module has the kind as KIND. Few workers need one, and each imports classes of mlx-lm.
_MODULES = {marks.EAGLE_3: "eagle3", marks.DFLASH: "dflash.head", marks.GEMMA_ASSISTANT: "gemma_assistant"}


def kind_named(name: str) -> HeadKind:
    """Return the kind with this name, one of `marks`."""
    kind: HeadKind = import_module(f"specd.worker.heads.{_MODULES[name]}").KIND
    return kind
