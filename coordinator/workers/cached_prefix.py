"""What the coordinator knows of a worker's cache."""

from __future__ import annotations

from collections.abc import Sequence


class CachedPrefix:
    """Tracks how much of a session a worker's cache holds, from what was sent and what the worker said.

    The cache holds the first `agreed` tokens of the session, then `ahead`: tokens of a proposal, of which only later
    rounds tell whether the session has them too. A session's tokens only grow, so nothing before `agreed` is ever
    looked at again.
    """

    def __init__(self) -> None:
        self._agreed = 0
        self._ahead: list[int] = []

    def position(self, token_ids: Sequence[int]) -> int:
        """Return how many tokens of the session the worker need not be sent; it always gets the last one."""
        start = self._agreed
        for i, token_id in enumerate(self._ahead):
            if start + i >= len(token_ids) or token_ids[start + i] != token_id:
                return min(start + i, len(token_ids) - 1)
        return min(start + len(self._ahead), len(token_ids) - 1)

    def update(self, session_len: int, proposal: Sequence[int], cached_len: int) -> None:
        """Note that the cache holds `cached_len` tokens: the session's `session_len`, then the proposal."""
        self._agreed = min(session_len, cached_len)
        self._ahead = list(proposal[: cached_len - self._agreed])
