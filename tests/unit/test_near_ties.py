"""Near ties are counted once, with the token that was one: in statistics, in metrics, and where a client reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from coordinator.core import Round, Session, SessionSetup, Verdict
from coordinator.telemetry.metrics import CoordinatorMetrics
from coordinator.telemetry.statistics import SessionStatistics
from coordinator.workers.answers import check_verdict
from gateway.usage import timings_of
from specd.cli.completion import summary
from specd.client.statistics import GenerationStatistics
from specd.sampling import Acceptance, Margin, Sampling
from specd.vocabulary import FinishReason
from tests.unit.fake_workers import drafted

margins = st.builds(lambda value: Margin(value, value < 0.5), st.floats(0, 4, width=32) | st.just(math.inf))
rounds = st.lists(st.tuples(st.lists(margins, min_size=1, max_size=5), st.integers(0, 4)), min_size=1, max_size=6)


def committed(session: Session, given_: Sequence[Margin], num_rejected: int) -> Round:
    """Return a round that accepts a token for each margin but the last, of a proposal with some more."""
    accepted = len(given_) - 1
    proposal = [1] * (accepted + num_rejected)
    verdict = Verdict(accepted, 2, margins=given_)
    return Round(drafted(proposal), verdict, session.commit(proposal, accepted, 2), 0.0, 1.0)


@given(rounds, st.integers(1, 12), st.integers(1, 5))
def test_a_near_tie_counts_once_if_its_token_is_emitted(
    given_: list[tuple[list[Margin], int]], max_tokens: int, num_shown: int
) -> None:
    """The end of a session cuts its last round, and a stop string may cut it further."""
    session = Session("s", [1], max_tokens + 12, frozenset())
    registry = CollectorRegistry()
    metrics, statistics = CoordinatorMetrics(registry), SessionStatistics(1)
    emitted: list[Margin] = []
    for i, (of_round, num_rejected) in enumerate(given_):
        if len(of_round) + num_rejected > session.max_tokens - session.num_generated:
            break
        round_ = committed(session, of_round, num_rejected)
        if i == len(given_) - 1 and num_shown < len(of_round):
            round_ = round_.cut(num_shown, FinishReason.STOP_STRING)
        statistics.add(round_, arrived_at=0.0)
        metrics.count_round(round_, first=i == 0)
        emitted += of_round[: len(round_.commit.token_ids)]
    near_ties = sum(margin.is_near_tie for margin in emitted)
    assert statistics.near_ties == near_ties
    assert registry.get_sample_value("specd_near_ties_total") == near_ties
    values = [margin.value for margin in emitted]
    smallest = min(values, default=math.inf)
    if smallest < math.inf:
        assert (statistics.smallest_margin, statistics.smallest_margin_position) == (smallest, values.index(smallest))
    else:
        assert statistics.smallest_margin is statistics.smallest_margin_position is None


def test_a_target_may_leave_margins_out() -> None:
    session, statistics = Session("s", [1], 9, frozenset()), SessionStatistics(1)
    proposal = drafted([1, 1])
    statistics.add(Round(proposal, Verdict(2, 2), session.commit([1, 1], 2, 2), 0.0, 1.0), arrived_at=0.0)
    assert (statistics.near_ties, statistics.smallest_margin, statistics.smallest_margin_position) == (0, None, None)


@pytest.mark.parametrize("acceptance", Acceptance)
def test_infinite_margins_are_possible_and_by_rejection_there_are_none(acceptance: Acceptance) -> None:
    setup = SessionSetup("", Sampling(acceptance=acceptance, temperature=1.0), namespace=b"")
    verdict = Verdict(1, 2, 5, margins=[Margin(0.0, True), Margin(math.inf)])
    check_verdict(verdict, [1, 1], setup, session_len=3, vocabulary_size=9)
    check_verdict(replace(verdict, margins=[]), [1, 1], setup, session_len=3, vocabulary_size=9)


STATISTICS = GenerationStatistics(generated_tokens=9, near_ties=2, smallest_margin=0.0123, smallest_margin_position=4)


def test_the_line_of_a_completion_has_near_ties_only_if_there_are_any() -> None:
    assert "2 near ties (smallest margin 0.012, token 4)" in summary(STATISTICS)
    assert "near" not in summary(replace(STATISTICS, near_ties=0))
    assert "near" not in summary(replace(STATISTICS, smallest_margin=None))


def test_timings_have_near_ties_and_the_smallest_margin() -> None:
    other = replace(STATISTICS, near_ties=1, smallest_margin=None, smallest_margin_position=None)
    assert timings_of([STATISTICS])["near_ties"] == 2
    assert timings_of([STATISTICS])["smallest_margin"] == 0.0123
    assert timings_of([STATISTICS])["smallest_margin_position"] == 4
    both = timings_of([other, STATISTICS])
    assert (both["near_ties"], both["smallest_margin"], both["smallest_margin_position"]) == (3, 0.0123, None)
    assert timings_of([other])["smallest_margin"] is None
    json.dumps(both, allow_nan=False)
