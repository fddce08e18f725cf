"""The fingerprint of a model, by which a coordinator recognises it after a restart of its worker."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import astuple, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Self

import structlog

from specd.user_cache import user_cache_directory
from specd.worker.model.files import WEIGHTS

log = structlog.get_logger()

# The files that determine a model's text.
_HASHED = (
    *(WEIGHTS, "config.json", "generation_config.json", "hf_quant_config.json"),
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("chat_template.*", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "*.spm", "*.tiktoken"),
)
_CHUNK_BYTES = 8 * 2**20
# A file that changed less than this before it was read could change again without a later time stamp.
_SETTLED_SECONDS = 2.0
# From sys/resource.h on macOS: this thread, with the lowest priority.
_DARWIN_THREAD, _DARWIN_BACKGROUND = 3, 0x1000


def quick_fingerprint(directory: Path, files: str = WEIGHTS) -> str:
    """Digest the config and, for each file of weights, its size and sixteen samples, which is fast."""
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    sample = 64 * 1024
    for path in sorted(directory.glob(files)):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for i in range(16):
                file.seek((size - sample) * i // 15 if size > sample else 0)
                digest.update(file.read(sample))
    return digest.hexdigest()[:32]


def short_digest(data: bytes) -> str:
    """Return a short hexadecimal digest."""
    return hashlib.sha256(data).hexdigest()[:32]


@dataclass(frozen=True)
class FileState:
    """The state of a file. While it is the same, so are the file's bytes: its change time cannot be set back."""

    path: Path
    device: int
    inode: int
    num_bytes: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> Self:
        """Return the state of a file now. Raises OSError."""
        status = path.stat()
        times = status.st_mtime_ns, status.st_ctime_ns
        return cls(path, status.st_dev, status.st_ino, status.st_size, *times)


def hashed_files(directory: Path) -> tuple[FileState, ...]:
    """Return the files of a model that its fingerprint covers, as they are now."""
    names = sorted(path.name for path in directory.iterdir() if any(fnmatch(path.name, each) for each in _HASHED))
    return tuple(FileState.of(directory / name) for name in names)


def whole_fingerprint(files: Sequence[FileState]) -> Future[str]:
    """Digest every byte of a model's files, in the background: a hexadecimal SHA-256.

    It takes a second for one or two gigabytes, on a thread with the lowest priority, and is kept on disk until the
    files change. `files` are the states before the model was loaded; the digest is empty if a file has changed since.
    """
    future: Future[str] = Future()
    kept = _kept_in(files)
    if kept is not None and (known := _read(kept)):
        future.set_result(known)
        return future

    def run() -> None:
        _go_last()
        started_at = time.time()
        try:
            fingerprint = digest_of(files)
            is_settled = all(
                max(file.modified_ns, file.changed_ns) < (started_at - _SETTLED_SECONDS) * 1e9 for file in files
            )
            if kept is not None and is_settled:
                _write(kept, fingerprint)
        except Exception as error:  # an error would vanish with the thread
            log.error("cannot digest the model, so a coordinator will not use it after a loss", error=repr(error))
            fingerprint = ""
        seconds = round(time.time() - started_at, 2)
        log.info("digested the model", fingerprint=fingerprint[:16], seconds=seconds)
        future.set_result(fingerprint)

    threading.Thread(target=run, name="fingerprint", daemon=True).start()
    return future


def digest_of(files: Sequence[FileState]) -> str:
    """Return the hexadecimal SHA-256 of files. Raises RuntimeError if one of them has changed since its state."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    for state in files:
        digest.update(f"{state.path.name} {state.num_bytes}\n".encode())
        # Unbuffered and in large chunks, because each chunk needs the interpreter's lock.
        with state.path.open("rb", buffering=0) as file:
            while num_bytes := file.readinto(buffer):
                digest.update(buffer[:num_bytes])
        if FileState.of(state.path) != state:
            raise RuntimeError(f"{state.path} has changed since the model was loaded: restart the worker")
    return digest.hexdigest()


def _kept_in(files: Sequence[FileState]) -> Path | None:
    directory = user_cache_directory()
    if directory is None:
        return None
    key = "\n".join(repr(astuple(file)) for file in files)
    return directory / f"fingerprint-{hashlib.sha256(key.encode()).hexdigest()[:24]}"


def _read(path: Path) -> str:
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    return text if re.fullmatch("[0-9a-f]{64}", text) else ""


def _write(path: Path, fingerprint: str) -> None:
    with contextlib.suppress(OSError):  # on a full disk, the next start computes it again
        written = path.with_suffix(f".{os.getpid()}")
        written.write_text(fingerprint)
        written.replace(path)


def _go_last() -> None:
    """Give this thread the lowest priority, where the system supports it."""
    with contextlib.suppress(OSError):
        if sys.platform == "darwin":
            os.setpriority(_DARWIN_THREAD, 0, _DARWIN_BACKGROUND)
        elif sys.platform == "linux":  # threads have priorities of their own there
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
