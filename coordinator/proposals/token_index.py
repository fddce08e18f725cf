"""An index of a text by its latest tokens."""

from __future__ import annotations

from collections.abc import Sequence

# Matches of at least this many tokens are compared for the longest one; among shorter ones the most recent counts.
_COMPARED = 3
# A match that is longer than this counts as this long.
_LONGEST = 32
# The number of most recent places that are compared in search of the longest match.
_MOST_PLACES = 32
# Separates texts, so that no match spans two of them.
_END = -1


class TokenIndex:
    """Finds an earlier occurrence of the latest tokens of a text: the longest match, and among equal ones the latest.

    A hash table has the last place of each one, two and three tokens, and a list has the earlier places of each three,
    as in deflate (RFC 1951, section 4). Only the 32 most recent places are compared, so each token takes constant time.
    A match that continues needs no search, because none can be longer. A match of one token is right half of the time,
    because after an edit the text continues sooner than three tokens agree; the planner trusts it by its length. Takes
    up to 370 bytes a token, in a text without repetitions.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._last: dict[tuple[int, ...], int] = {}
        self._before: list[int] = []  # by place: the previous place with the same three tokens, 0 for none
        self._short = 0  # the last place with the same two tokens, or with the same one
        # The end of the match, from where the text may repeat itself. 0 for no match.
        self.place = self.length = 0

    def add(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token_id in token_ids:
            if self.place and self.tokens[self.place] == token_id:
                self.place += 1
                self.length = min(self.length + 1, _LONGEST)
            else:
                self.place = 0
            self._append(token_id)
        if not self.place:
            self._search()

    def end_text(self) -> None:
        """End the text; the next tokens belong to another one."""
        self.tokens.append(_END)
        self._before.append(0)
        self.place = self.length = self._short = 0

    def continuation(self, most: int) -> list[int]:
        """Return up to `most` tokens that followed the match. Where they reach the text's end, they repeat."""
        found: list[int] = []
        if self.place:
            for place in range(self.place, self.place + most):
                token_id = self.tokens[place] if place < len(self.tokens) else found[place - len(self.tokens)]
                if token_id == _END:
                    break
                found.append(token_id)
        return found

    def _append(self, token_id: int) -> None:
        tokens, last = self.tokens, self._last
        tokens.append(token_id)
        place = len(tokens)
        one, two, three = (token_id,), tuple(tokens[-2:]), tuple(tokens[-_COMPARED:])
        self._short = last.get(two, 0) or last.get(one, 0)
        self._before.append(last.get(three, 0))
        last[one] = last[two] = last[three] = place

    def _search(self) -> None:
        self.length = 0
        place = self._before[-1] if self._before else 0
        for _ in range(_MOST_PLACES):
            if not place:
                break
            length = self._common(place)
            if length >= _COMPARED and length > self.length:
                self.place, self.length = place, length
                if length == _LONGEST:
                    return
            place = self._before[place - 1]
        if not self.place and self._short:
            self.place, self.length = self._short, self._common(self._short)

    def _common(self, place: int) -> int:
        """Return the number of the latest tokens that also stand before `place`."""
        tokens, end = self.tokens, len(self.tokens)
        length = 0
        while length < min(place, _LONGEST) and tokens[place - 1 - length] == tokens[end - 1 - length] != _END:
            length += 1
        return length
