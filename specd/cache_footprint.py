"""Memory that the caches of a session take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

ALL_TOKENS = 2**63 - 1


@dataclass(frozen=True)
class CacheFootprint:
    """Memory that the caches of a session take, by the number of its tokens.

    `bytes_per_token` maps the most tokens that a kind of layer keeps to the bytes of each token there: full attention
    keeps all tokens, a window stops growing, and a recurrent state is full with the first token. In a model with an
    encoder, each token of the source takes `bytes_per_source_token` more.
    """

    bytes_per_token: Mapping[int, int] = field(default_factory=dict)
    bytes_per_source_token: int = 0

    @classmethod
    def total(cls, footprints: Iterable[Self]) -> Self:
        """Add footprints."""
        added = Counter[int]()
        of_source = 0
        for footprint in footprints:
            added.update(footprint.bytes_per_token)
            of_source += footprint.bytes_per_source_token
        return cls(dict(added), of_source)

    def bytes_for(self, num_tokens: int, num_source_tokens: int = 0) -> int:
        """Return the bytes for this many tokens, and for a source, without room for more."""
        of_tokens = sum(size * min(num_tokens, most) for most, size in self.bytes_per_token.items())
        return of_tokens + num_source_tokens * self.bytes_per_source_token
