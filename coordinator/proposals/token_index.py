"""An index of a text by its latest tokens."""

from __future__ import annotations

from collections.abc import Sequence

# Matches of so many tokens or more are compared for the longest; of shorter ones the most recent counts.
_COMPARED = 3
# It is not told how much longer than this one is.
_LONGEST = 32
# So many places, the most recent ones, are compared in search of the longest match.
_MOST_PLACES = 32
# Stands between texts. No match goes across.
_END = -1


class TokenIndex:
    """Finds where the latest tokens of a text stood before: the longest match, and of equal ones the most recent.

    A hash table has the last place of each one, two and three tokens, and a list the place before it for three, as in
    deflate (RFC 1951, section 4). Of more than 32 places the most recent ones are compared. A match that goes on needs
    no search. A match of one token is a guess worth making: after an edit the text goes on sooner than three tokens
    agree, and whoever plans knows by the length how much to trust it. Takes up to 370 bytes a token, where nothing
    repeats.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._last: dict[tuple[int, ...], int] = {}
        self._before: list[int] = []  # by place: the place before with the same three tokens, 0 for none
        self._short = 0  # the last place before with the same two tokens, or else the same one
        # Where the match ends: the text went on there as it may go on now. 0 for none.
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
        """End the text; what comes next is another."""
        self.tokens.append(_END)
        self._before.append(0)
        self.place = self.length = self._short = 0

    def continuation(self, most: int) -> list[int]:
        """Return up to `most` tokens that followed the match; where they reach the latest one, as they would go on."""
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
        """Return how many of the latest tokens stand before `place`."""
        tokens, end = self.tokens, len(self.tokens)
        length = 0
        while length < min(place, _LONGEST) and tokens[place - 1 - length] == tokens[end - 1 - length] != _END:
            length += 1
        return length
