"""The requests of each client."""

from __future__ import annotations

from collections import Counter

from coordinator.sessions.quota import sessions_error


class RequestCounts(Counter[str]):
    """The number of requests that run or wait, for all models, by client."""

    def check(self, client: str, max_sessions: int | None, retry_after_seconds: float) -> None:
        """Raise ResourceExhaustedError (CLIENT_SESSIONS) if a client may have no more requests."""
        if max_sessions is not None and self[client] >= max_sessions:
            raise sessions_error(self[client], retry_after_seconds)

    def begin(self, client: str) -> None:
        """Count one more request."""
        self[client] += 1

    def end(self, client: str) -> None:
        """Count one request less."""
        self[client] -= 1
        if not self[client]:
            del self[client]
