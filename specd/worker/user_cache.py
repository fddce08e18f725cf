"""Where a worker keeps what is tedious to make, from one start to the next."""

from __future__ import annotations

import os
from importlib.metadata import version
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


def keep_compiled_kernels(key: str) -> None:
    """Let MLX keep the kernels there that it compiles for CUDA, before it compiles any.

    By itself it keeps them among the temporary files, where a container or the next boot forgets them. Its files say
    nothing of what they are for, and are written in place: so the key is to tell the device and the model.
    """
    directory = user_cache_directory()
    if directory is not None:
        os.environ.setdefault("MLX_PTX_CACHE_DIR", str(directory / f"kernels-{version('mlx')}-{key}"))
