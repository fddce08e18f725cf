"""The directory in which a worker keeps files between its starts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock


def user_cache_directory() -> Path | None:
    """Return specd's directory in the user's cache; None if it cannot be written, as in a hardened container."""
    try:
        directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specd"
        directory.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: HOME is not set, and the user id has no name
        return None
    return directory if os.access(directory, os.W_OK) else None


@contextlib.contextmanager
def taking_turns(what: str, *, timeout_seconds: float) -> Iterator[bool]:
    """Let the processes of a machine that share a user's cache do something one after another.

    Yields whether it is this process's turn. Without its turn, a process continues after `timeout_seconds`, or at once
    if it cannot write to the cache.
    """
    directory = user_cache_directory()
    if directory is None:
        yield False
        return
    lock = FileLock(directory / f"{what}.lock")
    with contextlib.suppress(OSError):  # filelock's Timeout is an OSError
        lock.acquire(timeout=timeout_seconds)
    try:
        yield lock.is_locked
    finally:
        lock.release()


def keep_compiled_kernels(key: str) -> None:
    """Make MLX keep the kernels that it compiles for CUDA in the user's cache. Call it before the first compilation.

    By default MLX keeps them among the temporary files, which a container or a reboot forgets. Its files do not name
    their device and model and are written in place, so `key` must name device and model.
    """
    directory = user_cache_directory()
    if directory is not None:
        os.environ.setdefault("MLX_PTX_CACHE_DIR", str(directory / f"kernels-{version('mlx')}-{key}"))
