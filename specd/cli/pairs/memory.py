"""The memory that a target and its draft need, beside the memory of this machine, before anything is loaded."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specd.cli.models.cache_facts import cache_numbers_per_token
from specd.cli.models.config_facts import item_bytes
from specd.cli.models.details import weight_bytes
from specd.cli.models.places import directory_here
from specd.machine import available_memory, has_gpu, model_memory
from specd.model_info import short_name_of
from specd.worker.model.files import WEIGHTS, read_config

# One short session, the least that a pair is for.
_SESSION_TOKENS = 1000
_FLOAT32_BYTES = 4
# The part of a Mac's memory that its GPU gets by default: three quarters, and less on small machines.
_MAC_SHARE = 0.75


@dataclass(frozen=True)
class ModelMemory:
    """The bytes that a model needs here: its weights, and the caches of a short session; 0 if that is not known.

    On a CPU, weights and caches are in float32.
    """

    name: str
    weights: int
    caches: int = 0

    @property
    def total(self) -> int:
        """Weights and caches."""
        return self.weights + self.caches


def memory_of(name: str, directory: Path) -> ModelMemory:
    """Return the memory of a model, by its config and the headers of its weights. Raises StartupError."""
    config = read_config(directory)
    stored, in_float32 = weight_bytes(directory, config)
    return ModelMemory(name, stored if has_gpu() else in_float32, _of_a_session(config))


def memory_here(name: str) -> ModelMemory | None:
    """Return the memory of a directory or repository; None if this machine does not have its weights yet."""
    directory = directory_here(name)
    if directory is None or not any(directory.glob(WEIGHTS)):
        return None
    return memory_of(short_name_of(name), directory)


def _of_a_session(config: Mapping[str, Any]) -> int:
    numbers = cache_numbers_per_token(config) or 0
    return _SESSION_TOKENS * numbers * (item_bytes(config) if has_gpu() else _FLOAT32_BYTES)


@dataclass(frozen=True)
class PairMemory:
    """The memory that models need together, a target for each of `targets` processes and perhaps a draft.

    `there` is the memory in which models can lie on this machine, None if it is unknown, and `free` the part that no
    other program uses now.
    """

    target: ModelMemory
    draft: ModelMemory | None = None
    targets: int = 1
    there: int | None = None
    free: int | None = None

    @classmethod
    def on_this_machine(cls, target: ModelMemory, draft: ModelMemory | None = None, targets: int = 1) -> PairMemory:
        """Return the memory that these models need here."""
        there = model_memory()
        if sys.platform == "darwin":
            return cls(target, draft, targets, there, int(_MAC_SHARE * (there or 0)))
        return cls(target, draft, targets, there, there if has_gpu() else available_memory())

    @property
    def weights(self) -> int:
        """The bytes of all weights."""
        return self.targets * self.target.weights + (self.draft.weights if self.draft else 0)

    @property
    def needed(self) -> int:
        """The bytes of all weights, and of the caches of a short session."""
        return self.targets * self.target.total + (self.draft.total if self.draft else 0)

    @property
    def problem(self) -> str:
        """The reason, for people, why the models surely do not fit: their weights alone are too large. Otherwise ""."""
        if self.there is None or self.weights <= self.there:
            return ""
        return f"{self._in_words}, but this machine has {in_gigabytes(self.there)} for models: {self._advice}"

    @property
    def warning(self) -> str:
        """The reason, for people, why the models may not fit beside the other programs; "" if they do."""
        if self.free is None or self.needed <= self.free or self.problem:
            return ""
        return f"{self._in_words}, but only {in_gigabytes(self.free)} is free for models: {self._advice}"

    @property
    def _in_words(self) -> str:
        times = f"{self.targets} x " if self.targets > 1 else ""
        words = f"the weights of {self.target.name} need {times}{in_gigabytes(self.target.weights)} of memory"
        if self.draft is None:
            return words
        return (
            f"{words} and those of its draft {self.draft.name} {in_gigabytes(self.draft.weights)}, "
            f"{in_gigabytes(self.weights)} together"
        )

    @property
    def _advice(self) -> str:
        drafts = ", or --draft lookup, which needs no draft" if self.draft is not None else ""
        fewer = ", fewer --targets" if self.targets > 1 else ""
        return f"choose smaller or more quantised models{fewer}{drafts}"


def in_gigabytes(num_bytes: int) -> str:
    """Return bytes for people, in decimal gigabytes."""
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"
