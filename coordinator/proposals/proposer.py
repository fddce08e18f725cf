"""Proposals of a session: what its sources propose, one behind the other."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.core import Match, Part, Plan, Proposal
from coordinator.proposals.source import Source


class Proposer:
    """Has the sources that a session's proposals may come from, in the order of their tokens."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources

    def start_prefill(self, token_ids: Sequence[int]) -> None:
        """Let the sources work on the prompt, without waiting for them."""
        for source in self._sources:
            source.start_prefill(token_ids)

    def matches(self) -> list[Match]:
        """Return what the sources would propose next, where that costs nothing to know."""
        return [match for source in self._sources if (match := source.match()) is not None]

    async def propose(self, token_ids: Sequence[int], plan: Plan) -> Proposal:
        """Return what the sources propose after `token_ids`, as planned."""
        parts: list[Part] = []
        before: list[int] = []
        for source in self._sources:
            if (part := await source.propose(token_ids, before, plan)) is not None:
                parts.append(part)
                before += part.token_ids
        return Proposal(tuple(parts))

    async def committed(self, token_ids: Sequence[int], *, is_last: bool) -> None:
        """Tell the sources the tokens that a round, or the session's last one, has added to the session."""
        for source in self._sources:
            source.committed(token_ids)

    def close(self) -> None:
        """Free what the sources hold of this session."""
        for source in self._sources:
            source.close()
