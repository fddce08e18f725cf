"""Look-up: proposals without a model, from repetitions in a session's own text.

Prompt look-up decoding (Saxena, github.com/apoorvumang/prompt-lookup-decoding), which repeats the continuation of an
earlier occurrence of the latest tokens. It reads no other session's text, because the lengths of a session's rounds
would reveal matches (arXiv 2411.01076).
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.core import Match
from coordinator.proposals.source import Source
from coordinator.proposals.token_index import TokenIndex
from specd.setting_types import MAX_NUM_DRAFT_TOKENS
from specd.vocabulary import TokenSource


class Lookup(Source):
    """Looks up a session's latest tokens in its prompt, its output, its encoder's input (`source`) and a prediction."""

    def __init__(self, token_ids: Sequence[int], *, source: Sequence[int] = (), prediction: Sequence[int] = ()) -> None:
        """Begin a session with these tokens; takes about a microsecond for each. `prediction` is the expected text."""
        self._index = TokenIndex()
        if source:
            self._index.add(source)
            self._index.end_text()
        self._index.add(token_ids)
        self._prediction = range(0)
        if prediction:
            self._index.end_text()
            begin = len(self._index.tokens)
            self._index.add(prediction)
            self._index.end_text()
            self._index.place = begin
            self._prediction = range(begin, begin + len(prediction))

    def match(self) -> Match | None:
        """Return what followed the latest tokens where they stood before."""
        index = self._index
        found = index.continuation(MAX_NUM_DRAFT_TOKENS)
        if not found:
            return None
        source = TokenSource.PREDICTION if index.place in self._prediction else TokenSource.LOOKUP
        return Match(source, found, index.length)

    def committed(self, token_ids: Sequence[int]) -> None:
        """Add tokens to the index."""
        self._index.add(token_ids)
