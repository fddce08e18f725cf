"""The coordinator's knowledge of a worker's cache."""

from __future__ import annotations

from collections.abc import Sequence


class CachedPrefix:
    """Tracks the part of a session that a worker's cache holds, from the sent tokens and the worker's answers.

    The cache holds the first `agreed` tokens of the session, then `ahead`: tokens of a proposal, which later rounds may
    add to the session or not. A session's tokens only grow, so the tokens before `agreed` are never compared again.
    """

    def __init__(self) -> None:
        self._agreed = 0
        self._ahead: list[int] = []

    def position(self, token_ids: Sequence[int]) -> int:
        """Return the number of tokens that need not be sent again; the last token is always sent."""
        start = self._agreed
        for i, token_id in enumerate(self._ahead):
            if start + i >= len(token_ids) or token_ids[start + i] != token_id:
                return min(start + i, len(token_ids) - 1)
        return min(start + len(self._ahead), len(token_ids) - 1)

    def update(self, session_len: int, proposal: Sequence[int], cached_len: int) -> None:
        """Note that the cache holds `cached_len` tokens: the session's `session_len` tokens, then the proposal."""
        self._agreed = min(session_len, cached_len)
        self._ahead = list(proposal[: cached_len - self._agreed])
