"""The KV caches of ended sessions, kept for sessions that begin with the same tokens."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import cast

from specd.worker.layers.session_layers import SessionLayers

# An entry may lose up to this many last tokens when it moves to a new session. They are mostly the end of an answer,
# which a client or a template has changed, and as many fit into the first pass of a session anyway.
_MAX_LOST = 32

# A prefix is useful only with the same namespace, which is the sessions that share prefixes, and with the same adapter
# and source, on which its keys and values depend.
_Root = tuple[bytes, str, tuple[int, ...]]
# A root, followed by tokens.
_Key = tuple[_Root | int, ...]


@dataclass(eq=False)
class _Entry:
    key: _Key
    layers: SessionLayers  # they hold exactly the tokens of the key
    nbytes: int
    last_used: int

    @property
    def num_tokens(self) -> int:
        return len(self.key) - 1

    @property
    def namespace(self) -> bytes:
        return cast(_Root, self.key[0])[0]


class PrefixCache:
    """Entries with a namespace, an adapter, a source, tokens and their layers, sorted by the first four.

    Namespaces share only the budget. The reuse of a prefix, which shows in the time of the first token, tells what
    other clients have asked (CVE-2025-46570): so clients that are told apart have namespaces of their own. If memory is
    short, the namespace with the most memory gives up its least recently used entry.

    In lexicographic order, entries that begin like a query are neighbours, and the longest common prefix over all
    entries is that of one of the two neighbours of the query's place. If neither can be rewound to that length, an
    entry that is a prefix of the query can be the best. A trie would find the same, with a node of hundreds of bytes
    for each token.

    Invariants: no entry is a prefix of another whose layers can serve its length; the entries' arrays take `nbytes`
    bytes, which is at most the budget. Entries do not share memory: a common prefix of two entries is held twice.
    The arrays belong to the engine's thread, so only jobs may call the methods.
    """

    def __init__(self, budget_bytes: int) -> None:
        """Keep at most `budget_bytes` bytes of keys and values; 0 keeps nothing."""
        self.budget_bytes = budget_bytes
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
        self, token_ids: Sequence[int], source: Sequence[int] = (), namespace: bytes = b"", adapter: str = ""
    ) -> SessionLayers | None:
        """Return layers that hold the longest prefix of `token_ids` in a namespace, for the caller to write to.

        They were computed with the same adapter of the model, "" for none.

        The layers also hold the source. An entry that is longer by a few tokens at most moves to the caller at no cost,
        as when a conversation continues. From a longer entry, which may serve others, the prefix is copied: that pays
        for any prefix, and for the source alone. Returns None without a cached prefix, or if windows no longer hold the
        end of it. So with windows a session mostly continues one, and rarely shares a beginning.
        """
        wanted = _key(namespace, adapter, source, token_ids)
        alike = [entry for entry in self._alike(wanted) if entry.key[0] == wanted[0]]
        # Between two entries with equally long prefixes, the shorter entry.
        candidates = [(entry.layers.can_serve(_shared_len(entry, wanted)), -entry.num_tokens) for entry in alike]
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

    def store(self, token_ids: Sequence[int], layers: SessionLayers, namespace: bytes = b"", adapter: str = "") -> None:
        """Keep `layers`, which hold exactly `token_ids` and now belong to the prefix cache.

        An entry that is a prefix of another one is dropped, if the longer one can be rewound to its length. The buffers
        are not shrunk: their room for up to a few hundred more tokens counts in full.
        """
        key = _key(namespace, adapter, layers.source, token_ids)
        place = self._place(key)
        longer = self._entries[place] if place < len(self._entries) else None
        if longer and _starts_with(longer.key, key) and longer.layers.can_serve(len(token_ids)) == len(token_ids):
            longer.last_used = next(self._clock)
            return
        nbytes = layers.nbytes
        if nbytes > self.budget_bytes:
            return
        for entry in self._alike(key):
            length = entry.num_tokens
            if _starts_with(key, entry.key) and layers.can_serve(length) == length:
                self._remove(entry)
        while self.nbytes + nbytes > self.budget_bytes:
            self._evict(namespace, nbytes)
        self._entries.insert(self._place(key), _Entry(key, layers, nbytes, next(self._clock)))
        self.nbytes += nbytes

    def shrink(self, num_bytes: int) -> None:
        """Drop entries with at least `num_bytes` bytes together, or all."""
        most = self.nbytes - num_bytes
        while self._entries and self.nbytes > most:
            self._evict()

    def _evict(self, namespace: bytes = b"", nbytes: int = 0) -> None:
        """Drop the least recently used entry of the largest namespace, which may get a new entry of `nbytes`."""
        sizes = Counter({namespace: nbytes})
        for entry in self._entries:
            sizes[entry.namespace] += entry.nbytes
        # The namespace may have no other entry than the new one.
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
            # Entries between this one and the common prefix begin with that prefix, and differ after it.
            up_to = bisect_right(self._entries, key[:common], key=lambda entry: entry.key)
            place = min(place - 1, up_to)
        return alike

    def _place(self, key: _Key) -> int:
        return bisect_left(self._entries, key, key=lambda entry: entry.key)

    def _remove(self, entry: _Entry) -> None:
        del self._entries[self._place(entry.key)]
        self.nbytes -= entry.nbytes


def common_prefix_len(a: Sequence[object], b: Sequence[object]) -> int:
    """Return the length of the common prefix of two sequences."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _shared_len(entry: _Entry, wanted: _Key) -> int:
    """Return the number of tokens that a session can take from an entry.

    It is one less where a head has pairs of a token and the one after it: the last pair must have the same second
    token.
    """
    common = common_prefix_len(entry.key, wanted) - 1
    return max(common - 1, 0) if entry.layers.companion is not None else common


def _key(namespace: bytes, adapter: str, source: Sequence[int], token_ids: Sequence[int]) -> _Key:
    return (namespace, adapter, tuple(source)), *token_ids


def _starts_with(key: _Key, prefix: _Key) -> bool:
    return key[: len(prefix)] == prefix
