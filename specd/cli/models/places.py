"""The places where models lie on this machine: the cache of the Hugging Face hub, directories, the included models."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from specd.settings import EMBEDDED_DRAFT, EMBEDDED_HEAD, EMBEDDED_T5_DRAFT, EMBEDDED_T5_TARGET, EMBEDDED_TARGET
from specd.startup_error import StartupError

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo

_REPOSITORY = "models--"  # how the directory of a model begins in the hub's cache
_INCOMPLETE = "blobs/*.incomplete"
_CONFIG = "config.json"
_MOST_SUGGESTIONS = 3


class Origin(Enum):
    """The kind of a place."""

    HUB = "hub"
    DIRECTORY = "directory"
    INCLUDED = "included"


class State(Enum):
    """The state of a model's files. DAMAGED ones are broken, or not safe to read."""

    COMPLETE = "complete"
    PARTIAL = "partial"
    DAMAGED = "damaged"


@dataclass(frozen=True)
class ModelPlace:
    """A model on this machine, before any of its files is read.

    `root` is a model's directory, or a repository's in the hub's cache. `directory` has the model's files; it is None,
    and `problem` has the reason, where a repository has no usable snapshot. `size_bytes` counts all revisions.
    """

    name: str
    origin: Origin
    root: Path
    directory: Path | None
    size_bytes: int
    revision: str = ""
    state: State = State.COMPLETE
    problem: str = ""


def printable(text: object, most: int = 200) -> str:
    """Return a text of a stranger without control characters, and cut to a length: it may go to a terminal."""
    kept = "".join(each for each in str(text) if each.isprintable())
    return kept if len(kept) <= most else f"{kept[: most - 1]}…"


def hub_cache() -> Path:
    """Return the cache of the hub, which HF_HUB_CACHE or HF_HOME set."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE).expanduser()


def all_places(cache: Path, directories: Iterable[Path]) -> list[ModelPlace]:
    """Return all models: those of the hub's cache, of the directories, and the included ones. Raises StartupError."""
    return [*places_in_hub(cache), *(place for each in directories for place in places_in(each)), *_included()]


def places_in_hub(cache: Path) -> list[ModelPlace]:
    """Return the models in a cache of the hub, by name; [] if there is no cache. Damaged ones have a problem."""
    from huggingface_hub import scan_cache_dir

    if not cache.is_dir():
        return []
    cache = cache.resolve()
    roots = sorted(path for path in cache.glob(f"{_REPOSITORY}*") if path.is_dir())
    try:
        scan = scan_cache_dir(cache)
    except (OSError, ValueError):  # one file that cannot be read ends the scan of all repositories
        return [_unscanned(root) for root in roots]
    repositories = {each.repo_path: each for each in scan.repos}
    problems = [str(each) for each in scan.warnings]
    return [_place(root, repositories.get(root), problems) for root in roots]


def places_in(directory: Path) -> Iterator[ModelPlace]:
    """Yield the models in a directory: itself, or the directories in it, also by owner. Raises StartupError."""
    for path, name in directories_in(directory):
        yield _of_directory(path, name, Origin.DIRECTORY)


def directories_in(directory: Path) -> Iterator[tuple[Path, str]]:
    """Yield the directories of the models in a directory, with their names. Raises StartupError."""
    directory = directory.expanduser()
    if not directory.is_dir():
        raise StartupError(
            f"models were to be in {str(directory)!r}, which is not a directory: name one that holds models"
        )
    try:
        if _is_model(directory):
            yield directory, directory.resolve().name
            return
        for child in _children(directory):
            if _is_model(child):
                yield child, child.name
            else:
                for each in filter(_is_model, _children(child)):
                    yield each, f"{child.name}/{each.name}"
    except OSError as error:
        raise StartupError(f"the directory {directory} cannot be read: {error}") from error


def place_named(name: str, places: list[ModelPlace]) -> ModelPlace:
    """Return the model of a name or of a directory. Raises StartupError, with names that resemble it."""
    found = [each for each in places if printable(each.name) == name]
    if not found and Path(name).expanduser().is_dir():
        found = list(places_in(Path(name)))[:1]
    if found:
        return found[0]
    shown = [printable(each.name) for each in places]
    by_lower_case = {form.lower(): each for each in shown for form in (each.rpartition("/")[2], each)}
    close = get_close_matches(name.lower(), by_lower_case, 2 * _MOST_SUGGESTIONS, 0.5)
    near = list(dict.fromkeys(by_lower_case[each] for each in close))[:_MOST_SUGGESTIONS]
    hint = f": did you mean {' or '.join(near)}?" if near else ": 'specd models list' shows the models"
    raise StartupError(f"this machine has no model {printable(name)!r}{hint}")


