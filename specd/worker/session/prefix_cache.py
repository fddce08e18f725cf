"""The KV caches of ended sessions, kept for sessions that begin with the same tokens."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import cast

from specd.worker.layers.session_layers import SessionLayers

# Nobody misses this many tokens at the end of an entry that a new session takes over: they are mostly the end of an
# answer, which a client or a template has changed. As many fit into the pass that a session begins with anyway.
_MAX_LOST = 32

# What must be the same for a prefix to be of use: the namespace of the sessions that share it, and the source.
_Root = tuple[bytes, tuple[int, ...]]
# A root, and the tokens after it.
_Key = tuple[_Root | int, ...]


@dataclass(eq=False)
class _Entry:
    key: _Key
    layers: SessionLayers  # which hold exactly the key
    nbytes: int
    last_used: int

    @property
    def num_tokens(self) -> int:
        return len(self.key) - 1

    @property
    def namespace(self) -> bytes:
        return cast(_Root, self.key[0])[0]


class PrefixCache:
    """Entries of a namespace, a source, tokens and their layers, sorted by these. They go if memory is short.

    Namespaces share nothing but the budget. What a session finds here, and how fast its first token therefore comes,
    tells what others have asked (CVE-2025-46570): clients that must not know it of each other have namespaces of their
    own. If memory is short, the namespace that has most of it gives up its least recently used entry.

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

    def take(
        self, token_ids: Sequence[int], source: Sequence[int] = (), namespace: bytes = b""
    ) -> SessionLayers | None:
        """Return layers that hold the longest prefix of `token_ids` in a namespace, for the caller to write to.

        They hold the source, too. An entry that is longer by a few tokens at most moves to the caller, at no cost: a
        conversation goes on. From a longer entry, which may serve others, the prefix is copied: that pays from the
        first token on, and from none on for a source. None without a cached prefix, or where windows have moved on past
        its end.
        """
        wanted = _key(namespace, source, token_ids)
        alike = [entry for entry in self._alike(wanted) if entry.key[0] == wanted[0]]
        # Of two that share as much, the one that has less to lose.
        candidates = [
            (entry.layers.can_serve(common_prefix_len(entry.key, wanted) - 1), -entry.num_tokens) for entry in alike
        ]
        reused, _ = best = max(candidates, default=(0, 0))
        if not candidates or not (reused or source):
            return None
        entry = alike[candidates.index(best)]
        self.num_reused_tokens += len(source) + reused
        if surplus := entry.num_tokens - reused:
            if surplus > _MAX_LOST or not reused:
                entry.last_used = next(self._clock)
                return entry.layers.copy(reused)
            entry.layers.rewind(reused)
        self._remove(entry)
        return entry.layers

    def store(self, token_ids: Sequence[int], layers: SessionLayers, namespace: bytes = b"") -> None:
        """Keep `layers`, which hold exactly `token_ids` and now belong to the prefix cache.

        Of an entry and its prefix, the longer one is enough, if it can go back to the end of the shorter: that goes.
        The buffers stay as they are, with room for up to a few hundred more tokens, and count in full.
        """
        key = _key(namespace, layers.source, token_ids)
        place = self._place(key)
        longer = self._entries[place] if place < len(self._entries) else None
        if longer and _starts_with(longer.key, key) and longer.layers.can_serve(len(token_ids)) == len(token_ids):
            longer.last_used = next(self._clock)
            return
        nbytes = layers.nbytes
        if nbytes > self._budget_bytes:
            return
        for entry in self._alike(key):
            length = entry.num_tokens
            if _starts_with(key, entry.key) and layers.can_serve(length) == length:
                self._remove(entry)
        while self.nbytes + nbytes > self._budget_bytes:
            self._evict(namespace, nbytes)
        self._entries.insert(self._place(key), _Entry(key, layers, nbytes, next(self._clock)))
        self.nbytes += nbytes

    def shrink(self, num_bytes: int) -> None:
        """Give up entries that take so many bytes together, or all."""
        most = self.nbytes - num_bytes
        while self._entries and self.nbytes > most:
            self._evict()

    def _evict(self, namespace: bytes = b"", nbytes: int = 0) -> None:
        """Drop the least recently used entry of the largest namespace, for a new one of so many bytes."""
        sizes = Counter({namespace: nbytes})
        for entry in self._entries:
            sizes[entry.namespace] += entry.nbytes
        # The newcomer itself may be all that its namespace has.
        largest = max((sizes[entry.namespace], entry.namespace) for entry in self._entries)[1]
        self._remove(min((e for e in self._entries if e.namespace == largest), key=lambda entry: entry.last_used))
        self.num_evictions += 1

    def _alike(self, key: _Key) -> list[_Entry]:
        """Return the two neighbours of `key`, and all entries that are prefixes of it."""
        place = self._place(key)
        alike = self._entries[place : place + 1]
        while place:
            entry = self._entries[place - 1]
            alike.append(entry)
            common = common_prefix_len(entry.key, key)
            # Entries between this one and the part in common begin with that part, and go on differently.
            up_to = bisect_right(self._entries, key[:common], key=lambda entry: entry.key)
            place = min(place - 1, up_to)
        return alike

    def _place(self, key: _Key) -> int:
        return bisect_left(self._entries, key, key=lambda entry: entry.key)

    def _remove(self, entry: _Entry) -> None:
        del self._entries[self._place(entry.key)]
        self.nbytes -= entry.nbytes


def common_prefix_len(a: Sequence[object], b: Sequence[object]) -> int:
    """Return how many items two sequences have in common at their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _key(namespace: bytes, source: Sequence[int], token_ids: Sequence[int]) -> _Key:
    return (namespace, tuple(source)), *token_ids


def _starts_with(key: _Key, prefix: _Key) -> bool:
    return key[: len(prefix)] == prefix
