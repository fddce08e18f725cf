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

    `bytes_per_token` maps the number of tokens that some layers keep at most to what each token takes there: full
    attention keeps all tokens, windows stop growing, and a recurrent state is full with the first token.
    """

    bytes_per_token: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def total(cls, footprints: Iterable[Self]) -> Self:
        """Add footprints."""
        added = Counter[int]()
        for footprint in footprints:
            added.update(footprint.bytes_per_token)
        return cls(dict(added))

    def bytes_for(self, num_tokens: int) -> int:
        """Return the bytes for this many tokens, without room for more."""
        return sum(size * min(num_tokens, most) for most, size in self.bytes_per_token.items())
