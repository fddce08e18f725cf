"""A target's places for sessions, and its memory for their caches."""

from __future__ import annotations

from collections.abc import Callable


class Capacity:
    """Counts the sessions of one target, the memory that they have reserved, and the tokens that they prefill."""

    def __init__(
        self,
        num_bytes: Callable[[], int],
        bytes_for: Callable[[int, int], int],
        *,
        max_sessions: int,
        seconds_per_token: Callable[[int], float],
    ) -> None:
        """`num_bytes` returns the target's present memory for caches, `bytes_for` the memory of tokens and source.

        `seconds_per_token` maps the number of sessions that run together to the time of a token in each of them.
        """
        self.num_bytes, self.bytes_for = num_bytes, bytes_for
        self.max_sessions = max_sessions
        self.seconds_per_token = seconds_per_token
        self.num_running = 0
        self.reserved_bytes = 0
        self.prefilling_tokens = 0

    @property
    def free_bytes(self) -> int:
        """The memory that is not reserved."""
        return self.num_bytes() - self.reserved_bytes

    @property
    def has_place(self) -> bool:
        """Whether one more session may run."""
        return self.num_running < self.max_sessions
