"""The masks of a session's requests, each of which continues behind the tokens that the last one accepted."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from random import Random

import mlx.core as mx
import pytest

from specd.errors import InvalidRequestError
from specd.grammar import Grammar, SessionGrammar
from specd.matching.matcher import SessionMatcher
from specd.sampling import Sampling
from specd.worker.sampling.margin import choice_margins
from specd.worker.session.grammar_masks import GrammarMasks, SessionMasks
from tests.unit.test_session_matcher import tokenizer, vocabulary
from tests.worker.test_self_draft import Caller, serving

PROMPT = [7, 8, 9]
TEXT = tokenizer().encode("abcabcabc", add_special_tokens=False)
GRAMMAR = SessionGrammar(Grammar.regex("(abc)*"), len(PROMPT))


@pytest.mark.parametrize("num_accepted", range(len(TEXT)))
def test_a_request_continues_behind_any_number_of_accepted_tokens(num_accepted: int) -> None:
    with ThreadPoolExecutor(1) as threads:
        masks = SessionMasks(threads, vocabulary().size, lambda: SessionMatcher(vocabulary(), GRAMMAR))
        masks.start(0, PROMPT, TEXT[:-1])()
        position = len(PROMPT) + num_accepted
        continued = masks.start(position, [TEXT[num_accepted]], [])()
        fresh = SessionMasks(threads, vocabulary().size, lambda: SessionMatcher(vocabulary(), GRAMMAR))
        expected = fresh.start(0, [*PROMPT, *TEXT[: num_accepted + 1]], [])()
    assert continued is not None
    assert expected is not None
    assert mx.array_equal(continued, expected).item()


async def test_a_grammar_that_takes_long_to_compile_holds_up_no_other_session(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, released = threading.Event(), threading.Event()

    def compile_slowly() -> SessionMatcher:
        begun.set()
        assert released.wait(60)
        raise InvalidRequestError("BAD_GRAMMAR", "it cannot be kept")

    def begin(masks: GrammarMasks, _: SessionGrammar) -> SessionMasks:
        return SessionMasks(masks._threads, masks._model.info.vocabulary_size, compile_slowly)

    monkeypatch.setattr(GrammarMasks, "begin", begin)
    async with serving(None) as service:
        slow = Caller(service, Sampling(grammar=GRAMMAR), Random(0), [5, 3, 1])
        waiting = asyncio.ensure_future(slow.decode(3, ks=(0,), is_erratic=False))
        assert await asyncio.to_thread(begun.wait, 60)
        await asyncio.sleep(0.1)
        async with asyncio.timeout(30):
            await Caller(service, Sampling(), Random(0), [5, 3, 1]).decode(3, ks=(0,), is_erratic=False)
        released.set()
        done, _ = await asyncio.wait({waiting}, timeout=1)
        assert not done, "the call has ended with an error, which this caller does not read"
        waiting.cancel()


def test_no_mask_waits_for_a_grammar_that_is_compiled() -> None:
    released = threading.Event()

    def compile_slowly() -> SessionMatcher:
        assert released.wait(60)
        return SessionMatcher(vocabulary(), GRAMMAR)

    with ThreadPoolExecutor(1) as threads:
        masks = SessionMasks(threads, vocabulary().size, lambda: SessionMatcher(vocabulary(), GRAMMAR))
        masks.start(0, PROMPT, [])()
        slow = SessionMasks(threads, vocabulary().size, compile_slowly).start(0, PROMPT, [])
        continued = masks.start(len(PROMPT), TEXT[:1], [])
        assert masks._latest is not None
        masks._latest.result(timeout=30)
        assert continued() is not None
        released.set()
        assert slow() is not None


@pytest.mark.parametrize("nothing", [float("nan"), -float("inf")])
def test_a_place_without_a_possible_token_has_the_margin_0(nothing: float) -> None:
    scores = mx.array([[nothing] * 4, [1.0, 3.0, -float("inf"), 2.5]])
    chosen = mx.array([0, 1])
    assert choice_margins(Sampling(), scores, scores, None, chosen, None).tolist() == [0, 0.5]
    assert choice_margins(Sampling(), scores, scores, mx.zeros((2, 4)), chosen, None).tolist() == [0, 0.5]
