"""A source that the product does not know, in the round loop, the counts and the planner: one class is enough."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import cast

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from coordinator.core import Match, Part, Plan, Round
from coordinator.planner.planner import Planner
from coordinator.planner.round_costs import RoundCosts
from coordinator.planner.session_planner import SessionPlanner
from coordinator.proposals.lookup import Lookup
from coordinator.proposals.proposer import Proposer
from coordinator.proposals.source import Source
from coordinator.sources import Sources
from coordinator.telemetry.metrics import CoordinatorMetrics
from specd.rpc.messages import to_source_counts
from specd.sampling import Sampling
from specd.step_costs import StepCosts
from specd.vocabulary import PROPOSERS, SourceCounts, TokenSource
from tests.unit.fake_workers import (
    FakeDraft,
    FakeTarget,
    decode_with_target_alone,
    make_session,
    next_token,
    run,
    run_planned,
)
from tests.unit.test_round_loop import draft_choices, draft_events, max_token_counts, prompts, target_events


class NewSource(enum.Enum):
    """The value that a new source would add to TokenSource."""

    REPETITION = "repetition"


REPETITION = cast(TokenSource, NewSource.REPETITION)
ALL = (*PROPOSERS, REPETITION)


class Repetition(Source):
    """Proposes the last token again."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._last = token_ids[-1]

    def match(self) -> Match | None:
        return Match(REPETITION, [self._last] * 8, 1)

    async def propose(self, token_ids: Sequence[int], before: Sequence[int], plan: Plan) -> Part | None:
        assert token_ids[-1] == self._last, "it was told of all tokens"
        limit = plan.limit(REPETITION, len(before))
        return Part(REPETITION, [[*token_ids, *before][-1]] * limit) if limit else None

    def committed(self, token_ids: Sequence[int]) -> None:
        self._last = token_ids[-1]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    return Plan({source: draw(st.integers(0, 4)) for source in ALL}, most=draw(st.integers(0, 10)))


@given(
    prompts,
    max_token_counts,
    st.lists(plans(), min_size=1, max_size=6),
    draft_choices(),
    draft_events,
    target_events,
)
def test_all_sources_together_change_no_text_and_are_counted_apart(
    prompt: list[int],
    max_tokens: int,
    planned: list[Plan],
    choose: Callable[[list[int]], int],
    draft_faults: list[str],
    target_faults: list[str],
) -> None:
    session = make_session(prompt, max_tokens)
    draft, target = FakeDraft(choose, draft_faults), FakeTarget(target_faults)
    rounds, statistics = run(session, planned, draft, target, Lookup(prompt), Repetition(prompt))
    assert session.token_ids[len(prompt) :] == decode_with_target_alone(prompt, max_tokens)
    check_counts(rounds, statistics.sources)


def check_counts(rounds: Sequence[Round], counted: dict[TokenSource, SourceCounts]) -> None:
    """Assert that counts and metrics say of each source what its parts and the target's tokens show."""
    expected: dict[TokenSource, SourceCounts] = {}
    metrics = CoordinatorMetrics(registry := CollectorRegistry())
    for round_ in rounds:
        metrics.count_round(round_, first=False)
        assert len(round_.sources) == len(round_.commit.token_ids)
        proposed = [part.source for part in round_.proposal.parts for _ in part.token_ids]
        assert round_.sources[: round_.commit.num_accepted] == proposed[: round_.commit.num_accepted]
        assert set(round_.sources[round_.commit.num_accepted :]) <= {TokenSource.TARGET}
    for source in ALL:
        proposals = sum(len(round_.proposal.of(source).token_ids) for round_ in rounds)
        accepted = sum(round_.sources.count(source) for round_ in rounds)
        if proposals:
            expected[source] = SourceCounts(proposals, accepted)
        for name, number in (("proposed", proposals), ("accepted", accepted)):
            value = registry.get_sample_value(f"specd_{name}_tokens_by_source_total", {"source": source.value})
            assert (value or 0) == number
    assert counted == expected
    assert {name: each.proposed for name, each in to_source_counts(counted).items()} == {
        source.value: counts.proposed for source, counts in expected.items()
    }


@given(prompts, max_token_counts)
def test_the_planner_asks_it_where_it_pays(prompt: list[int], max_tokens: int) -> None:
    """It says what it would propose, so it needs no term of the planner: its acceptance is learnt by its evidence."""
    costs = StepCosts({1: {1: 0.02, 33: 0.021}})
    planner = Planner(RoundCosts(lambda: costs, lambda: None))
    for _ in range(2):
        session = make_session(prompt, max_tokens)
        planning = SessionPlanner(planner, Sampling(), Sources((REPETITION,)), client="")
        proposer = Proposer([Repetition(prompt)])
        rounds, statistics = run_planned(session, planning, proposer, FakeTarget([]))
        planning.close()
        assert session.token_ids[len(prompt) :] == decode_with_target_alone(prompt, max_tokens)
        check_counts(rounds, statistics.sources)
        assert statistics.sources.keys() <= {REPETITION}


def test_a_text_that_repeats_a_token_is_proposed_by_it() -> None:
    session = make_session([1, 2], 40, end_token=None)
    target = FakeTarget([], choose=lambda _: 3)
    _, statistics = run(session, [Plan({REPETITION: 4})], FakeDraft(next_token, []), target, Repetition([1, 2]))
    assert session.token_ids[2:] == [3] * 40
    assert statistics.sources == {REPETITION: SourceCounts(statistics.accepted_tokens, statistics.accepted_tokens)}
    assert statistics.rounds == 1 + -(-39 // 5)
