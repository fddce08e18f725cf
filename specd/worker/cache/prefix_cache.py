"""The KV caches of ended sessions, kept for sessions that begin with the same tokens."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from specd.settings import MAX_NUM_DRAFT_TOKENS
from specd.worker.cache.layers.session_layers import SessionLayers

# Nobody misses this many tokens at the end of an entry that a new session takes over: they are mostly the rejected
# end of the last proposal and the token before it.
_MAX_LOST = MAX_NUM_DRAFT_TOKENS + 1


@dataclass(eq=False)
class _Entry:
    token_ids: tuple[int, ...]
    layers: SessionLayers  # which hold exactly token_ids
    nbytes: int
    last_used: int


class PrefixCache:
    """Entries of tokens and their layers, sorted by tokens. When memory is short, the least recently used ones go.

    In lexicographic order, the entries that begin like a query stand together, and those that share most with it next
    to the place where it would stand itself: so the longest common prefix over all entries is that of one of its two
    neighbours. Where neither can go back to there, an entry that is a prefix of the query can be the best. A trie would
    find the same, with a node of hundreds of bytes for each token.

    Invariants: no entry is a prefix of another whose layers can serve its length, the entries' arrays take `nbytes`
    bytes, and that is no more than the budget. Sessions do not share memory: what two entries have in common is held
    twice.
    Its arrays belong to the engine's thread: only jobs may call its methods.
    """

    def __init__(self, budget_bytes: int) -> None:
        """Keep at most `budget_bytes` bytes of keys and values; 0 keeps nothing."""
        self._budget_bytes = budget_bytes
        self._entries: list[_Entry] = []
        self._clock = count()
        self.nbytes = 0
        self.num_reused_tokens = 0
        self.num_evictions = 0

    @property
    def num_entries(self) -> int:
        """The number of entries."""
        return len(self._entries)

    def take(self, token_ids: Sequence[int]) -> SessionLayers | None:
        """Return layers that hold the longest cached prefix of `token_ids`, for the caller to write to.

        An entry that is longer by a proposal at most moves to the caller, at no cost: a conversation goes on. From a
        longer entry, which may serve others, the prefix is copied: that pays from the first token on. None without a
        cached prefix, or where windows have moved on past its end.
        """
        wanted = tuple(token_ids)
        alike = self._alike(wanted)
        # Of two that share as much, the one that has less to lose.
        candidates = [
            (entry.layers.can_serve(common_prefix_len(entry.token_ids, wanted)), -len(entry.token_ids))
            for entry in alike
        ]
        reused, _ = best = max(candidates, default=(0, 0))
        if not reused:
            return None
        entry = alike[candidates.index(best)]
        self.num_reused_tokens += reused
        if surplus := len(entry.token_ids) - reused:
            if surplus > _MAX_LOST:
                entry.last_used = next(self._clock)
                return entry.layers.copy(reused)
            entry.layers.rewind(reused)
        self._remove(entry)
        return entry.layers

    def store(self, token_ids: Sequence[int], layers: SessionLayers) -> None:
        """Keep `layers`, which hold exactly `token_ids` and now belong to the prefix cache.

        Of an entry and its prefix, the longer one is enough, if it can go back to the end of the shorter: that goes.
        The buffers stay as they are, with room for up to a few hundred more tokens, and count in full.
        """
        tokens = tuple(token_ids)
        place = self._place(tokens)
        longer = self._entries[place] if place < len(self._entries) else None
        if longer and _starts_with(longer.token_ids, tokens) and longer.layers.can_serve(len(tokens)) == len(tokens):
            longer.last_used = next(self._clock)
            return
        nbytes = layers.nbytes
        if nbytes > self._budget_bytes:
            return
        for entry in self._alike(tokens):
            length = len(entry.token_ids)
            if _starts_with(tokens, entry.token_ids) and layers.can_serve(length) == length:
                self._remove(entry)
        while self.nbytes + nbytes > self._budget_bytes:
            self._remove(min(self._entries, key=lambda entry: entry.last_used))
            self.num_evictions += 1
        self._entries.insert(self._place(tokens), _Entry(tokens, layers, nbytes, next(self._clock)))
        self.nbytes += nbytes

    def _alike(self, tokens: tuple[int, ...]) -> list[_Entry]:
        """Return the two neighbours of `tokens`, and all entries that are prefixes of them."""
        place = self._place(tokens)
        alike = self._entries[place : place + 1]
        while place:
            entry = self._entries[place - 1]
            alike.append(entry)
            common = common_prefix_len(entry.token_ids, tokens)
            # Entries between this one and the part in common begin with that part, and go on differently.
            up_to = bisect_right(self._entries, tokens[:common], key=lambda entry: entry.token_ids)
            place = min(place - 1, up_to)
        return alike

    def _place(self, tokens: tuple[int, ...]) -> int:
        return bisect_left(self._entries, tokens, key=lambda entry: entry.token_ids)

    def _remove(self, entry: _Entry) -> None:
        del self._entries[self._place(entry.token_ids)]
        self.nbytes -= entry.nbytes


def common_prefix_len(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens two sequences have in common at their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _starts_with(tokens: tuple[int, ...], prefix: tuple[int, ...]) -> bool:
    return tokens[: len(prefix)] == prefix
