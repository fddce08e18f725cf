"""The prefix protocol on real models: any order of requests gives what a fresh cache gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specd.errors import CacheTooShortError
from specd.sampling import Acceptance, Sampling
from specd.worker.engine.jobs import Evaluate
from specd.worker.layers.session_layers import SessionLayers
from specd.worker.sampling.sampler import Sampler
from specd.worker.session import session_cache
from specd.worker.session.prefix_cache import PrefixCache
from specd.worker.session.proposal import DraftedTokens, propose
from specd.worker.session.session_cache import SessionCache
from target_worker.verification import Verification, verify
from tests.worker.driving import Chunks, Driven, finish, run_some
from tests.worker.models import TINY_VOCABULARY_SIZE, tiny_model

MODEL = tiny_model()
GREEDY = Sampler(Sampling(), TINY_VOCABULARY_SIZE)

token_lists = st.lists(st.integers(0, TINY_VOCABULARY_SIZE - 1), min_size=1, max_size=12)


def greedy_choices(token_ids: Sequence[int]) -> list[int]:
    logits = MODEL.network(mx.array([token_ids]))
    return np.array(mx.argmax(logits[0], axis=-1)).tolist()


def verify_in_one_go(
    cache: SessionCache, position: int, token_ids: list[int], proposal: list[int], *, runs_ahead: bool = False
) -> Verification:
    return finish(verify(cache, GREEDY, position, token_ids, proposal, chunk=Chunks(3), runs_ahead=runs_ahead))


def propose_in_one_go(
    cache: SessionCache, position: int, token_ids: list[int], k: int, min_confidences: Sequence[float] = ()
) -> DraftedTokens:
    return finish(propose(cache, GREEDY, position, token_ids, k, chunk=Chunks(3), min_confidences=min_confidences))


def greedy_continuation(token_ids: Sequence[int], count: int) -> list[int]:
    expected = list(token_ids)
    while len(expected) < len(token_ids) + count:
        expected.append(greedy_choices(expected)[-1])
    return expected[len(token_ids) :]


@pytest.fixture(autouse=True)
def small_last_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make even short requests take several steps."""
    monkeypatch.setattr(session_cache, "MAX_PENDING", 2)


@given(st.data())
def test_any_order_of_requests_equals_a_fresh_cache(data: st.DataObject) -> None:
    cache = SessionCache(MODEL)
    latest: int | None = None  # the token of the last verdict, for which a target may have run ahead
    for _ in range(data.draw(st.integers(1, 8))):
        position = data.draw(st.integers(0, cache.cached_len))
        # Half of the time the tokens continue like the cache, so that it can be reused.
        token_ids = data.draw(token_lists)
        if data.draw(st.booleans()) and position < cache.cached_len:
            token_ids = cache.token_ids[position : position + len(token_ids)]
        if latest is not None and data.draw(st.booleans()):
            position, token_ids = cache.cached_len, [latest]
        prefix = cache.token_ids[:position]
        session = [*prefix, *token_ids]
        kinds = ["verify", "propose", "superseded verify", "superseded propose"]
        kind = data.draw(st.sampled_from(kinds))
        if kind != "superseded verify":  # the same request can come again
            latest = None
        if kind.endswith("propose"):
            k = data.draw(st.integers(1, 6))
            min_confidences = data.draw(st.lists(st.sampled_from([0.0, 0.3, 0.6, 0.9]), max_size=k))
        match kind:
            case "verify":
                proposed = data.draw(st.lists(st.integers(0, TINY_VOCABULARY_SIZE - 1), max_size=6))
                if data.draw(st.booleans()):  # a proposal that is right for a while
                    proposed = [*greedy_continuation(session, 3), *proposed][:6]
                if data.draw(st.booleans()):
                    proposed = []
                verdict = verify_in_one_go(cache, position, token_ids, proposed, runs_ahead=data.draw(st.booleans()))
                latest = verdict.next_token_id if not proposed else None
                own = greedy_choices([*session, *proposed])[len(session) - 1 :]
                agreeing = [token_id == chosen for token_id, chosen in zip(proposed, own, strict=False)]
                assert verdict.num_accepted == [*agreeing, False].index(False)
                assert verdict.next_token_id == own[verdict.num_accepted]
                assert verdict.cached_len == cache.cached_len == len(session) + len(proposed)
            case "propose":
                proposal = propose_in_one_go(cache, position, token_ids, k, min_confidences)
                check_proposal(proposal, session, k, min_confidences)
                assert proposal.cached_len == cache.cached_len >= len(session) + len(proposal.token_ids) - 1
            case "superseded verify":
                verifying = verify(
                    cache, GREEDY, position, token_ids, [], chunk=Chunks(3), runs_ahead=data.draw(st.booleans())
                )
                run_some(verifying, data.draw(st.integers(0, 4)))
            case "superseded propose":
                steps = propose(cache, GREEDY, position, token_ids, k, chunk=Chunks(3), min_confidences=min_confidences)
                run_some(steps, data.draw(st.integers(0, 6)))


