"""Look-up: the index beside a naive search, its memory, and what a session proposes from its own text."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from coordinator.core import Match, Part, Plan
from coordinator.proposals.lookup import Lookup
from coordinator.proposals.proposer import Proposer
from coordinator.proposals.source import Source
from coordinator.proposals.token_index import _COMPARED, _LONGEST, _MOST_PLACES, TokenIndex
from specd.setting_types import MAX_NUM_DRAFT_TOKENS
from specd.vocabulary import PROPOSERS, SourceCounts, TokenSource
from tests.unit.fake_workers import (
    FakeDraft,
    FakeTarget,
    decode_with_target_alone,
    make_session,
    next_token,
    plan_of,
    run,
)

tokens = st.lists(st.integers(0, 2), max_size=60)
texts = st.lists(tokens, min_size=1, max_size=3)


def places(text: Sequence[int]) -> dict[int, int]:
    """Return by place how many of the latest tokens stand before it, at most as many as are told apart."""

    def common(place: int) -> int:
        length = 0
        while length < min(place, _LONGEST) and text[place - 1 - length] == text[len(text) - 1 - length] != -1:
            length += 1
        return length

    return {place: length for place in range(1, len(text)) if (length := common(place))}


@given(texts, st.lists(st.integers(1, 7), min_size=1))
def test_the_index_finds_what_a_naive_search_finds(parts: list[list[int]], steps: list[int]) -> None:
    """With few symbols and tokens that come one or some at a time."""
    index, text = TokenIndex(), []
    for number, part in enumerate(parts):
        if number:
            index.end_text()
            text.append(-1)
        position = 0
        while position < len(part):
            step = steps[position % len(steps)]
            index.add(part[position : position + step])
            text += part[position : position + step]
            position += step
            found = places(text)
            assert index.tokens == text
            if not found:
                assert index.place == 0
                continue
            assert found[index.place] == index.length
            if sum(length >= _COMPARED for length in found.values()) <= _MOST_PLACES:
                assert index.length == max(found.values())


@given(tokens.filter(bool), st.integers(1, 40))
def test_a_continuation_is_what_followed_as_if_the_text_went_on(text: list[int], most: int) -> None:
    index = TokenIndex()
    index.add(text)
    continuation = index.continuation(most)
    if not index.place:
        assert continuation == []
        return
    going_on = [*text]
    for i in range(most):
        going_on.append(going_on[index.place + i])
    assert continuation == going_on[len(text) :]


def test_of_equal_matches_the_most_recent_counts() -> None:
    index = TokenIndex()
    index.add([1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3])
    assert (index.length, index.continuation(1)) == (4, [5])
    index = TokenIndex()
    index.add([8, 1, 2, 3, 4, 9, 1, 2, 3, 5, 8, 1, 2, 3])  # a longer one before it
    assert (index.length, index.continuation(1)) == (4, [4])
    for text, length, following in (([7, 3, 4, 9, 3, 5, 8, 3], 1, 5), ([1, 3, 4, 2, 3, 5, 1, 3], 2, 4)):
        index = TokenIndex()
        index.add(text)
        assert (index.length, index.continuation(1)) == (length, [following])


def test_a_repetition_goes_on_beyond_the_text() -> None:
    index = TokenIndex()
    index.add([7, 1, 2, 1, 2, 1, 2])
    assert index.continuation(5) == [1, 2, 1, 2, 1]


def test_the_index_takes_at_most_400_bytes_a_token_and_reads_as_much_for_a_late_one_as_for_an_early_one() -> None:
    """Asked at each token of 32,000: of text that repeats often, has few symbols, one, or never repeats."""
    rng = random.Random(0)
    phrases = [[rng.randrange(5, 8000) for _ in range(rng.randint(3, 40))] for _ in range(60)]
    repeating = [token for _ in range(2500) for token in rng.choice(phrases)][:32_000]
    for text in (repeating, [rng.randrange(3) for _ in range(32_000)], [1] * 32_000, list(range(32_000))):
        tracemalloc.start()
        index = TokenIndex()
        index.add(text)
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert size / len(text) < 400
        early, late = (_reads_a_token(text[:length]) for length in (2000, 32_000))
        assert late < 5 * early  # 16 times as many for a search that goes through the text


class _CountedList(list[int]):
    """A list that counts how many of its items are read."""

    num_read = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.num_read += len(found) if isinstance(key, slice) else 1
        return found

    def __iter__(self) -> Iterator[int]:
        self.num_read += len(self)
        return super().__iter__()


def _reads_a_token(text: Sequence[int]) -> float:
    index = TokenIndex()
    index.tokens, index._before = tokens, before = _CountedList(), _CountedList()
    for token in text:
        index.add([token])
        index.continuation(8)
    return (tokens.num_read + before.num_read) / len(text)


def test_a_prediction_comes_first_from_its_start_and_again_after_an_edit() -> None:
    prediction = list(range(100, 160))
    lookup = Lookup([1, 2, 3], prediction=prediction)
    assert lookup.match() == Match(TokenSource.PREDICTION, prediction[:MAX_NUM_DRAFT_TOKENS])
    lookup.committed([*prediction[:5], 7, 8])  # an edit
    assert lookup.match() is None
    lookup.committed(prediction[9:12])
    match = lookup.match()
    assert match is not None
    assert match.source is TokenSource.PREDICTION
    assert match.token_ids[:4] == prediction[12:16]


def test_a_source_is_looked_up_too() -> None:
    lookup = Lookup([0], source=[5, 6, 7, 8, 9, 10])
    lookup.committed([6, 7, 8])
    assert lookup.match() == Match(TokenSource.LOOKUP, [9, 10], 3)


prompts = st.lists(st.integers(1, 4), min_size=1, max_size=12)
plans = st.lists(
    st.builds(plan_of, st.integers(0, 4), st.just(()), st.integers(0, 12)),
    min_size=1,
    max_size=6,
)


@given(prompts, st.integers(1, 40), plans, st.lists(st.integers(0, 4), max_size=40), st.lists(st.integers(0, 4)))
def test_looked_up_tokens_change_no_text(
    prompt: list[int], max_tokens: int, planned: list[Plan], prediction: list[int], offsets: list[int]
) -> None:
    """Alone, behind the draft's tokens, and instead of a lost draft's; with any prediction."""
    session = make_session(prompt, max_tokens)
    expected = decode_with_target_alone(prompt, max_tokens)
    draft = FakeDraft(lambda ids: (next_token(ids) + (offsets or [0])[len(ids) % len(offsets or [0])]) % 5, ["lost"])
    # Half of the examples get the right prediction.
    lookup = Lookup(prompt, prediction=expected if len(prediction) % 2 else prediction)
    rounds, statistics = run(session, planned, draft, FakeTarget([]), lookup)
    assert session.token_ids[len(prompt) :] == expected
    for source in PROPOSERS:
        proposed = sum(len(round_.proposal.of(source).token_ids) for round_ in rounds)
        accepted = sum(round_.sources.count(source) for round_ in rounds)
        assert statistics.sources.get(source, SourceCounts()) == SourceCounts(proposed, accepted)
    assert statistics.proposed_tokens == sum(counts.proposed for counts in statistics.sources.values())
    assert statistics.accepted_tokens == sum(counts.accepted for counts in statistics.sources.values())


def test_a_right_prediction_is_accepted_whole() -> None:
    prompt, most = [1, 2], 40
    expected = decode_with_target_alone(prompt, most, end_token=None)
    lookup = Lookup(prompt, prediction=expected)
    session = make_session(prompt, most, end_token=None)
    _, statistics = run(session, [plan_of(0, (), 9)], FakeDraft(next_token, []), FakeTarget([]), lookup)
    num_accepted = statistics.accepted_tokens
    assert statistics.sources == {TokenSource.PREDICTION: SourceCounts(num_accepted, num_accepted)}
    # The first token is the target's alone: from then on the match is the prediction from its second on.
    assert statistics.rounds == 1 + -(-(most - 1) // 10)


async def test_looked_up_tokens_lengthen_a_draft_only_where_both_agree() -> None:
    class Says(Source):
        def __init__(self, *token_ids: int) -> None:
            self.token_ids = list(token_ids)

        async def propose(self, token_ids: Sequence[int], before: Sequence[int], plan: Plan) -> Part:
            return Part(TokenSource.DRAFT, self.token_ids)

    text = [1, 2, 3, 4, 5, 6, 9, 1, 2, 3]
    for drafted, expected in (([4, 5], [4, 5, 6, 9]), ([4, 7], [4, 7]), ([], [4, 5])):
        proposer = Proposer([Says(*drafted), Lookup(text)])
        proposal = await proposer.propose(text, plan_of(len(drafted), (), 2))
        assert proposal.token_ids == expected
        assert proposal.drafted.token_ids == drafted
