"""Whether a file has changed since it was read."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

FileState: TypeAlias = tuple[int, int, int]


def state_of(path: Path) -> FileState | None:
    """Return what changes when a file is written or replaced; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
