"""The round loop: speculative decoding of one session."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol, TypeVar

import structlog

from coordinator.core import Match, Plan, Round, Session
from coordinator.proposals.proposer import Proposer
from coordinator.sessions.place import Place
from coordinator.workers.verifier import Verifier

Item = TypeVar("Item")


class RoundPlanner(Protocol):
    """Chooses the number of proposed tokens of each source for each round of a session."""

    def will_draft(self) -> bool:
        """Return whether the draft is likely to be asked soon, so that it should have the prompt."""

    def plan(self, matches: Sequence[Match]) -> Plan:
        """Plan the next round, for which sources have these matches."""

    def ahead(self) -> Plan:
        """Return how many draft tokens the round after the planned one is likely to have."""

    def observe(self, plan: Plan, round_: Round) -> float:
        """Learn from a round after the first; return the target-only seconds for its tokens, 0 if not known."""


class Turns(Protocol):
    """Decides which of several sessions runs."""

    def pause(self, place: Place) -> None:
        """Let others run."""

    async def next_round(self, place: Place) -> None:
        """Wait for the turn to continue, after a round or a pause."""


async def decode(
    session: Session, planner: RoundPlanner, proposer: Proposer, verifier: Verifier, *, clock: Callable[[], float]
) -> AsyncGenerator[Round]:
    """Run a session to its end, a round at a time (Leviathan et al., arXiv 2211.17192, algorithm 1).

    The sources propose as planned, the target verifies the proposal in one pass, and the accepted tokens are committed
    with the target's own next one: the recovered token after a rejection, the bonus token otherwise. A round without a
    proposal is an ordinary decoding step, so a missing draft costs speed and nothing else.

    Raises UnavailableError when the target is lost and does not come back, and the workers' refusals.
    """
    if session.can_draft and planner.will_draft():
        proposer.start_prefill(session.token_ids)
    for number in itertools.count(1):
        structlog.contextvars.bind_contextvars(round=number)
        started_at = clock()
        plan = session.bound(planner.plan(proposer.matches()))
        proposal = await proposer.propose(session.token_ids, plan)
        verdict = await verifier.verify(session.token_ids, proposal, session.bound_ahead(planner.ahead()))
        commit = session.commit(proposal.token_ids, verdict.num_accepted, verdict.next_token_id)
        await proposer.committed(commit.token_ids, is_last=commit.finish_reason is not None)
        round_ = Round(proposal, verdict, commit, started_at, clock())
        if number > 1:
            round_ = replace(round_, target_only_seconds=planner.observe(plan, round_))
        yield round_
        if commit.finish_reason is not None:
            return


async def read_ahead(items: AsyncGenerator[Item], turns: Turns, place: Place, *, limit: int) -> AsyncGenerator[Item]:
    """Yield the items of a generator that continues while an item is used, up to `limit` items ahead.

    Rounds continue while the coordinator turns the last one into text and the client reads it. A client that stops
    reading stops them after `limit` rounds: they pause, in favour of others' sessions, until it has read half of them.
    After each round others may have their turn.
    Closing this generator closes the other.
    """
    queue: asyncio.Queue[Item | None] = asyncio.Queue()  # None ends it
    drained = asyncio.Event()

    async def produce() -> None:
        try:
            async with aclosing(items):
                async for item in items:
                    queue.put_nowait(item)
                    if queue.qsize() > limit:
                        drained.clear()
                        turns.pause(place)
                        await drained.wait()
                    await turns.next_round(place)
        finally:
            turns.pause(place)  # it no longer needs a place, and its client may be far behind
            queue.put_nowait(None)

    producing = asyncio.ensure_future(produce())
    try:
        while (item := await queue.get()) is not None:
            if queue.qsize() <= limit // 2:
                drained.set()
            yield item
        await producing
    finally:
        producing.cancel()
        await asyncio.gather(producing, return_exceptions=True)
