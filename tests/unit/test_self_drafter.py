"""Draft tokens that the target worker proposes itself, after its verdicts."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings

from coordinator.core import Part, Plan, Round, SessionSetup
from coordinator.proposals.proposer import Proposer
from coordinator.proposals.self_drafter import SelfDrafter
from coordinator.round_loop import decode
from coordinator.workers.answers import check_self_proposal
from coordinator.workers.errors import WorkerError
from coordinator.workers.verifier import Verifier
from specd.vocabulary import TokenSource
from tests.unit.fake_workers import (
    END_TOKEN,
    SETUP,
    VOCABULARY_SIZE,
    FakeTarget,
    FakeTargetStream,
    OnlyRoute,
    Planned,
    decode_with_target_alone,
    make_session,
    next_token,
    plan_of,
)
from tests.unit.test_round_loop import (
    draft_choices,
    max_token_counts,
    no_pause_between_attempts,
    plans,
    prompts,
    target_events,
)

__all__ = ["no_pause_between_attempts"]  # a fixture for all tests here


class Ahead(Planned):
    """A planner that expects five draft tokens in each round."""

    def ahead(self) -> Plan:
        return plan_of(5)


def run(
    prompt: list[int], max_tokens: int, planner: Planned, target: FakeTarget, end_token: int | None = END_TOKEN
) -> tuple[list[int], list[Round]]:
    """Decode a session to its end; return its tokens after the prompt, and its rounds."""
    session, clock = make_session(prompt, max_tokens, end_token), itertools.count().__next__
    verifier = Verifier(
        OnlyRoute(target), SETUP, timeout_seconds=1.0, recovery_seconds=1e9, clock=clock, asks_ahead=True
    )
    proposer = Proposer([SelfDrafter(verifier, timeout_seconds=1.0)])

    async def drive() -> list[Round]:
        try:
            return [each async for each in decode(session, planner, proposer, verifier, clock=clock)]
        finally:
            verifier.close()

    rounds = asyncio.run(drive())
    return session.token_ids[len(prompt) :], rounds


@settings(max_examples=300)
@given(prompts, max_token_counts, plans, draft_choices(), target_events)
def test_what_comes_out_is_what_the_target_alone_decodes(
    prompt: list[int],
    max_tokens: int,
    planned: list[Plan],
    choose: Callable[[list[int]], int],
    faults: list[str],
) -> None:
    target = FakeTarget(faults, propose=choose)
    said, rounds = run(prompt, max_tokens, Planned(planned), target)
    assert said == decode_with_target_alone(prompt, max_tokens)
    assert [token for each in rounds for token in each.commit.token_ids] == said
    assert target.num_open == 0


@given(prompts, max_token_counts)
def test_a_proposal_that_is_always_right_is_accepted_in_every_round_but_the_first(
    prompt: list[int], max_tokens: int
) -> None:
    k = 3
    said, rounds = run(prompt, max_tokens, Planned([plan_of(k)]), FakeTarget([], propose=next_token))
    assert rounds[0].num_proposed == 0
    assert all(each.commit.num_accepted == each.num_proposed for each in rounds[:-1])
    if len(said) == max_tokens:
        assert len(rounds) == 1 + -(-(max_tokens - 1) // (k + 1))


def test_fewer_tokens_than_were_asked_ahead_are_their_first_ones() -> None:
    _, rounds = run([1, 2], 40, Ahead([plan_of(2)]), FakeTarget([], propose=next_token), end_token=None)
    assert {each.num_proposed for each in rounds[1:-1]} == {2}


def test_a_target_that_comes_back_without_a_draft_is_not_asked_for_tokens() -> None:
    """Nor does it get tokens for which the target before it has kept the distributions."""

    class Changing(FakeTarget):
        def open_stream(self, setup: SessionSetup) -> FakeTargetStream:
            self.self_draft = self.self_draft if self.events else None
            return super().open_stream(setup)

    said, rounds = run([1, 2], 40, Planned([plan_of(3)]), Changing(["ok", "ok", "lost"], propose=next_token))
    assert said == decode_with_target_alone([1, 2], 40)
    assert rounds[-2].num_proposed == 0


@pytest.mark.parametrize(
    "part",
    [
        Part(TokenSource.DRAFT, [1, 2, 3]),
        Part(TokenSource.DRAFT, [1, VOCABULARY_SIZE]),
        Part(TokenSource.DRAFT, [1, 2], confidences=[0.5]),
        Part(TokenSource.DRAFT, [1, 2], confidences=[0.5, float("nan")]),
    ],
    ids=["too many", "beyond the vocabulary", "too few confidences", "no number"],
)
def test_an_impossible_proposal_is_the_targets_fault(part: Part) -> None:
    with pytest.raises(WorkerError, match="target worker") as caught:
        check_self_proposal(part, plan_of(2), vocabulary_size=VOCABULARY_SIZE)
    assert caught.value.reason == "TARGET_BROKEN"
