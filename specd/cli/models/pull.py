"""Downloading a model from the Hugging Face hub: `specd models pull`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specd.cli.models.places import hub_cache, printable
from specd.startup_error import StartupError
from specd.worker.model.directory import bars_that_tell, download, files_to_download, is_repository
from specd.worker.model.files import CARD_FILES, WANTED_FILES, check_files, is_head
from specd.worker.model.safetensors_file import tensor_names

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo as HubModel

_PULLED = (*WANTED_FILES, *CARD_FILES)
_SAFETENSORS = "*.safetensors"


def pull(name: str, revision: str | None, tell: Callable[[float, float], object]) -> Path:
    """Download the missing files of a repository, check them, and return their directory.

    `tell` gets the bytes done and all of them. Raises StartupError for a wrong name, a repository without safetensors,
    a disk without room, a hub that cannot be reached, and files that are damaged or missing after the download.
    """
    if not is_repository(name):
        raise StartupError(
            f"{printable(name)!r} is not the name of a Hugging Face repository: write OWNER/NAME, such as "
            "mlx-community/Qwen3-8B-4bit"
        )
    sizes, commit = _look_up(name, revision)
    _check_has_weights(name, sizes)
    _check_room(name, sizes, commit)
    try:
        directory = download(name, _PULLED, revision=revision, bars=bars_that_tell(tell))
    except Exception as error:  # the hub client has dozens of error types
        raise StartupError(
            f"the download of {name} has failed: {_reason(error)}. Run the command again: it keeps the files that are "
            "complete"
        ) from error
    _check_files(name, directory, sizes)
    return directory


def _look_up(name: str, revision: str | None) -> tuple[dict[str, int], str]:
    """Return the bytes of the files to download, by name, and the commit. Raises StartupError."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        model = HfApi().model_info(name, revision=revision, files_metadata=True)
    except OfflineModeIsEnabled as error:
        raise StartupError(f"{name} cannot be downloaded, because HF_HUB_OFFLINE is set: unset it") from error
    except RevisionNotFoundError as error:
        raise StartupError(
            f"the repository {name} has no revision {revision!a}: name a branch, tag or commit"
        ) from error
    except GatedRepoError as error:
        raise StartupError(
            f"the repository {name} is gated: accept its terms on its page, and set HF_TOKEN to a token of that account"
        ) from error
    except RepositoryNotFoundError as error:
        raise StartupError(
            f"the hub has no repository {name}, or it is private: check the name, and set HF_TOKEN if it is private"
        ) from error
    except HfHubHTTPError as error:
        raise StartupError(f"the hub has refused to describe {name}: {_reason(error)}. Try again later") from error
    except Exception as error:  # no network, a proxy, TLS: errors of the HTTP client
        raise StartupError(
            f"the hub cannot be reached to download {name} ({_reason(error)}): check the network, or set HF_ENDPOINT "
            "to a mirror"
        ) from error
    return _wanted(model), model.sha or ""


def _wanted(model: HubModel) -> dict[str, int]:
    sizes = {each.rfilename: each.size or 0 for each in model.siblings or ()}
    return {file: sizes[file] for file in files_to_download(sizes, _PULLED)}


def _check_has_weights(name: str, files: Iterable[str]) -> None:
    if not any(fnmatch(file, _SAFETENSORS) for file in files):
        raise StartupError(
            f"the repository {name} has no weights in safetensors, which specd needs: look for another conversion of "
            f"the model, or, if it has pickle weights, download it and use 'specd convert'"
        )


def _check_room(name: str, sizes: dict[str, int], commit: str) -> None:
    """Raise StartupError if the disk of the hub's cache has no room for the files that are missing."""
    from huggingface_hub import try_to_load_from_cache

    needed = sum(
        size for file, size in sizes.items() if not isinstance(try_to_load_from_cache(name, file, revision=commit), str)
    )
    cache = hub_cache()
    place = next(path for path in (cache, *cache.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise StartupError(
            f"{name} needs {needed / 1e9:,.2f} GB more on the disk of {cache}, which has {free / 1e9:,.2f} GB free: "
            "'specd models rm' removes models, and HF_HUB_CACHE names another place"
        )


def _check_files(name: str, directory: Path, sizes: dict[str, int]) -> None:
    """Raise StartupError unless all files are there with their sizes, and all weights are sound."""
    for file, size in sizes.items():
        path = directory / file
        if not path.is_file() or path.stat().st_size != size:
            raise StartupError(f"{file!a} of {name} is not complete after the download: run the command again")
    try:
        if is_head(directory):
            for path in directory.glob(_SAFETENSORS):
                tensor_names(path)
        else:
            check_files(directory)
    except StartupError as error:
        why = str(error).replace(f"{os.fspath(directory)}/", "").replace(os.fspath(directory), name)
        raise StartupError(f"{name} is downloaded, but its files cannot be used: {why}") from error


def _reason(error: Any) -> str:
    """Return the first line of an error, with its type where that is all."""
    return printable(" ".join(str(error).split()) or type(error).__name__, 300)
