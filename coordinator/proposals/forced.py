"""Forced tokens: proposals without a model, of the text that a grammar leaves no choice about."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.core import Match
from coordinator.proposals.source import Source
from specd.setting_types import MAX_NUM_DRAFT_TOKENS
from specd.vocabulary import TokenSource


class Forced(Source):
    """Proposes the keys, quotes and separators that come next under a session's grammar.

    A grammar forces a text, not its tokens: the target may choose others for the same text, so these are proposals like
    any others. `token_ids` are the forced ones behind the session's tokens.
    """

    def __init__(self) -> None:
        self.token_ids: Sequence[int] = ()

    def match(self) -> Match | None:
        """Return the forced tokens."""
        found = self.token_ids[:MAX_NUM_DRAFT_TOKENS]
        return Match(TokenSource.FORCED, found, len(found)) if found else None
