"""The words that a job and the engine exchange: what a job may ask for, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import mlx.core as mx
from mlx.nn.layers.base import Module

from specd.worker.layers.session_layers import SessionLayers

Result = TypeVar("Result")


class Cache(Protocol):
    """A session's cache."""

    @property
    def network(self) -> Module:
        """The model that it is of."""

    @property
    def layers(self) -> SessionLayers:
        """The caches of its layers."""

    @property
    def batches(self) -> bool:
        """True if the model can compute several sessions in one pass."""


@dataclass(frozen=True, eq=False)
class Feed:
    """Tokens [n] that a session's cache is to take in next.

    `wants_logits` is false in a prefill, whose logits nobody reads.
    """

    cache: Cache
    token_ids: mx.array
    wants_logits: bool = True

    @property
    def num_tokens(self) -> int:
        """The number of tokens."""
        return self.token_ids.size


@dataclass(frozen=True, eq=False)
class Encode:
    """The next part of a source of `num_tokens` tokens that an encoder is to read; `describe` makes its arrays."""

    num_tokens: int
    describe: Callable[[], Sequence[mx.array]]
    wants_logits = False


@dataclass(frozen=True, eq=False)
class Evaluate:
    """Arrays whose values are wanted now. Those of all sessions are evaluated at once: waiting for a device is slow."""

    arrays: Sequence[mx.array]


# A job for the model. It yields tokens to feed, and gets their logits, or is dropped; or a part of a source to read,
# and gets its arrays. It yields arrays to evaluate, which are evaluated in the same step.
Steps = Generator[Feed | Encode | Evaluate, Any, Result]


@dataclass(frozen=True)
class Done(Generic[Result]):
    """The result of a job and where its time went.

    `compute_seconds` is the time of its steps. Its last step was for `num_sessions` sessions, its own included, with
    `step_tokens` tokens together.
    """

    result: Result
    queue_seconds: float
    compute_seconds: float
    num_sessions: int
    step_tokens: int
