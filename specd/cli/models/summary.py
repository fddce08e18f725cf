"""Facts of a model on this machine that need no weights: a row of `specd models list`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from specd.cli.models.cache_facts import cache_kinds
from specd.cli.models.card import licence_of
from specd.cli.models.config_facts import context_length, family, quantisation
from specd.cli.models.places import ModelPlace, Origin, State, printable
from specd.cli.models.template import Tools, template_of, tools_of
from specd.startup_error import StartupError
from specd.worker.heads.marks import kind_of
from specd.worker.model.directory import files_to_download
from specd.worker.model.files import (
    WEIGHTS,
    Names,
    check_files,
    is_head,
    pickles_in,
    read_config,
    read_object,
)
from specd.worker.model.outline import check_description
from specd.worker.model.safetensors_file import tensor_names

_MTP = "MTP"
_SIDECARS = ("mtp.safetensors", "mtp/weights.safetensors", "model-mtp.safetensors")
# Fields with the number of heads, and the names of the tensors of a head.
_PROMISES = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_HEAD_TENSOR = re.compile(r"(?:.*\.)?mtp(?:_\w+)?\..+")
_LAYER_TENSOR = re.compile(r"(?:language_model\.)?model\.layers\.(\d+)\..+")
_LONGEST_REASON = 300


@dataclass(frozen=True)
class ModelSummary:
    """A model on this machine. A field is None where the files do not tell it.

    `reason` is why specd cannot serve it. A head of another model (`is_head`) is served with its target.
    """

    place: ModelPlace
    state: State
    served: bool = False
    reason: str = ""
    is_head: bool = False
    family: str | None = None
    precision: str | None = None
    bits: int | None = None
    context_length: int | None = None
    caches: list[str] | None = None
    heads: list[str] = field(default_factory=list)
    chat: bool = False
    tools: Tools = Tools.NONE
    licence: str | None = None

    @property
    def name(self) -> str:
        """The name for people and for commands."""
        return printable(self.place.name)

    def as_json(self) -> dict[str, Any]:
        """Return the fields as values of JSON."""
        place = self.place
        return {
            "name": self.name,
            "source": place.origin.value,
            "path": str(place.directory or place.root),
            "revision": printable(place.revision) or None,
            "size_bytes": place.size_bytes,
            "state": self.state.value,
            "served": self.served,
            "reason": self.reason or None,
            "kind": "head" if self.is_head else "model",
            "family": self.family,
            "precision": self.precision,
            "bits": self.bits,
            "context_length": self.context_length,
            "caches": self.caches,
            "heads": self.heads,
            "chat": self.chat,
            "tools": self.tools.value,
            "licence": self.licence,
        }


def summary_of(place: ModelPlace) -> ModelSummary:
    """Return what is known of a model. Files that are damaged, missing or refused become its reason."""
    summary = ModelSummary(place, place.state, reason=printable(place.problem, _LONGEST_REASON))
    directory = place.directory
    if directory is None:
        return summary
    config: dict[str, Any] = {}
    names_in = cache(tensor_names)  # several checks read the same headers
    try:
        config = read_config(directory)
        summary = _with_facts(summary, directory, config, names_in)
        if not summary.is_head:
            check_files(directory, names_in)
    except (StartupError, OSError, ValueError, TypeError, AttributeError) as error:  # a value can have any type
        missing = _missing_files(place, directory)
        state = State.PARTIAL if missing else State.DAMAGED if _has_safetensors(directory) else State.COMPLETE
        return refused(replace(summary, state=state), directory, error, missing)
    try:
        if not summary.is_head:
            check_description(summary.name, directory, config)
    except StartupError as error:
        missing = _missing_files(place, directory)
        state = State.PARTIAL if missing else State.COMPLETE
        return refused(replace(summary, state=state), directory, error, missing)
    return replace(summary, served=True, state=State.COMPLETE)


def _with_facts(summary: ModelSummary, directory: Path, config: Mapping[str, Any], names_in: Names) -> ModelSummary:
    """Return a summary with the facts of a directory. Raises StartupError and others for files that are wrong."""
    precision, bits = quantisation(config)
    summary = replace(
        summary,
        family=family(config),
        precision=precision,
        bits=bits,
        context_length=context_length(config),
        licence=licence_of(directory),
    )
    if is_head(directory, names_in):
        for path in directory.glob("*.safetensors"):
            names_in(path)
        if not _has_safetensors(directory):
            raise StartupError(f"{directory} has no weights in safetensors: download it again")
        return replace(summary, is_head=True, heads=[kind_of(config) or _MTP])
    template = template_of(directory)
    return replace(
        summary,
        caches=cache_kinds(config),
        heads=[_MTP] if _has_own_head(directory, config, names_in) else [],
        chat=bool(template),
        tools=tools_of(template, directory),
    )


def _has_own_head(directory: Path, config: Mapping[str, Any], names_in: Names) -> bool:
    """Return whether the files of a model have an MTP head: beside its weights, or in them where its config says so."""
    if any((directory / name).is_file() for name in _SIDECARS):
        return True
    text = config.get("text_config") or config
    if not any(text.get(name) for name in _PROMISES):
        return False
    first = text.get("num_hidden_layers")
    for path in directory.glob(WEIGHTS):
        for name in names_in(path):
            layer = _LAYER_TENSOR.fullmatch(name)
            if _HEAD_TENSOR.fullmatch(name) or (layer and type(first) is int and int(layer[1]) >= first):
                return True
    return False


def refused(summary: ModelSummary, directory: Path, error: Exception, missing: Sequence[str] = ()) -> ModelSummary:
    """Return the summary of a model that cannot be served, because of an error or of files that are missing."""
    why = str(error) if isinstance(error, (StartupError, OSError)) else f"a value in its files is wrong: {error!r}"
    why = why.replace(f"{directory}/", "").replace(str(directory), "it")
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        why = f"it lacks {missing[0]}{others}"
        if summary.place.origin is Origin.HUB:
            why += f": 'specd models pull {summary.name}' downloads the rest"
    return replace(summary, served=False, reason=printable(why, _LONGEST_REASON))


def _missing_files(place: ModelPlace, directory: Path) -> list[str]:
    """Return the files that a model lacks: its config or weights, shards of its index, or files of its repository."""
    missing = [] if (directory / "config.json").is_file() else ["config.json"]
    if not _has_safetensors(directory) and not pickles_in(directory):
        missing.append("the weights")
    for index in directory.glob(f"{WEIGHTS}.index.json"):
        with contextlib.suppress(StartupError, AttributeError, TypeError):
            names = set(read_object(index).get("weight_map", {}).values())
            missing += sorted(name for name in names if not (directory / str(name)).is_file())
    if place.origin is Origin.HUB:
        missing += [name for name in _files_of_repository(place) if not (directory / name).is_file()]
    return list(dict.fromkeys(map(str, missing)))


def _files_of_repository(place: ModelPlace) -> list[str]:
    """Return the files that a download of a repository would have, [] if the cache has no list of its files."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        tree = get_cached_repo_tree(place.name, revision=place.revision, cache_dir=place.root.parent)
    except (CachedRepoTreeNotFoundError, OSError, ValueError):
        return []
    return sorted(files_to_download(each.path for each in tree))


def _has_safetensors(directory: Path) -> bool:
    return any(directory.glob("*.safetensors"))
