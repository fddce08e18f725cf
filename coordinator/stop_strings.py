"""Where a text ends because of what it says, found while the text is still coming."""

from __future__ import annotations

from collections.abc import Sequence


class _State:
    """The longest end of the text that begins a stop string; the searches that go on are ends of this end."""

    __slots__ = ("complete", "fallback", "following", "length")

    def __init__(self, length: int) -> None:
        self.length = length
        self.following: dict[str, _State] = {}
        # The state for the next shorter such end; the empty one has none.
        self.fallback: _State | None = None
        # The longest stop string that the text ends with.
        self.complete: str | None = None


class StopStrings:
    """Shows a text up to the first stop string in it, and never a part of a stop string.

    However the text is cut into pushes: read character by character, the first stop string to be complete counts,
    of those that are complete at the same character the longest, and the shown text ends where that one starts.

    Aho and Corasick's automaton (https://doi.org/10.1145/360825.360855): the time is that of reading the strings
    once and the text once, and no more of the text is kept than the longest string has characters.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        assert all(strings), "an empty string ends every text"
        self.matched: str | None = None
        self._start = _automaton(strings)
        self._state = self._start
        self._held = ""

    def push(self, text: str) -> str:
        """Return what can be shown now; after a stop string has `matched`, nothing more may be pushed."""
        assert self.matched is None
        text = self._held + text
        state = self._state
        # Invariant: the held text is the longest end of the text so far that begins a stop string.
        for i in range(len(self._held), len(text)):
            state = _next(state, text[i])
            if state.complete is not None:
                self.matched = state.complete
                self._held = ""
                return text[: i + 1 - len(state.complete)]
        self._state = state
        shown = len(text) - state.length
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """Return what is still held back, at the end of a text that no stop string ended."""
        held, self._held, self._state = self._held, "", self._start
        return held


def _automaton(strings: Sequence[str]) -> _State:
    start = _State(0)
    for string in strings:
        state = start
        for character in string:
            state = state.following.setdefault(character, _State(state.length + 1))
        state.complete = string
    states = [start]
    for state in states:  # grows as it is read: shorter ones come first, and fallbacks are shorter
        for character, longer in state.following.items():
            longer.fallback = _next(state.fallback, character) if state.fallback is not None else start
            longer.complete = longer.complete or longer.fallback.complete
            states.append(longer)
    return start


def _next(state: _State, character: str) -> _State:
    while (longer := state.following.get(character)) is None:
        if state.fallback is None:
            return state
        state = state.fallback
    return longer
