"""The models of a coordinator that serves several, in a file that its supervisor or its operator writes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from specd.model_info import public_name_of
from specd.setting_types import Addresses, OptionalAddresses
from specd.startup_error import StartupError

_MOST_CHARACTERS = 500  # of a wrong file in an error
_MOST_NAME_CHARACTERS = 200


def _check_name(name: str) -> str:
    if len(name) > _MOST_NAME_CHARACTERS or any(each <= " " for each in name):
        raise ValueError(
            f"{name[:_MOST_NAME_CHARACTERS]!r} is not a name of a model: write at most {_MOST_NAME_CHARACTERS} "
            "characters without spaces"
        )
    if public_name_of(name) != name:
        raise ValueError(f"{name!r} is a path: give the model a name")
    return name


Name = Annotated[str, AfterValidator(_check_name)]


@checked_dataclass(frozen=True, config={"extra": "forbid"})
class ModelEntry:
    """A model that requests can name.

    Its workers are at `target` and `draft`, in the form of the coordinator's settings. Requests can also name one of
    its `adapters`. With a `key`, the supervisor starts and stops the workers under this key; without one they run all
    the time. They need `num_bytes` of memory. A `pinned` model is loaded at the start and stays; another one is
    unloaded after `idle_seconds` without a request.
    """

    name: Name
    target: Addresses
    draft: OptionalAddresses = ""
    adapters: tuple[Name, ...] = ()
    key: str = ""
    num_bytes: Annotated[int, Field(ge=0)] = 0
    pinned: bool = False
    idle_seconds: Annotated[float, Field(gt=0)] = math.inf

    def has_workers_of(self, other: ModelEntry) -> bool:
        """Return whether both have the same workers: those of the same key, or without one at the same addresses."""
        if self.key or other.key:
            return self.key == other.key
        return (self.target, self.draft) == (other.target, other.draft)


@checked_dataclass(frozen=True, config={"extra": "forbid"})
class ModelEntries:
    """The models by which a coordinator serves requests, the first one those that name none.

    Those that are loaded at the same time need at most `budget_bytes`; None is no limit.
    """

    models: Annotated[tuple[ModelEntry, ...], Field(min_length=1)]
    budget_bytes: Annotated[int, Field(gt=0)] | None = None

    def __post_init__(self) -> None:
        names = [name for entry in self.models for name in (entry.name, *entry.adapters)]
        if not all(names) and len(names) > 1:
            raise ValueError("a model has no name")
        pinned = sum(entry.num_bytes for entry in self.models if entry.pinned)
        needed = {entry.name: pinned + (0 if entry.pinned else entry.num_bytes) for entry in self.models}
        name = max(needed, key=needed.__getitem__)
        if self.budget_bytes is not None and needed[name] > self.budget_bytes:
            raise ValueError(
                f"the model {name!r} and the pinned ones need {needed[name]} bytes together, more than the budget of "
                f"{self.budget_bytes}"
            )
        if doubled := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two models or adapters have the name {doubled[0]!r}")

    def to_json(self) -> str:
        """Return the content of a file."""
        return json.dumps(asdict(self), indent=1)  # JSON of Python: it has Infinity


def model_entries(models: Iterable[ModelEntry], budget_bytes: int | None) -> ModelEntries:
    """Return the models with a budget. Raises StartupError if they contradict each other."""
    try:
        return ModelEntries(tuple(models), budget_bytes)
    except ValidationError as error:
        raise StartupError(f"the models are wrong: {_problems_of(error)}") from error


def model_entry(name: str, target: str, **fields: Any) -> ModelEntry:
    """Return a model with these fields. Raises StartupError if one of them is wrong."""
    try:
        return ModelEntry(name=name, target=target, **fields)
    except ValidationError as error:
        raise StartupError(f"the model {name!r} is wrong: {_problems_of(error)}") from error


def read_model_entries(path: Path) -> ModelEntries:
    """Return the models in a file. Raises StartupError."""
    try:
        return TypeAdapter(ModelEntries).validate_json(path.read_bytes())
    except OSError as error:
        raise StartupError(f"the file of models {path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise StartupError(f"the file of models {path} is wrong: {_problems_of(error)}") from error


def _problems_of(error: ValidationError) -> str:
    places = (
        (".".join(map(str, each["loc"])) or "the whole file", each["msg"].removeprefix("Value error, "))
        for each in error.errors()
    )
    return "; ".join(f"{place}: {problem}" for place, problem in places)[:_MOST_CHARACTERS]