def check_proposal(proposal: DraftedTokens, session: list[int], k: int, min_confidences: Sequence[float]) -> None:
    """Check that a proposal is the draft's greedy path, and that it ends where it should, or a token later."""
    assert proposal.token_ids == greedy_continuation(session, len(proposal.token_ids))
    assert len(proposal.confidences) == (len(proposal.token_ids) if min_confidences else len(proposal.confidences))
    if not min_confidences:
        assert len(proposal.token_ids) == k
        return
    products = list(accumulate(proposal.confidences, mul))
    too_low = [i for i, least in enumerate(min_confidences) if i < len(products) and products[i] < least]
    end = too_low[0] + 1 if too_low else k
    assert len(proposal.token_ids) in {end, min(end + 1, k)}


@given(token_lists, st.integers(1, 100))
def test_a_position_beyond_the_cache_is_refused_with_its_length(token_ids: list[int], beyond: int) -> None:
    cache = SessionCache(MODEL)
    held = verify_in_one_go(cache, 0, token_ids, []).cached_len
    with pytest.raises(CacheTooShortError) as error:
        verify_in_one_go(cache, held + beyond, [1], [])
    assert error.value.metadata == {"cached_len": str(held)}
    assert cache.cached_len == held


def test_a_repeated_request_computes_only_the_last_token_again() -> None:
    cache = SessionCache(MODEL)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    first = verify_in_one_go(cache, 0, prompt, [])
    again = Driven(verify(cache, GREEDY, 0, prompt, [], chunk=Chunks(3)))
    again.step()  # the only one: there is no chunk to prefill
    assert again.result == first


def test_a_step_ahead_answers_the_next_request_without_a_wait_for_its_own() -> None:
    cache, prompt = SessionCache(MODEL), [1, 2, 3]
    verdict = verify_in_one_go(cache, 0, prompt, [], runs_ahead=True)
    session = [*prompt, verdict.next_token_id]
    assert (cache.cached_len, cache.num_fed) == (3, 5)
    answering = Driven(verify(cache, GREEDY, 3, session[3:], [], chunk=Chunks(3), runs_ahead=False))
    assert answering.has_ended  # it fed nothing
    assert answering.result.next_token_id == greedy_choices(session)[-1]
    assert (cache.cached_len, cache.num_fed) == (4, 5)


def test_a_request_that_was_dropped_leaves_the_steps_ahead_to_its_repetition() -> None:
    cache, session = SessionCache(MODEL), [1, 2, 3]
    for _ in range(3):
        verdict = verify_in_one_go(cache, cache.cached_len, session[cache.cached_len :], [], runs_ahead=True)
        session.append(verdict.next_token_id)
        dropped = verify(cache, GREEDY, len(session) - 1, session[-1:], [], chunk=Chunks(3), runs_ahead=True)
        assert isinstance(dropped.send(None), Evaluate)
        dropped.close()
    assert session == [1, 2, 3, *greedy_continuation([1, 2, 3], 3)]


@given(st.data())
def test_steps_ahead_choose_as_steps_in_time(data: st.DataObject) -> None:
    """With noise, penalties and log-probabilities, which need the tokens before."""
    sampling = Sampling(
        temperature=data.draw(st.sampled_from([0.0, 1.0])),
        seed=5,
        repetition_penalty=1.3,
        penalty_context_size=data.draw(st.sampled_from([2, 20])),
        top_log_probabilities=2,
    )
    ahead, plain = SessionCache(MODEL), SessionCache(MODEL)
    samplers = [Sampler(sampling, TINY_VOCABULARY_SIZE) for _ in range(2)]
    position, token_ids = 0, data.draw(token_lists)
    for _ in range(data.draw(st.integers(1, 8))):
        proposal = data.draw(st.one_of(st.just([]), st.lists(st.integers(0, TINY_VOCABULARY_SIZE - 1), max_size=3)))
        verdicts = [
            finish(verify(cache, sampler, position, token_ids, proposal, chunk=Chunks(3), runs_ahead=cache is ahead))
            for cache, sampler in zip((ahead, plain), samplers, strict=True)
        ]
        assert verdicts[0].next_token_id == verdicts[1].next_token_id
        assert verdicts[0].num_accepted == verdicts[1].num_accepted
        for own, other in zip(*(each.log_probabilities for each in verdicts), strict=True):
            assert (own.model, own.sampling) == pytest.approx((other.model, other.sampling), abs=1e-4)
        position, token_ids = (position + len(token_ids) + verdicts[0].num_accepted, [verdicts[0].next_token_id])


