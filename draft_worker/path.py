"""The draft's own path: what it has said comes next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specd.sampling import TokenDistribution
from specd.worker.session_cache import SessionCache


@dataclass
class Path:
    """The tokens that the draft has chosen one after another from position `start` of the session on.

    The session's tokens before them were given. `confidences`, and with acceptance by REJECTION `distributions`, are
    those of the tokens; there can be none. Invariant: unless a job was dropped, the session's cache holds all but the
    last token.
    """

    start: int = 0
    token_ids: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    distributions: list[TokenDistribution] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.token_ids)

    def num_given(self, cache: SessionCache, position: int, token_ids: Sequence[int]) -> int | None:
        """Return how many of the path's tokens the session has by now; None if it has left the path or is at its end.

        The session's tokens are the first `position` of the cache and then `token_ids`.
        """
        end = position + len(token_ids)
        if not (self.start <= end < self.end and cache.num_fed == cache.cached_len == self.end - 1):
            return None
        known = [*cache.token_ids[position:], self.token_ids[-1]]
        return end - self.start if known[: len(token_ids)] == list(token_ids) else None
