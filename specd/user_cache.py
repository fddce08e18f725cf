"""The directory where a worker keeps files from one start to the next."""

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
    except (OSError, RuntimeError):  # the latter without HOME, for a user id that has no name
        return None
    return directory if os.access(directory, os.W_OK) else None


@contextlib.contextmanager
def taking_turns(what: str, *, timeout_seconds: float) -> Iterator[bool]:
    """Let the processes of a machine that have the same user's cache do something one after another.

    Yields whether it is this process's turn. It goes on without after `timeout_seconds`, and at once where there is no
    cache to write to.
    """
    directory = user_cache_directory()
    if directory is None:
        yield False
        return
    lock = FileLock(directory / f"{what}.lock")
    with contextlib.suppress(OSError):  # Timeout is one
        lock.acquire(timeout=timeout_seconds)
    try:
        yield lock.is_locked
    finally:
        lock.release()


def keep_compiled_kernels(key: str) -> None:
    """Let MLX keep the kernels there that it compiles for CUDA, before it compiles any.

    By itself it keeps them among the temporary files, which a container or the next boot forgets. Its files do not
    name their device and model, and are written in place: `key` must name them.
    """
    directory = user_cache_directory()
    if directory is not None:
        os.environ.setdefault("MLX_PTX_CACHE_DIR", str(directory / f"kernels-{version('mlx')}-{key}"))
