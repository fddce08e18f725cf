"""The round loop: speculative decoding of one session."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Callable

import structlog

from coordinator.drafter import Drafter
from coordinator.round import Round
from coordinator.session import Session
from coordinator.verifier import Verifier


async def decode(
    session: Session, drafter: Drafter, verifier: Verifier, *, clock: Callable[[], float]
) -> AsyncGenerator[Round]:
    """Run a session to its end, a round at a time (Leviathan et al., arXiv 2211.17192, algorithm 1).

    The draft proposes, the target verifies the proposal in one pass, and what it accepts is committed together with
    its own next token: the recovered token after a rejection, the bonus token otherwise. A round without a proposal
    is an ordinary decoding step, so a missing draft slows a session down and changes nothing else.

    Raises UnavailableError when the target is lost and does not come back, and what the workers refuse.
    """
    if session.will_draft:
        drafter.start_prefill(session.token_ids)
    for number in itertools.count(1):
        structlog.contextvars.bind_contextvars(round=number)
        started_at = clock()
        proposal = await drafter.propose(session.token_ids, session.next_num_draft_tokens())
        verdict = await verifier.verify(session.token_ids, proposal)
        commit = session.commit(proposal.token_ids, verdict.num_accepted, verdict.next_token_id)
        yield Round.of(proposal, verdict, commit, started_at=started_at, ended_at=clock())
        if commit.finish_reason is not None:
            return