def directory_here(name: str) -> Path | None:
    """Return the files of a model, a directory or a repository in the hub's cache; None if this machine has none.

    It finds the revision of `main` alone, and does not need the hub's client.
    """
    directory = Path(name).expanduser()
    if directory.is_dir():
        return directory
    root = hub_cache() / f"{_REPOSITORY}{name.replace('/', '--')}"
    try:
        snapshot = root / "snapshots" / (root / "refs" / "main").read_text()
    except (OSError, ValueError):
        return None
    return snapshot if snapshot.is_dir() else None


def included_directories() -> list[Path]:
    """Return the directories of the models that come with specd."""
    paths = map(Path, (EMBEDDED_TARGET, EMBEDDED_DRAFT, EMBEDDED_HEAD, EMBEDDED_T5_TARGET, EMBEDDED_T5_DRAFT))
    return [path for path in paths if path.is_dir()]


def _included() -> Iterator[ModelPlace]:
    for path in included_directories():
        yield _of_directory(path, path.name, Origin.INCLUDED)


def _place(root: Path, repository: CachedRepoInfo | None, problems: Iterable[str]) -> ModelPlace:
    """Return the place of a repository; `repository` is None if the hub's scan has left it out."""
    name = root.name.removeprefix(_REPOSITORY).replace("--", "/")
    partial = _total(root.glob(_INCOMPLETE))
    snapshots = sorted((path for path in root.glob("snapshots/*") if path.is_dir()), key=lambda path: path.name)
    if not snapshots:
        size = _size(root / "blobs")
        return ModelPlace(name, Origin.HUB, root, None, size, "", State.PARTIAL, "its download has not finished")
    if repository is None:
        why = next((each for each in problems if str(root) in each), "the scan of the hub's cache cannot read it")
        why = why.replace(f"{root}/", "")
        return ModelPlace(
            name, Origin.HUB, root, None, _size(root / "blobs"), "", State.DAMAGED, f"its cache is damaged: {why}"
        )
    revision = repository.refs.get("main") or max(repository.revisions, key=lambda each: each.last_modified)
    size = repository.size_on_disk + partial
    state = State.PARTIAL if partial else State.COMPLETE
    return ModelPlace(name, Origin.HUB, root, revision.snapshot_path, size, revision.commit_hash, state)


def _unscanned(root: Path) -> ModelPlace:
    """Return the place of a repository, and find its revision without the hub's client."""
    name = root.name.removeprefix(_REPOSITORY).replace("--", "/")
    size = _size(root / "blobs")
    try:
        revision = (root / "refs" / "main").read_text()
        snapshot = root / "snapshots" / revision
        if not (re.fullmatch(r"\w+", revision) and snapshot.is_dir()):
            raise ValueError(f"refs/main names no snapshot: {printable(revision, 50)!r}")
    except (OSError, ValueError) as error:
        why = printable(str(error).replace(f"{root}/", ""))
        return ModelPlace(name, Origin.HUB, root, None, size, "", State.DAMAGED, f"its cache is damaged: {why}")
    return ModelPlace(name, Origin.HUB, root, snapshot, size, revision)


def _of_directory(directory: Path, name: str, source: Origin) -> ModelPlace:
    return ModelPlace(name, source, directory, directory, _size(directory))


def _is_model(directory: Path) -> bool:
    return (directory / _CONFIG).is_file() or any(directory.glob("*.safetensors"))


def _children(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.is_dir() and not path.name.startswith("."))


def _size(directory: Path) -> int:
    """Return the bytes of all files under a directory; links count as their targets, and broken ones as 0."""
    return _total(path for path in directory.rglob("*") if path.is_file())


def _total(files: Iterable[Path]) -> int:
    total = 0
    for file in files:
        with contextlib.suppress(OSError):  # a download that runs has renamed or removed it
            total += file.stat().st_size
    return total
