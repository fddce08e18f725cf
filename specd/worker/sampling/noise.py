"""The randomness of a session: a function of its seed and of a position only."""

from __future__ import annotations

import enum
import hashlib
import struct

import mlx.core as mx


class Purpose(enum.Enum):
    """The use of a draw: draws for different purposes are independent."""

    SAMPLE = b"sample"  # the target's own choice, and under COUPLED the draft's choice too
    PROPOSE = b"propose"  # the draft's choice under REJECTION
    ACCEPT = b"accept"  # REJECTION's decision


class Noise:
    """Draws for the positions of a session with this seed, the same bits on every worker.

    MLX's generator is counter-based with an explicit key. Each position has a key of its own, a digest of seed,
    position and purpose, so the order of draws does not matter. A key gives other numbers for another shape, so both
    workers draw one value for each entry of the vocabulary.
    """

    def __init__(self, seed: int, vocabulary_size: int) -> None:
        self._seed = seed
        self._vocabulary_size = vocabulary_size
        # The last draw and its first position, because rejected positions are drawn again in the next round.
        self._drawn: dict[Purpose, tuple[int, mx.array]] = {}

    def gumbel(self, purpose: Purpose, position: int, count: int) -> mx.array:
        """Return Gumbel(0, 1) noise [count, vocabulary_size] for the positions from `position` on, in float32."""
        start, rows = self._drawn.get(purpose, (0, mx.zeros((0, self._vocabulary_size))))
        rows = rows[position - start :] if start <= position <= start + rows.shape[0] else rows[:0]
        missing = count - rows.shape[0]
        if missing > 0:
            rows = mx.concatenate([rows, self._draw(purpose, position + rows.shape[0], missing)])
        self._drawn[purpose] = position, rows
        return rows[:count]

    def prepare(self, purpose: Purpose, position: int, count: int) -> None:
        """Let the device draw noise for the next request, while the other worker computes."""
        mx.async_eval(self.gumbel(purpose, position, count))

    def _draw(self, purpose: Purpose, position: int, count: int) -> mx.array:
        size = self._vocabulary_size
        uniform = mx.vmap(lambda key: mx.random.uniform(shape=(size,), key=key))(self._keys(purpose, position, count))
        # Large noise, which lets unlikely tokens win, must come from uniform values near 0, where float32 is fine:
        # `uniform` is a multiple of 2^-32 there. mx.random.gumbel uses values near 1, in steps of 2^-24, and can never
        # choose a token less likely than that. The shift keeps 0 and the bound keeps 1 away from the logarithms.
        uniform = mx.minimum(uniform + 2.0**-33, 1 - 2.0**-24)
        return -mx.log(-mx.log1p(-uniform))

    def uniform(self, purpose: Purpose, position: int, count: int) -> mx.array:
        """Return uniform draws from [0, 1), [count], for the positions from `position` on, in float32."""
        return mx.vmap(lambda key: mx.random.uniform(key=key))(self._keys(purpose, position, count))

    def _keys(self, purpose: Purpose, position: int, count: int) -> mx.array:
        return mx.array([_key(self._seed, position + i, purpose) for i in range(count)], mx.uint32)


def _key(seed: int, position: int, purpose: Purpose) -> tuple[int, int]:
    message = struct.pack("<QQ", seed, position)
    return struct.unpack("<II", hashlib.blake2b(message, digest_size=8, person=purpose.value).digest())
