"""Proposals of a session that must keep a grammar."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from coordinator.core import Part, Plan, Proposal
from coordinator.proposals.forced import Forced
from coordinator.proposals.proposer import Proposer
from coordinator.proposals.source import Source
from specd.errors import InvalidRequestError
from specd.grammar import GRAMMAR_BROKEN
from specd.matching.matcher import ForbiddenTokenError, SessionMatcher


class GrammarProposer(Proposer):
    """Cuts each proposal at its first token that the grammar forbids, which the target could only reject.

    The grammar is followed on a thread, because a new place of a difficult one takes milliseconds.
    """

    def __init__(self, sources: Sequence[Source], matcher: SessionMatcher, forced: Forced | None = None) -> None:
        """`matcher` has followed the session. `forced` is among the sources, if forced tokens may be proposed."""
        super().__init__(sources)
        self._matcher = matcher
        self._forced = forced

    async def propose(self, token_ids: Sequence[int], plan: Plan) -> Proposal:
        """Return the sources' proposal after `token_ids`, as planned, up to its first token that is forbidden."""
        proposal = await super().propose(token_ids, plan)
        proposed = proposal.token_ids
        if not proposed:
            return proposal
        left = await asyncio.to_thread(self._matcher.num_allowed, proposed)
        parts: list[Part] = []
        for part in proposal.parts:
            parts.append(_beginning(part, left))
            left -= len(parts[-1].token_ids)
        return Proposal(tuple(parts))

    async def committed(self, token_ids: Sequence[int]) -> None:
        """Tell the sources the tokens that a round has added to the session.

        Raises InvalidRequestError (GRAMMAR_BROKEN) if the grammar forbids one of them. The target chooses any token
        where other parameters forbid all that the grammar allows.
        """
        await super().committed(token_ids)
        try:
            await asyncio.to_thread(self._follow, token_ids)
        except ForbiddenTokenError as error:
            raise InvalidRequestError(
                GRAMMAR_BROKEN,
                f"{error}, because other parameters, such as min_tokens, forbid all that it allows: leave one out",
            ) from error

    def _follow(self, token_ids: Sequence[int]) -> None:
        self._matcher.follow(token_ids, self._matcher.end)
        if self._forced is not None:
            self._forced.token_ids = self._matcher.forced()


def _beginning(part: Part, num_tokens: int) -> Part:
    if num_tokens >= len(part.token_ids):
        return part
    return replace(
        part,
        token_ids=part.token_ids[:num_tokens],
        confidences=part.confidences[:num_tokens],
        distributions=part.distributions[:num_tokens],
    )
