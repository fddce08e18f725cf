"""The prefix protocol on real models: any order of requests gives what a fresh cache gives."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_worker.proposal import Proposal, propose
from specd.errors import CacheTooShortError
from specd.sampling import Sampling
from specd.worker import session_cache
from specd.worker.sampler import Sampler
from specd.worker.session_cache import SessionCache
from target_worker.verification import Verdict, verify
from tests.driving import Chunks, Driven, finish, run_some
from tests.models import TINY_VOCABULARY_SIZE, tiny_model

MODEL = tiny_model()
GREEDY = Sampler(Sampling(), TINY_VOCABULARY_SIZE)

token_lists = st.lists(st.integers(0, TINY_VOCABULARY_SIZE - 1), min_size=1, max_size=12)


def greedy_choices(token_ids: Sequence[int]) -> list[int]:
    logits = MODEL.network(mx.array([token_ids]))
    return mx.argmax(logits[0], axis=-1).tolist()


def verify_in_one_go(cache: SessionCache, position: int, token_ids: list[int], proposal: list[int]) -> Verdict:
    return finish(verify(cache, GREEDY, position, token_ids, proposal, chunk=Chunks(3)))


def propose_in_one_go(cache: SessionCache, position: int, token_ids: list[int], k: int) -> Proposal:
    return finish(propose(cache, GREEDY, position, token_ids, k, chunk=Chunks(3)))


@pytest.fixture(autouse=True)
def small_last_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make even short requests take several steps."""
    monkeypatch.setattr(session_cache, "MAX_PENDING", 2)


@settings(deadline=None)
@given(st.data())
def test_any_order_of_requests_equals_a_fresh_cache(data: st.DataObject) -> None:
    cache = SessionCache(MODEL)
    for _ in range(data.draw(st.integers(1, 8))):
        position = data.draw(st.integers(0, cache.cached_len))
        prefix = cache.token_ids[:position]
        # Half of the time the tokens go on as the cache does, which is when it can reuse them.
        token_ids = data.draw(token_lists)
        if data.draw(st.booleans()) and position < cache.cached_len:
            token_ids = cache.token_ids[position : position + len(token_ids)]
        session = [*prefix, *token_ids]
        match data.draw(st.sampled_from(["verify", "propose", "superseded verify", "superseded propose"])):
            case "verify":
                proposal = data.draw(st.lists(st.integers(0, TINY_VOCABULARY_SIZE - 1), max_size=6))
                if data.draw(st.booleans()):  # a proposal that is right for a while
                    proposal = [*propose_in_one_go(SessionCache(MODEL), 0, session, 3).token_ids, *proposal][:6]
                verdict = verify_in_one_go(cache, position, token_ids, proposal)
                own = greedy_choices([*session, *proposal])[len(session) - 1 :]
                agreeing = [proposed == chosen for proposed, chosen in zip(proposal, own, strict=False)]
                assert verdict.num_accepted == [*agreeing, False].index(False)
                assert verdict.next_token_id == own[verdict.num_accepted]
                assert verdict.cached_len == cache.cached_len == len(session) + len(proposal)
            case "propose":
                k = data.draw(st.integers(1, 6))
                proposal = propose_in_one_go(cache, position, token_ids, k)
                expected = list(session)
                for _ in range(k):
                    expected.append(greedy_choices(expected)[-1])
                assert proposal.token_ids == expected[len(session) :]
                assert proposal.cached_len == cache.cached_len == len(session) + k - 1
            case "superseded verify":
                run_some(verify(cache, GREEDY, position, token_ids, [], chunk=Chunks(3)), data.draw(st.integers(0, 3)))
            case "superseded propose":
                run_some(propose(cache, GREEDY, position, token_ids, 4, chunk=Chunks(3)), data.draw(st.integers(0, 6)))


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


def test_a_freed_cache_holds_nothing() -> None:
    cache = SessionCache(MODEL)
    verify_in_one_go(cache, 0, [1, 2, 3], [])
    cache.free()
    assert cache.cached_len == cache.num_fed == 0
