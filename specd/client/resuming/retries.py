"""When a call is tried again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RetryPolicy:
    """How long a generation waits for a server that refuses it for now, or is lost.

    `patience_seconds` count from the first failure after a token; 0 never retries. Pauses double, with some chance in
    them so that clients do not come all at once, and are never shorter than the server asks for. With `only_resumes`, a
    generation is retried only once it has a token.
    """

    patience_seconds: float = 60.0
    first_pause_seconds: float = 0.1
    longest_pause_seconds: float = 2.0
    only_resumes: bool = False

    def pause(self, num_failures: int, asked_seconds: float, chance: float) -> float:
        """Return how long to wait after so many failures without a token, in seconds; `chance` is in [0, 1)."""
        # 2.0 ** 1024 is too large for a float.
        doubled = min(self.first_pause_seconds * 2.0 ** min(num_failures - 1, 64), self.longest_pause_seconds)
        return max(asked_seconds, doubled / 2) + doubled / 2 * chance


DEFAULT_RETRIES = RetryPolicy()
NO_RETRIES = RetryPolicy(patience_seconds=0.0)
