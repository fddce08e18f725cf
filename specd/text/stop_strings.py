"""The search for stop strings in a text that is still coming."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Shows a text up to the first stop string in it, and never a part of a stop string.

    For any division into pushes, the first complete stop string counts, and among those complete at the same character
    the longest. The shown text ends at its start. Invariant: the held text is the longest end of the text that begins a
    stop string.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        assert all(strings), "an empty string ends every text"
        self.matched: str | None = None
        self._strings = tuple(strings)
        self._held = ""

    def push(self, text: str) -> str:
        """Return the text that can be shown now; after a stop string has `matched`, no more may be pushed."""
        assert self.matched is None
        text = self._held + text
        ends = [(text.index(string) + len(string), -len(string), string) for string in self._strings if string in text]
        if ends:
            end, _, self.matched = min(ends)
            self._held = ""
            return text[: end - len(self.matched)]
        start = next((i for i in range(len(text)) if self._begins_one(text[i:])), len(text))
        self._held = text[start:]
        return text[:start]

    def flush(self) -> str:
        """Return the held text, at the end of a text without a stop string."""
        held, self._held = self._held, ""
        return held

    def _begins_one(self, text: str) -> bool:
        return any(string.startswith(text) for string in self._strings)
