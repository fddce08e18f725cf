"""Look-up: proposals without a model, from what a session's own text repeats.

Prompt look-up decoding (Saxena, github.com/apoorvumang/prompt-lookup-decoding), which continues the latest tokens as
they went on before. Nobody else's text is looked at: the lengths of a session's rounds tell what was found (arXiv
2411.01076).
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.core import Match
from coordinator.proposals.token_index import TokenIndex
from specd.settings import MAX_NUM_DRAFT_TOKENS


class Lookup:
    """Looks up a session's latest tokens in its prompt, in what was generated, in its source and in a prediction."""

    def __init__(self, token_ids: Sequence[int], *, source: Sequence[int] = (), prediction: Sequence[int] = ()) -> None:
        """Begin a session with these tokens; takes about a microsecond for each. `prediction` is what may come next."""
        self._index = TokenIndex()
        if source:
            self._index.add(source)
            self._index.end_text()
        self._index.add(token_ids)
        self._num_seen = len(token_ids)
        self._prediction = range(0)
        if prediction:
            self._index.end_text()
            begin = len(self._index.tokens)
            self._index.add(prediction)
            self._index.end_text()
            self._index.place = begin
            self._prediction = range(begin, begin + len(prediction))

    def find(self, token_ids: Sequence[int]) -> Match:
        """Return what may follow `token_ids`, which are those of the last call and more."""
        index = self._index
        index.add(token_ids[self._num_seen :])
        self._num_seen = len(token_ids)
        found = index.continuation(MAX_NUM_DRAFT_TOKENS)
        return Match(found, index.length, index.place in self._prediction) if found else Match()
