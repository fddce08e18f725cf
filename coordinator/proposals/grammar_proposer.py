"""Proposals of a session that must keep a grammar."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from coordinator.core import Part, Plan, Proposal
from coordinator.proposals.forced import Forced
from coordinator.proposals.proposer import Proposer
from coordinator.proposals.source import Source
from specd.matching.matcher import SessionMatcher, chosen_by_target


class GrammarProposer(Proposer):
    """Cuts each proposal at its first token that the grammar forbids, which the target could only reject.

    The grammar is followed on a thread, because a new place of a difficult one takes milliseconds, and only when a
    proposal, forced tokens or the end of the text need it: the target's masks keep it in every round.
    """

    def __init__(self, sources: Sequence[Source], matcher: SessionMatcher, *, forces: bool) -> None:
        """`matcher` has followed the session. The last source is that of forced tokens, if it `forces`."""
        self._forced = Forced() if forces else None
        super().__init__([*sources, self._forced] if self._forced is not None else sources)
        self._matcher = matcher
        self._new: list[int] = []  # the tokens of the session that the matcher has not followed

    async def propose(self, token_ids: Sequence[int], plan: Plan) -> Proposal:
        """Return the sources' proposal after `token_ids`, as planned, up to its first token that is forbidden."""
        proposal = await super().propose(token_ids, plan)
        proposed = proposal.token_ids
        if not proposed:
            return proposal
        left = await asyncio.to_thread(self._num_allowed, proposed)
        parts: list[Part] = []
        for part in proposal.parts:
            parts.append(_beginning(part, left))
            left -= len(parts[-1].token_ids)
        return Proposal(tuple(parts))

    async def committed(self, token_ids: Sequence[int], *, is_last: bool) -> None:
        """Tell the sources the tokens that a round has added to the session.

        Raises InvalidRequestError (GRAMMAR_BROKEN) if the grammar forbids one of them, at the latest in the last round.
        """
        await super().committed(token_ids, is_last=is_last)
        self._new += token_ids
        if is_last or self._forced is not None:
            await asyncio.to_thread(self._follow)

    def _follow(self) -> None:
        with chosen_by_target():
            self._matcher.follow(self._new, self._matcher.end)
        self._new = []
        if self._forced is not None:
            self._forced.token_ids = self._matcher.forced()

    def _num_allowed(self, token_ids: Sequence[int]) -> int:
        if self._new:
            self._follow()
        return self._matcher.num_allowed(token_ids)


def _beginning(part: Part, num_tokens: int) -> Part:
    if num_tokens >= len(part.token_ids):
        return part
    return replace(
        part,
        token_ids=part.token_ids[:num_tokens],
        confidences=part.confidences[:num_tokens],
        distributions=part.distributions[:num_tokens],
    )
