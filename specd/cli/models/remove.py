"""Removing a repository from the cache of the Hugging Face hub: `specd models rm`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from specd.cli.models.places import ModelPlace, Origin, printable
from specd.startup_error import StartupError

if TYPE_CHECKING:
    from huggingface_hub import DeleteCacheStrategy


def removal_of(place: ModelPlace) -> DeleteCacheStrategy:
    """Return the hub's strategy to delete all revisions of a repository. Raises StartupError for other places."""
    from huggingface_hub import DeleteCacheStrategy, scan_cache_dir

    if place.origin is not Origin.HUB:
        raise StartupError(
            f"{printable(place.name)} is the directory {printable(place.root)}, not a download of the hub: specd does "
            "not remove directories. Remove it yourself if you do not need it"
        )
    cache = place.root.parent
    try:
        scan = scan_cache_dir(cache)
        repository = next((each for each in scan.repos if each.repo_path == place.root), None)
    except (OSError, ValueError):
        repository = None
    if repository is not None and repository.revisions:
        # The strategy finds revisions by their commits alone, and a fork has commits of the original repository.
        own = replace(scan, repos=frozenset({repository}))
        removal = own.delete_revisions(*(each.commit_hash for each in repository.revisions))
        unfinished = sum(
            each.size_on_disk for each in scan.incomplete_files if each.file_path.is_relative_to(place.root)
        )
        return replace(removal, expected_freed_size=removal.expected_freed_size + unfinished)
    # The scan leaves out a damaged repository and one without a snapshot, so no revision names it.
    nothing: frozenset[Path] = frozenset()
    return DeleteCacheStrategy(place.size_bytes, nothing, nothing, frozenset({place.root}), nothing, cache_dir=cache)


def remove(place: ModelPlace, removal: DeleteCacheStrategy) -> None:
    """Delete a repository. Raises StartupError if some of it is left, which the hub's client only logs."""
    removal.execute()
    if place.root.exists():
        raise StartupError(
            f"{printable(place.name)} could not be removed completely: check who may write to {printable(place.root)}"
        )
