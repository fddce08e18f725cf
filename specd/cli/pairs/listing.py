"""A digest of the models on this machine, in a few milliseconds: it changes when one is added, removed or changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import astuple
from pathlib import Path

from specd.cli.models.places import directories_in, hub_cache, included_directories
from specd.machine import total_memory
from specd.worker.model.files import wanted_in
from specd.worker.model.fingerprint import FileState


def listing_of(directories: Iterable[Path], *extra: object) -> str:
    """Return a digest of the states of all models' files, of the machine's memory, and of `extra`.

    It reads no file, but for the names of revisions in the hub's cache. Raises StartupError for a path that is not a
    directory.
    """
    digest = hashlib.sha256(repr((total_memory(), extra)).encode())
    for directory in _model_directories(directories):
        digest.update(repr([str(directory), *_states(directory)]).encode())
    return digest.hexdigest()[:32]


def _model_directories(directories: Iterable[Path]) -> Iterator[Path]:
    for root in sorted(hub_cache().glob("models--*")):
        yield from sorted((root / "snapshots").glob("*"))
        yield root / "refs"
        yield root / "blobs"
    for directory in directories:
        yield from (path for path, _ in directories_in(directory))
    yield from included_directories()


def _states(directory: Path) -> Iterator[object]:
    """Yield the states of a model's files. The folders of the hub's cache change with the names in them."""
    try:
        if directory.name in {"refs", "blobs"}:
            yield directory.stat().st_mtime_ns
            if directory.name == "refs" and (directory / "main").is_file():
                yield (directory / "main").read_text(errors="replace")
            return
        for path in wanted_in(directory):
            try:
                yield astuple(FileState.of(path))
            except OSError:
                yield path.name  # a link without its file
    except OSError as error:
        yield repr(error)
