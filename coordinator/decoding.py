"""The round loop: speculative decoding of one session."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

import structlog

from coordinator.drafter import Drafter
from coordinator.plan import Plan
from coordinator.round import Round
from coordinator.session import Session
from coordinator.verifier import Verifier


class Planner(Protocol):
    """Decides how far to go in each round of a session."""

    @property
    def will_draft(self) -> bool:
        """Whether the draft is likely to be asked soon, so that it should have the prompt."""

    def plan(self) -> Plan:
        """Plan the next round."""

    def observe(self, plan: Plan, round_: Round) -> Round:
        """Learn from a round after the session's first; returns it with what is known of the target alone."""


async def decode(
    session: Session,
    planner: Planner,
    drafter: Drafter,
    verifier: Verifier,
    *,
    clock: Callable[[], float],
) -> AsyncGenerator[Round]:
    """Run a session to its end, a round at a time (Leviathan et al., arXiv 2211.17192, algorithm 1).

    How far to go is planned for each round. The draft proposes, the target verifies the proposal in one pass, and what
    it accepts is committed together with its own next token: the recovered token after a rejection, the bonus token
    otherwise. A round without a proposal is an ordinary decoding step, so a missing draft slows a session down and
    changes nothing else.

    Raises UnavailableError when the target is lost and does not come back, and what the workers refuse.
    """
    if session.can_draft and planner.will_draft:
        drafter.start_prefill(session.token_ids)
    for number in itertools.count(1):
        structlog.contextvars.bind_contextvars(round=number)
        started_at = clock()
        plan = session.bound(planner.plan())
        proposal = await drafter.propose(session.token_ids, plan)
        verdict = await verifier.verify(session.token_ids, proposal)
        commit = session.commit(proposal.token_ids, verdict.num_accepted, verdict.next_token_id)
        round_ = Round(proposal, verdict, commit, started_at, clock())
        yield round_ if number == 1 else planner.observe(plan, round_)
        if commit.finish_reason is not None:
            return
