"""Proposals of a session: by the draft model, by look-up, or by both."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.core import Match, Plan, Proposal
from coordinator.proposals.lookup import Lookup
from coordinator.workers.drafter import Drafter


class Proposer:
    """Has the sources that a session's proposals may come from."""

    def __init__(self, drafter: Drafter, lookup: Lookup | None = None) -> None:
        self._drafter = drafter
        self._lookup = lookup

    def start_prefill(self, token_ids: Sequence[int]) -> None:
        """Let the draft model work on the prompt, without waiting for it."""
        self._drafter.start_prefill(token_ids)

    def look_up(self, token_ids: Sequence[int]) -> Match:
        """Return what the session's own text proposes after `token_ids`."""
        return self._lookup.find(token_ids) if self._lookup is not None else Match()

    async def propose(self, token_ids: Sequence[int], plan: Plan, match: Match) -> Proposal:
        """Return the draft model's tokens, and looked-up ones after them if these begin as the model's; as planned.

        Where the model is not asked, or cannot answer, the looked-up ones are all.
        """
        proposal = await self._drafter.propose(token_ids, plan)
        drafted = proposal.token_ids
        if plan.num_lookup_tokens and list(match.token_ids[: len(drafted)]) == drafted:
            tail = match.token_ids[len(drafted) :][: plan.num_lookup_tokens]
            return proposal.followed_by(tail, is_predicted=match.is_predicted)
        return proposal

    def close(self) -> None:
        """Free what the draft worker holds of this session."""
        self._drafter.close()
