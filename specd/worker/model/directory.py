"""The directory of a model, local or downloaded."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from specd.startup_error import StartupError
from specd.supervised import tell_supervisor
from specd.worker.model.files import UNWANTED_FILES, WANTED_FILES

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def is_repository(name: str) -> bool:
    """Return whether a model is a repository of the hub, and not a directory."""
    return bool(_REPOSITORY.fullmatch(name)) and not Path(name).expanduser().exists()


def find(name: str, wanted: Sequence[str] = WANTED_FILES) -> Path:
    """Return the directory of a model, which is local or downloaded from the hub. Raises StartupError."""
    directory = Path(name).expanduser()
    if directory.is_dir():
        return directory
    if directory.exists():
        raise StartupError(f"the model {name} is a file: name the directory that holds config.json and the weights")
    if not _REPOSITORY.fullmatch(name):
        raise StartupError(
            f"the model {name} does not exist: name a local directory or a Hugging Face repository "
            "such as mlx-community/Qwen3-8B-4bit"
        )
    import structlog  # takes long, and directories do not need it

    structlog.get_logger().info("looking up the model", repository=name)
    try:
        return download(name, wanted, bars=_progress_bar())
    except Exception as error:  # the hub client has dozens of error types, with the same meaning here
        raise StartupError(
            f"{name} is not a local directory, and the Hugging Face repository cannot be downloaded: {error}"
        ) from error


def download(name: str, wanted: Sequence[str] = WANTED_FILES, *, revision: str | None = None, bars: Any = None) -> Path:
    """Return the directory of a repository, after its missing files are downloaded. Raises the hub client's errors.

    `bars` is a class of progress bars; with None, the hub's own draw on standard error.
    """
    from huggingface_hub import snapshot_download

    allowed, ignored = [*wanted], [*UNWANTED_FILES]
    return Path(
        snapshot_download(name, revision=revision, allow_patterns=allowed, ignore_patterns=ignored, tqdm_class=bars)
    )


def files_to_download(names: Iterable[str], wanted: Sequence[str] = WANTED_FILES) -> list[str]:
    """Return the files of a repository that `download` would fetch."""
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    return [*filter_repo_objects(names, allow_patterns=[*wanted], ignore_patterns=[*UNWANTED_FILES])]


def bars_that_tell(tell: Callable[[float, float], object]) -> Any:
    """Return a class of progress bars that draw nothing and tell the bytes of a download, those done and all.

    Several bars count the same bytes.
    """
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    class Told(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "file": io.StringIO()})

        def display(self, *_: Any, **__: Any) -> None:
            if self.unit == "B" and self.total:
                tell(self.n, self.total)

    return Told


def _progress_bar() -> Any:
    """Return the class of progress bars; None for the hub's own, which draw on standard error."""
    if not tell_supervisor(stage="looking up"):
        return None
    return bars_that_tell(lambda done, total: tell_supervisor(stage="downloading", done=done, total=total))
