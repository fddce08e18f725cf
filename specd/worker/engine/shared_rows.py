"""The rows of several sessions in one buffer for each layer, so that one pass computes the attention of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import ref

import mlx.core as mx

from specd.worker.engine.jobs import Feed
from specd.worker.engine.static_step import MOST_TOKENS, StaticStep, width_for
from specd.worker.layers.owned import owned
from specd.worker.layers.session_layers import SessionLayers

# The first buffer length, and how many times as long the next one is. Sessions of one length share a buffer.
_SHORTEST, _RATIO = 1024, 4
# The numbers of slots in a buffer.
SLOTS = (2, 4, 8, 16)
# A session without tokens in this many passes gets its rows back, so that the others do not compute for it.
_IDLE_PASSES = 64


@dataclass(eq=False)
class _Slot:
    """A session's place, which is free once the session's layers are gone."""

    layers: ref[SessionLayers]
    used_at: int


class SharedRows:
    """The sessions whose rows are in buffers [slots, heads, length, size], a slot each."""

    def __init__(self, static: StaticStep, length: int) -> None:
        """Begin without sessions."""
        self._static = static
        self._length = length
        self._slots: list[_Slot | None] = []
        self._rows: list[tuple[mx.array, mx.array]] = []
        self._num_passes = 0

    def __len__(self) -> int:
        """Count the sessions."""
        return len(self._members())

    def holds(self, layers: SessionLayers) -> bool:
        """Return whether a session has a slot."""
        return layers.shared is self

    def compute(self, feeds: Sequence[Feed]) -> list[mx.array]:
        """Feed each session's tokens, lazily, and return the logits [n, rows] after each."""
        self._num_passes += 1
        self._release_others()
        if not all(self.holds(feed.cache.layers) for feed in feeds):
            self._join([feed.cache.layers for feed in feeds])
        width = width_for(max(feed.num_tokens for feed in feeds))
        tokens: list[mx.array] = [mx.zeros(width, mx.uint32)] * len(self._slots)
        offsets = [0] * len(self._slots)
        slots = {}
        for i, layers in self._members().items():
            offsets[i], slots[id(layers)] = layers.num_fed, i
        for feed in feeds:
            i = slots[id(feed.cache.layers)]
            self._slots[i].used_at = self._num_passes  # type: ignore[union-attr]
            tokens[i] = mx.pad(feed.token_ids.astype(mx.uint32), (0, width - feed.num_tokens))
        logits, self._rows = self._static.run(mx.stack(tokens), mx.array(offsets), self._rows)
        for feed in feeds:
            feed.cache.layers.advance(feed.num_tokens)
        return [logits[slots[id(feed.cache.layers)], : feed.num_tokens] for feed in feeds]

    def release_unshared(self) -> None:
        """Release a session that has the buffers for itself; without sessions, drop the buffers."""
        members = self._members()
        if len(members) == 1:
            self.release(*members.values())
        elif not members:
            self._slots, self._rows = [], []

    def release(self, layers: SessionLayers) -> None:
        """Give a session its rows back, evaluated. If a pass that wrote them fails only now, all sessions lose them."""
        i = next(i for i, own in self._members().items() if own is layers)
        rows = [(owned(k[i : i + 1]), owned(v[i : i + 1])) for k, v in self._rows]
        try:
            mx.eval(rows)
        except Exception:
            self.lose()
            raise
        layers.shared = None
        layers.take_rows(rows)
        self._slots[i] = None
        if not len(self):
            self._slots, self._rows = [], []

    def lose(self) -> None:
        """Let all sessions forget their tokens, because a failed pass may have left anything in the rows."""
        for layers in self._members().values():
            layers.rewind(0)
        self._slots, self._rows = [], []

    def _members(self) -> dict[int, SessionLayers]:
        """Return the sessions by slot."""
        held = {i: slot.layers() for i, slot in enumerate(self._slots) if slot is not None}
        return {i: layers for i, layers in held.items() if layers is not None and self.holds(layers)}

    def _release_others(self) -> None:
        """Release idle sessions, and those that a pass could write beyond the buffer for."""
        for i, layers in self._members().items():
            slot = self._slots[i]
            assert slot is not None
            if self._num_passes - slot.used_at > _IDLE_PASSES or layers.num_fed + MOST_TOKENS > self._length:
                self.release(layers)

    def _join(self, sessions: Sequence[SessionLayers]) -> None:
        """Give slots to these sessions too. All buffers are made again: a session joins once."""
        members = self._members()
        joining = [layers for layers in sessions if not self.holds(layers)]
        parts = [[(k[i : i + 1], v[i : i + 1]) for k, v in self._rows] for i in members]
        parts += [layers.give_rows(self) for layers in joining]
        used = {id(layers): self._slots[i].used_at for i, layers in members.items()}  # type: ignore[union-attr]
        num_slots = next(slots for slots in SLOTS if slots >= len(parts))
        together = [*members.values(), *joining]
        self._slots = [_Slot(ref(layers), used.get(id(layers), self._num_passes)) for layers in together]
        self._slots += [None] * (num_slots - len(parts))
        self._rows = [
            (self._stacked([k for k, _ in of_layer], num_slots), self._stacked([v for _, v in of_layer], num_slots))
            for of_layer in zip(*parts, strict=True)
        ]

    def _stacked(self, parts: Sequence[mx.array], num_slots: int) -> mx.array:
        """Stack buffers [1, heads, any length, size], each with room up to the length, and empty ones."""
        fitting = [mx.pad(part[..., : self._length, :], _room(self._length - part.shape[2])) for part in parts]
        shape = (num_slots - len(parts), *fitting[0].shape[1:])
        return mx.concatenate([*fitting, mx.zeros(shape, parts[0].dtype)])


