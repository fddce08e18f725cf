"""Sessions that are computed together: each gets the same logits as alone, for any sessions in a pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx import nn
from mlx_lm.models import ministral3
from mlx_lm.models.cache import make_prompt_cache

from specd.sampling import Sampling
from specd.worker.cpu import openblas, streams
from specd.worker.cpu.streams import STREAMS, even_parts, share_out
from specd.worker.engine import forward as forward_module
from specd.worker.engine.forward import BareCache, agree, enable_batches, forward, trial_logits
from specd.worker.engine.jobs import Feed, Steps
from specd.worker.layers.session_layers import SessionLayers
from specd.worker.sampling.sampler import Sampler
from specd.worker.session import session_cache
from specd.worker.session.proposal import propose
from specd.worker.session.session_cache import SessionCache
from target_worker.verification import Verification, verify
from tests.worker.driving import Chunks, Driven, finish
from tests.worker.models import FAMILIES, TINY_VOCABULARY_SIZE, WINDOW, small_network, tiny_model

MODEL = tiny_model()
CHUNK = Chunks(5)

token_ids = st.integers(0, TINY_VOCABULARY_SIZE - 1)
token_lists = st.lists(token_ids, min_size=1, max_size=24)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    seed=st.integers(0, 2**64 - 1),
    top_k=st.sampled_from([0, 5]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
)


@dataclass
class Session:
    """A session's cache and what it asks for, again and again."""

    cache: SessionCache
    sampler: Sampler
    token_ids: list[int]

    def ask(self, data: st.DataObject) -> Steps[Any]:
        position = data.draw(st.integers(0, min(self.cache.cached_len, len(self.token_ids) - 1)))
        own = self.token_ids[position:]
        if data.draw(st.booleans()):
            k = data.draw(st.integers(0, 5))
            return propose(self.cache, self.sampler, position, own, k, chunk=CHUNK)
        proposal = data.draw(st.lists(token_ids, max_size=5))
        return verify(self.cache, self.sampler, position, own, proposal, chunk=CHUNK)


@pytest.fixture(autouse=True, scope="module")
def small_last_pass() -> Any:
    """Make even short requests take several steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session_cache, "MAX_PENDING", 2)
        yield


@settings(max_examples=150)
@given(st.data())
def test_each_session_gets_what_it_gets_alone(data: st.DataObject) -> None:
    """Sessions that come, continue, are dropped and rewind in any order, any of them in the same pass."""
    num_sessions = data.draw(st.integers(1, 5))
    prompts = [data.draw(token_lists) for _ in range(num_sessions)]
    samplers = [data.draw(samplings) for _ in range(num_sessions)]
    together, alone = (
        [
            Session(SessionCache(MODEL), Sampler(sampling, TINY_VOCABULARY_SIZE), list(prompt))
            for prompt, sampling in zip(prompts, samplers, strict=True)
        ]
        for _ in range(2)
    )
    running: dict[int, tuple[Driven, Any]] = {}
    for _ in range(data.draw(st.integers(1, 20))):
        chosen = data.draw(st.lists(st.integers(0, num_sessions - 1), min_size=1, unique=True))
        for i in chosen:
            if i not in running:
                # The same request twice: drawn for the one, taken over for the other.
                steps = together[i].ask(cast(Any, recorder := Recorder(data)))
                expected = finish(alone[i].ask(cast(Any, Player(recorder.drawn))))
                running[i] = Driven(steps), expected
        Driven.step_together([running[i][0] for i in chosen])
        for i in chosen:
            driven, expected = running[i]
            if driven.has_ended:
                check_same(driven.result, expected)
                assert together[i].cache.token_ids == alone[i].cache.token_ids
                del running[i]
                together[i].token_ids.append(data.draw(token_ids))
                alone[i].token_ids.append(together[i].token_ids[-1])


def check_same(result: Any, expected: Any) -> None:
    """Check that two results are the same, up to rounding in the margins of a verification."""
    if isinstance(result, Verification):
        for own, other in zip(result.margins, expected.margins, strict=True):
            assert own.value == pytest.approx(other.value, abs=1e-3)
        result, expected = replace(result, margins=[]), replace(expected, margins=[])
    assert result == expected


class Recorder:
    """Draws, and remembers what."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data
        self.drawn: list[Any] = []

    def draw(self, strategy: st.SearchStrategy[Any]) -> Any:
        self.drawn.append(self._data.draw(strategy))
        return self.drawn[-1]


class Player:
    """Gives out what was drawn before."""

    def __init__(self, drawn: list[Any]) -> None:
        self._drawn = iter(drawn)

    def draw(self, strategy: st.SearchStrategy[Any]) -> Any:
        return next(self._drawn)


@given(st.lists(st.tuples(token_lists, st.lists(token_ids, min_size=1, max_size=6)), min_size=2, max_size=6))
@settings(max_examples=50)
def test_sessions_that_are_shared_out_get_the_same_bits(sessions: list[tuple[list[int], list[int]]]) -> None:
    def logits(*, is_shared: bool) -> list[np.ndarray[Any, Any]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(openblas, "keeps_to_one_thread", lambda: is_shared)
            patch.setattr(streams, "_WEIGHTS_FOR_ALL_STREAMS", 0)
            patch.setattr(STREAMS, "all", (3 * STREAMS.all)[:3])
            patch.setattr(streams, "share_out", count := Count(share_out))
            caches = [SessionCache(MODEL) for _ in sessions]
            for cache, (context, _) in zip(caches, sessions, strict=True):
                finish(cache.feed(mx.array(context)))
            outputs = forward([Feed(c, mx.array(tokens)) for c, (_, tokens) in zip(caches, sessions, strict=True)])
            assert (count.most > 1) is is_shared
            return [np.array(rows) for rows in outputs]

    for shared, alone in zip(logits(is_shared=True), logits(is_shared=False), strict=True):
        np.testing.assert_array_equal(shared, alone)


class Count:
    """Shares out, and remembers among how many at most."""

    def __init__(self, share_out: Any) -> None:
        self.most = 0
        self._share_out = share_out

    def __call__(self, computations: Any) -> Any:
        self.most = max(self.most, len(computations))
        return self._share_out(computations)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=12), st.integers(1, 4))