def test_a_freed_cache_holds_nothing() -> None:
    cache = SessionCache(MODEL)
    verify_in_one_go(cache, 0, [1, 2, 3], [])
    cache.free()
    assert cache.cached_len == cache.num_fed == 0


SAMPLINGS = [
    Sampling(top_log_probabilities=2),
    Sampling(temperature=1.0, seed=3, repetition_penalty=1.3, top_log_probabilities=2),
    Sampling(temperature=1.0, seed=4, acceptance=Acceptance.REJECTION, top_log_probabilities=2),
]


@given(st.data())
def test_padding_changes_no_verdict_of_any_request(data: st.DataObject) -> None:
    """For any continuation of the proposal: the verdict, the commit, and the following rounds."""
    sampling = data.draw(st.sampled_from(SAMPLINGS))
    padded, plain = SessionCache(MODEL), SessionCache(MODEL)
    samplers = {id(cache): Sampler(sampling, TINY_VOCABULARY_SIZE) for cache in (padded, plain)}
    for _ in range(data.draw(st.integers(1, 6))):
        position = data.draw(st.integers(0, plain.cached_len))
        token_ids = data.draw(token_lists)
        proposal = data.draw(st.lists(st.integers(0, TINY_VOCABULARY_SIZE - 1), max_size=6))
        rows = np.full((len(proposal), TINY_VOCABULARY_SIZE), 1 / TINY_VOCABULARY_SIZE, np.float32)
        surplus = data.draw(st.integers(0, 12))
        verdicts = [
            finish(verify(cache, samplers[id(cache)], position, token_ids, proposal, rows, chunk=Chunks(3), pad=pad))
            for cache, pad in ((padded, surplus.__add__), (plain, int))
        ]
        assert tokens_of(verdicts[0]) == tokens_of(verdicts[1])
        # The tiny model's large weights magnify rounding, which goes by the width: 1.5e-4 has been seen.
        assert margins_of(verdicts[0]) == pytest.approx(margins_of(verdicts[1]), abs=1e-2)
        for with_padding, without in zip(*(verdict.log_probabilities for verdict in verdicts), strict=True):
            assert (with_padding.model, with_padding.sampling) == pytest.approx(
                (without.model, without.sampling), abs=1e-2
            )
        assert padded.token_ids == plain.token_ids
        assert padded.num_fed == plain.num_fed + surplus
        assert padded.cached_len == plain.num_fed


def tokens_of(verdict: Verification) -> Verification:
    """Return a verdict without the figures that differ by rounding between passes of different widths."""
    return replace(verdict, log_probabilities=[], prompt_log_probabilities=[], margins=[])


def margins_of(verdict: Verification) -> list[float]:
    return [margin.value for margin in verdict.margins]