class Sharing:
    """The shared rows by length of the buffer, and the choice of the sessions that share."""

    def __init__(self, static: StaticStep, limit_bytes: int) -> None:
        """Share buffers of at most this many bytes for each length."""
        self._static = static
        self._bytes_per_token = static.bytes_per_token
        self._limit_bytes = limit_bytes
        self._by_length: dict[int, SharedRows] = {}

    def release_unshared(self) -> None:
        """Drop the buffers that no two sessions share."""
        for shared in self._by_length.values():
            shared.release_unshared()

    def groups(self, feeds: Sequence[Feed]) -> list[tuple[SharedRows, list[Feed]]]:
        """Return the feeds that are computed in shared passes. The others are computed another way."""
        fitting: dict[int, list[Feed]] = {}
        for feed in feeds:
            most_rows = feed.cache.layers.num_fed + MOST_TOKENS
            if (
                feed.cache.layers.num_fed
                and feed.num_tokens <= MOST_TOKENS
                and most_rows <= self._static.context_length
            ):
                fitting.setdefault(_length_for(most_rows), []).append(feed)
        self.release_unshared()
        groups = []
        for length, group in fitting.items():
            shared = self._by_length.setdefault(length, SharedRows(self._static, length))
            have_slots = sum(shared.holds(feed.cache.layers) for feed in group)
            num_sessions = len(shared) + len(group) - have_slots
            is_worth_it = num_sessions > 1 and (len(group) > 1 or have_slots)
            most_bytes = 2 * num_sessions * length * self._bytes_per_token
            if is_worth_it and num_sessions <= SLOTS[-1] and most_bytes <= self._limit_bytes:
                groups.append((shared, group))
        return groups


def _length_for(num_rows: int) -> int:
    length = _SHORTEST
    while length < num_rows:
        length *= _RATIO
    return length


def _room(num_rows: int) -> list[tuple[int, int]]:
    return [(0, 0), (0, 0), (0, max(num_rows, 0)), (0, 0)]
