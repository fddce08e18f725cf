"""Quotas of clients' tokens per minute."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from specd.caller import CallerLimits
from specd.errors import ResourceExhaustedError

_SECONDS = 60.0


@dataclass
class _Account:
    """The tokens that a client may still use; a negative number is an overdraft."""

    balance: float
    counted_at: float


class Quotas:
    """The rest of each client's tokens per minute: a bucket of a minute's tokens, which fills up steadily.

    Tokens are counted after their use, because their number is not known before. So sessions that run together can
    overdraw the account, each by its own tokens, and the next request waits until the account is positive.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def check(self, client: str, limits: CallerLimits) -> None:
        """Raise ResourceExhaustedError (CLIENT_TOKENS) if the client has used up its tokens."""
        limit = limits.tokens_per_minute
        if limit is None:
            return
        account = self._account(client, limit)
        if account.balance <= 0:
            raise tokens_error(limit, account.balance)

    @asynccontextmanager
    async def held(self, client: str, limits: CallerLimits) -> AsyncGenerator[None]:
        """Hold a client's request, for limits that hold at several coordinators together.

        Raises ResourceExhaustedError: CLIENT_TOKENS, or CLIENT_SESSIONS if too many of its requests are held.
        """
        yield

    def count(self, client: str, limits: CallerLimits, num_tokens: int) -> None:
        """Count used tokens of a client, prompt and generated ones."""
        if limits.tokens_per_minute is not None:
            self._account(client, limits.tokens_per_minute).balance -= num_tokens

    async def close(self) -> None:
        """Finish all counts."""

    def _account(self, client: str, limit: int) -> _Account:
        now = self._clock()
        account = self._accounts.setdefault(client, _Account(limit, now))
        filled = account.balance + (now - account.counted_at) * limit / _SECONDS
        account.balance, account.counted_at = min(filled, limit), now
        return account


def tokens_error(limit: int, balance: float) -> ResourceExhaustedError:
    """Return the error for a client that has used up its tokens per minute."""
    return ResourceExhaustedError(
        "CLIENT_TOKENS",
        f"this client has used its {limit} tokens per minute: try again later",
        retry_after_seconds=(1 - balance) * _SECONDS / limit,
    )


def sessions_error(num_requests: int, retry_after_seconds: float) -> ResourceExhaustedError:
    """Return the error for a client that has as many requests as it may have."""
    return ResourceExhaustedError(
        "CLIENT_SESSIONS",
        f"this client has {num_requests} requests that run or wait, and may have no more: wait until one has ended",
        retry_after_seconds=retry_after_seconds,
    )
