"""The messages between a job and the engine: a job's requests, and its result."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import mlx.core as mx
from mlx.nn.layers.base import Module

from specd.worker.engine.static_step import StaticStep
from specd.worker.layers.session_layers import SessionLayers

Result = TypeVar("Result")


class Cache(Protocol):
    """A session's cache."""

    @property
    def network(self) -> Module:
        """The cache's model."""

    @property
    def layers(self) -> SessionLayers:
        """The caches of its layers."""

    @property
    def batches(self) -> bool:
        """True if the model can compute several sessions in one pass."""

    @property
    def static(self) -> StaticStep | None:
        """The compiled pass of the model, if it has one."""

    @property
    def sharing(self) -> SharedPasses | None:
        """The passes that sessions share, if the model has them."""


@dataclass(frozen=True, eq=False)
class Feed:
    """Tokens [n] to feed to a session's cache.

    `wants_logits` is false in a prefill, which does not use the logits. A head takes a hidden state [n, size] with each
    token, and its feed gives the logits [1, vocabulary rows] and the head's own state [1, size] after the last one.
    """

    cache: Cache
    token_ids: mx.array
    wants_logits: bool = True
    hidden: mx.array | None = None

    @property
    def num_tokens(self) -> int:
        """The number of tokens."""
        return self.token_ids.size

    @property
    def network(self) -> Module:
        """The network to feed them to."""
        return self.cache.network


class SharedPass(Protocol):
    """A pass for several sessions that have their rows in one buffer."""

    def compute(self, feeds: Sequence[Feed]) -> Sequence[mx.array]:
        """Return the logits [n, vocabulary rows] after each feed's tokens, lazily."""


class SharedPasses(Protocol):
    """The passes that sessions share, and the choice of these sessions."""

    def groups(self, feeds: Sequence[Feed]) -> Sequence[tuple[SharedPass, Sequence[Feed]]]:
        """Return the feeds that are computed in shared passes. The others are computed another way."""


@dataclass(frozen=True, eq=False)
class Encode:
    """The next part of a source of `num_tokens` tokens for an encoder to read; `describe` makes its arrays."""

    num_tokens: int
    describe: Callable[[], Sequence[mx.array]]
    wants_logits = False
    network = None


@dataclass(frozen=True, eq=False)
class Evaluate:
    """Arrays to evaluate now, together with the arrays of all other sessions, because waiting for a device is slow."""

    arrays: Sequence[mx.array]


@dataclass(frozen=True, eq=False)
class EarlyResult:
    """The result of a job that continues: it only feeds tokens from then on, for a later job, and is not dropped."""

    result: Any


@dataclass(frozen=True, eq=False)
class FirstResult:
    """The first result of a job that continues like any other, to a second result, and can still be dropped."""

    result: Any


# A job for the model. It yields tokens to feed, and gets their logits; or a part of a source to read, and gets its
# arrays; or arrays, which are evaluated in the same step. It can be dropped at each of these. Its result is what it
# returns, or an `EarlyResult`; there can be a `FirstResult` before it.
Steps = Generator[Feed | Encode | Evaluate | EarlyResult | FirstResult, Any, Result]


@dataclass(frozen=True)
class Done(Generic[Result]):
    """The result of a job, and its times.

    `compute_seconds` is the time of its steps. Its last step was for `num_sessions` sessions, its own included, with
    `step_tokens` tokens in all.
    """

    result: Result
    queue_seconds: float
    compute_seconds: float
    num_sessions: int
    step_tokens: int
