"""Detection of changed files."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

FileState: TypeAlias = tuple[int, int, int]


def state_of(path: Path) -> FileState | None:
    """Return a value that changes when a file is written or replaced; None if the file does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