@given(data=st.data())
def test_log_probabilities_of_a_prompt_are_those_of_one_pass(data: st.DataObject) -> None:
    """A cached prefix is not used: all tokens are computed, and verdict and cache equal those without it."""
    sampling = data.draw(st.sampled_from(SAMPLINGS))
    prompt, before = data.draw(token_lists), data.draw(token_lists)
    proposal = data.draw(st.lists(st.integers(0, TINY_VOCABULARY_SIZE - 1), max_size=6))
    rows = np.full((len(proposal), TINY_VOCABULARY_SIZE), 1 / TINY_VOCABULARY_SIZE, np.float32)
    prefixes = PrefixCache(10**7)
    ended = SessionCache(MODEL, prefixes)
    sampler = Sampler(sampling, TINY_VOCABULARY_SIZE)
    finish(verify(ended, sampler, 0, [*prompt, *before], [], chunk=Chunks(3)))
    ended.keep()

    scoring, plain = SessionCache(MODEL, prefixes), SessionCache(MODEL)
    asking = Sampler(replace(sampling, prompt_log_probabilities=True), TINY_VOCABULARY_SIZE)
    if data.draw(st.booleans()):  # a first request that was late and is sent again
        run_some(verify(scoring, asking, 0, prompt, proposal, rows, chunk=Chunks(3)), data.draw(st.integers(0, 3)))
    verdict = finish(verify(scoring, asking, 0, prompt, proposal, rows, chunk=Chunks(3)))
    expected = finish(verify(plain, sampler, 0, prompt, proposal, rows, chunk=Chunks(3)))
    assert tokens_of(verdict) == tokens_of(expected)
    assert margins_of(verdict) == pytest.approx(margins_of(expected), abs=1e-2)
    assert scoring.token_ids == plain.token_ids
    assert expected.prompt_log_probabilities == []

    logits = np.array(MODEL.network(mx.array([prompt]))[0].astype(mx.float32), np.float64)[:-1]
    of_model = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert len(verdict.prompt_log_probabilities) == len(prompt) - 1
    for row, token_id, values in zip(of_model, prompt[1:], verdict.prompt_log_probabilities, strict=True):
        assert values.model == pytest.approx(row[token_id], abs=1e-2)
        assert [each.log_probability for each in values.top_model] == pytest.approx(np.sort(row)[:-3:-1], abs=1e-2)
        assert not values.top_sampling

    # Only of a session's first request.
    token_ids = [*prompt, *proposal[: verdict.num_accepted], verdict.next_token_id]
    later = finish(verify(scoring, asking, len(prompt), token_ids[len(prompt) :], [], chunk=Chunks(3)))
    assert later.prompt_log_probabilities == []


def test_a_padded_verify_takes_one_step_and_feeds_as_many_tokens_as_it_is_told() -> None:
    cache = SessionCache(MODEL)
    asked: list[int] = []

    def pad(width: int) -> int:
        asked.append(width)
        return 8

    step = Driven(verify(cache, GREEDY, 0, [1, 2], [3, 4, 5], chunk=Chunks(3), pad=pad))
    step.step()
    assert step.has_ended
    assert (asked, cache.cached_len, cache.num_fed) == ([5], 5, 8)


def test_padding_is_not_kept_for_other_sessions() -> None:
    prefixes = PrefixCache(10**6)
    cache = SessionCache(MODEL, prefixes)
    finish(verify(cache, GREEDY, 0, [1, 2, 3, 4], [], chunk=Chunks(3), pad=lambda width: width + 9))
    cache.keep()
    layers = prefixes.take([1, 2, 3, 4, 0, 0, 0])
    assert layers is not None
    assert layers.num_fed == layers.caches[0].offset == 4


@given(prompt=token_lists, data=st.data())
def test_what_was_only_proposed_is_not_kept(prompt: list[int], data: st.DataObject) -> None:
    """Sessions of the same text leave one entry, with any proposals and any ends."""
    text = [*prompt, *greedy_continuation(prompt, 18)]  # more than three rounds accept
    of_target, of_draft = PrefixCache(10**7), PrefixCache(10**7)
    for _ in range(data.draw(st.integers(1, 3))):
        cache, draft_cache = SessionCache(MODEL, of_target), SessionCache(MODEL, of_draft)
        position, known = 0, len(prompt)
        for _ in range(data.draw(st.integers(1, 3))):
            right = text[known : known + data.draw(st.integers(0, 2))]
            wrong = data.draw(st.lists(st.integers(0, TINY_VOCABULARY_SIZE - 1), max_size=3))
            propose_in_one_go(draft_cache, min(position, draft_cache.cached_len), text[position:known], 3)
            verdict = verify_in_one_go(cache, position, text[position:known], [*right, *wrong])
            position = known
            known += verdict.num_accepted + 1
            if known >= len(text):
                break
        cache.keep()
        draft_cache.keep()
    for prefixes in (of_target, of_draft):
        (entry,) = prefixes._entries
        assert list(entry.key[1:]) == text[: entry.num_tokens]


def test_layers_that_cannot_go_back_to_what_is_known_keep_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As snapshots of each pass do after a long proposal: they would have to forget everything."""
    prefixes = PrefixCache(10**7)
    cache = SessionCache(MODEL, prefixes)
    drafted = propose_in_one_go(cache, 0, [1, 2, 3], 8)
    monkeypatch.setattr(SessionLayers, "can_serve", lambda self, position: position if position == self.num_fed else 0)
    cache.keep()
    assert [entry.key[1:] for entry in prefixes._entries] == [(1, 2, 3, *drafted.token_ids[:-1])]


def test_a_session_that_holds_nothing_leaves_nothing() -> None:
    prefixes = PrefixCache(10**7)
    SessionCache(MODEL, prefixes).keep()
    assert prefixes.num_entries == 0