def test_parts_are_all_there_in_order_and_even(weights: list[int], num_streams: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(STREAMS, "all", (4 * STREAMS.all)[:num_streams])
        parts = even_parts(weights)
    assert [i for part in parts for i in range(len(weights))[part]] == [*range(len(weights))]
    assert 1 <= len(parts) <= num_streams
    assert all(part.start < part.stop for part in parts)
    # No part is off by more than the largest thing.
    assert max(sum(weights[part]) for part in parts) <= sum(weights) / num_streams + max(weights)


@given(st.lists(st.lists(token_ids, min_size=1, max_size=6), min_size=1, max_size=6), st.lists(token_lists, min_size=6))
def test_logits_are_those_of_each_session_alone(tokens_of: list[list[int]], contexts: list[list[int]]) -> None:
    caches = [SessionCache(MODEL) for _ in tokens_of]
    for cache, context in zip(caches, contexts, strict=False):
        finish(cache.feed(mx.array(context)))
    outputs = forward([Feed(cache, mx.array(tokens)) for cache, tokens in zip(caches, tokens_of, strict=True)])
    for tokens, context, logits in zip(tokens_of, contexts, outputs, strict=False):
        expected, one_by_one = logits_of_mlx_lm(context, tokens)
        # Logits of about 10. Some inputs are ill-conditioned: there mlx-lm's own logits depend on the width of a call.
        atol = 1e-3 + 2 * float(np.abs(expected - one_by_one).max())
        np.testing.assert_allclose(np.array(logits), expected, atol=atol)


def logits_of_mlx_lm(context: list[int], tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits of the tokens after the context from one pass, and from a pass for each."""
    whole = [*context, *tokens]
    cache = make_prompt_cache(MODEL.network)
    one_by_one = [np.array(MODEL.network(mx.array([[token]]), cache=cache))[0, 0] for token in whole]
    return np.array(MODEL.network(mx.array([whole])))[0, len(context) :], np.stack(one_by_one[len(context) :])


@pytest.mark.parametrize("name", FAMILIES)
def test_which_models_of_mlx_lm_are_computed_together(name: str) -> None:
    """Gemma 2 has an attention of its own: it is called for each session."""
    assert enable_batches(small_network(name))


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=15)
@given(st.data())
def test_models_of_mlx_lm_give_each_session_its_logits_alone(name: str, data: st.DataObject) -> None:
    """Contexts shorter and longer than windows, passes of any widths, rewinds, and any sessions in a pass."""
    network = small_network(name, weight_factor=3.0)
    batches = enable_batches(network)
    num_sessions = data.draw(st.integers(2, 4))
    together, alone = (
        [BareCache(network, SessionLayers(network), batches) for _ in range(num_sessions)] for _ in range(2)
    )
    for _ in range(data.draw(st.integers(2, 5))):
        chosen = data.draw(st.lists(st.integers(0, num_sessions - 1), min_size=1, unique=True))
        widths = st.one_of(st.integers(1, 5), st.integers(WINDOW - 1, WINDOW + 3))
        tokens = [data.draw(widths.flatmap(lambda n: st.lists(token_ids, min_size=n, max_size=n))) for _ in chosen]
        outputs = forward([Feed(together[i], mx.array(ids)) for i, ids in zip(chosen, tokens, strict=True)])
        for i, ids, logits in zip(chosen, tokens, outputs, strict=True):
            (expected,) = forward([Feed(alone[i], mx.array(ids))])
            np.testing.assert_allclose(np.array(logits), np.array(expected), atol=1e-4 * float(mx.abs(expected).max()))
            position = data.draw(st.integers(0, alone[i].layers.num_fed))
            for caches in (together, alone):
                assert caches[i].layers.rewind(position) == position


def test_the_trial_sees_that_a_model_keeps_the_masks_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """With any windows: attention refuses to guess."""
    network = small_network("mistral3")
    monkeypatch.setattr(ministral3, "create_attention_mask", lambda *_, **__: None)
    assert not enable_batches(network)


def test_the_trial_sees_small_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    network = small_network("llama", weight_factor=3.0)
    expected = trial_logits(network, batches=False)
    for layer in network.layers:
        monkeypatch.setattr(layer.self_attn, "rope", LongerInBatches(layer.self_attn.rope))
    with monkeypatch.context() as rows_only:
        rows_only.setattr(forward_module, "watch_cache_users", lambda *_, **__: None)
        assert not enable_batches(network)
        difference = mx.max(mx.abs(trial_logits(network, batches=True) - expected)) / mx.max(mx.abs(expected))
        assert float(np.array(difference)) < 0.1
    assert enable_batches(network)  # with one session in each call, there is one offset
    assert agree(trial_logits(network, batches=True), expected)


class LongerInBatches(nn.Module):
    """A RoPE that lengthens what it rotates by 1 %, but only if it has an offset for each row."""

    def __init__(self, plain: nn.RoPE) -> None:
        super().__init__()
        self.plain = plain

    def __call__(self, x: mx.array, offset: Any) -> mx.array:
        rotated: mx.array = self.plain(x, offset)
        return 1.01 * rotated if isinstance(offset, mx.array) else rotated
