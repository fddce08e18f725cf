"""Where a worker keeps what is tedious to make, from one start to the next."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

_TURN_POLL_SECONDS = 0.02


def user_cache_directory() -> Path | None:
    """Return specd's directory in the user's cache; None if it cannot be written, as in a hardened container."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(base) / "specd"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return directory if os.access(directory, os.W_OK) else None


@contextlib.contextmanager
def taking_turns(what: str, *, timeout_seconds: float) -> Iterator[bool]:
    """Let the processes of a machine that have the same user's cache do something one after another.

    Gives whether it is this one's turn; after so many seconds it goes on in any case, and without a cache at once.
    """
    directory = user_cache_directory()
    if directory is None:
        yield False
        return
    give_up_at = time.monotonic() + timeout_seconds
    with (directory / f"{what}.lock").open("w") as file:
        while not (has_turn := _locks(file.fileno())) and time.monotonic() < give_up_at:
            time.sleep(_TURN_POLL_SECONDS)
        yield has_turn  # closing the file ends the turn, and so does the end of the process


def _locks(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def keep_compiled_kernels(key: str) -> None:
    """Let MLX keep the kernels there that it compiles for CUDA, before it compiles any.

    By itself it keeps them among the temporary files, where a container or the next boot forgets them. Its files say
    nothing of what they are for, and are written in place: so the key is to tell the device and the model.
    """
    directory = user_cache_directory()
    if directory is not None:
        os.environ.setdefault("MLX_PTX_CACHE_DIR", str(directory / f"kernels-{version('mlx')}-{key}"))
