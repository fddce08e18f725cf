"""The target worker as a source of draft tokens, which it proposes after its own verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from coordinator.core import Part, Plan
from coordinator.proposals.source import Source
from coordinator.workers.verifier import Verifier
from specd.vocabulary import TokenSource


class SelfDrafter(Source):
    """Takes the tokens that the target worker has proposed after the last verdict.

    The request for the verdict has already asked for them, so a proposal costs no message. After a loss of the target
    there are no tokens, and the part is empty.
    """

    def __init__(self, verifier: Verifier, *, timeout_seconds: float) -> None:
        self._verifier = verifier
        self._timeout_seconds = timeout_seconds

    async def propose(self, token_ids: Sequence[int], before: Sequence[int], plan: Plan) -> Part | None:
        """Return the first of these tokens, as many as planned."""
        assert not before, "the draft model proposes first"
        limit = plan.limit(TokenSource.DRAFT)
        if limit == 0:
            return None
        part = await self._verifier.proposal(self._timeout_seconds)
        return replace(part, token_ids=part.token_ids[:limit], confidences=part.confidences[:limit])
