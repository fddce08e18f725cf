"""A text that comes in pieces, cut at markers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

# The text that opens a string in the body of a call, the text that closes it, and look-alikes of the latter.
Quotes = Mapping[str, tuple[str, ...]]


@lru_cache(maxsize=256)
def _pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))


class Cutter:
    """Cuts a text at markers, in time linear in its length, for any division into pieces.

    Text that may be the beginning of a marker is held back. No marker may be the beginning of another one.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0

    def add(self, text: str) -> None:
        """Add the next piece."""
        self._text, self._at = self._text[self._at :] + text, 0

    def put_back(self, text: str) -> None:
        """Add text in front of the rest."""
        self._text, self._at = text + self._text[self._at :], 0

    def cut(self, markers: tuple[str, ...]) -> tuple[str, str]:
        """Return the text before the first marker, and the marker; without one, the text that cannot belong to any."""
        start, end = self._at, len(self._text)
        if markers and (match := _pattern(markers).search(self._text, start)):
            self._at = match.end()
            return self._text[start : match.start()], match.group()
        longest = max(map(len, markers), default=1) - 1
        tails = range(max(end - longest, start), end)
        self._at = next((at for at in tails if any(m.startswith(self._text[at:]) for m in markers)), end)
        return self._text[start : self._at], ""

    def rest(self) -> str:
        """Return the held text, and forget it."""
        rest, self._text, self._at = self._text[self._at :], "", 0
        return rest


class CallBody:
    """The text of a call, up to a marker that ends it.

    A marker within a string of the call is text. In case the string never closes, `first_end` is where the first such
    marker is, if there was one.
    """

    def __init__(self, begun: str, ends: tuple[str, ...], quotes: Quotes, breaks: tuple[str, ...] = ()) -> None:
        """Read the text after `begun`. The marks in `breaks` end it even within a string."""
        self.begun = begun
        self.ended = ""
        self.first_end: tuple[int, int] | None = None
        self._ends = ends
        self._breaks = breaks
        self._quotes = quotes if ends else {}
        self._string: tuple[str, ...] = ()  # the text that closes the open string, and its look-alikes
        self._pieces: list[str] = []
        self._length = 0

    @property
    def is_in_value(self) -> bool:
        """Whether the value of an argument in tags, or the like, is open."""
        return bool(self._string) and len(self._string[0]) > 1

    @property
    def text(self) -> str:
        """The text between the markers."""
        return "".join(self._pieces)

    @property
    def raw(self) -> str:
        """The text with its markers, as the model wrote it."""
        return f"{self.begun}{self.text}{self.ended}"

    def add(self, text: str) -> None:
        """Add text that holds no marker."""
        self._pieces.append(text)
        self._length += len(text)

    def read(self, cutter: Cutter) -> bool:
        """Read further, and return whether the body has ended."""
        while True:
            text, marker = cutter.cut((*(self._string or self._quotes), *self._ends, *self._breaks))
            self.add(text)
            if not marker:
                return False
            if marker in self._breaks or (marker in self._ends and not self._string):
                self.ended = marker
                return True
            if marker in self._ends:
                self.first_end = self.first_end or (self._length, self._length + len(marker))
            elif not self._string:
                self._string = self._quotes[marker]
            elif marker == self._string[0]:
                self._string = ()
            self.add(marker)
