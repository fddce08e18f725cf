"""Where a worker keeps what is tedious to make, from one start to the next."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache_directory() -> Path | None:
    """Return specd's directory in the user's cache; None if it cannot be written, as in a hardened container."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(base) / "specd"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return directory if os.access(directory, os.W_OK) else None
