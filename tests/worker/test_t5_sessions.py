"""Sessions of T5s in a worker: what is read, superseded, kept and taken over computes what a fresh session does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specd.errors import InvalidRequestError
from specd.worker.engine.jobs import Encode
from specd.worker.model.loader import LoadedModel, load
from specd.worker.model.t5 import network
from specd.worker.session.prefix_cache import PrefixCache
from specd.worker.session.session_cache import SessionCache
from specd.worker.session.validation import check_source
from tests.worker.driving import Chunks, finish, run_some
from tests.worker.prefixes import MODEL as DECODER
from tests.worker.t5_models import save_t5

SOURCES = [(3, 4, 5), (3, 4, 5, 6), (7,), (8,) * 9]
CHUNK = Chunks(2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(save_t5(tmp_path_factory.mktemp("t5") / "model"), blas="")


def begin(model: LoadedModel, source: Sequence[int], prefixes: PrefixCache | None = None) -> SessionCache:
    cache = SessionCache(model, prefixes)
    cache.source = tuple(source)
    return cache


def logits_after(cache: SessionCache, position: int, tokens: Sequence[int]) -> mx.array:
    """Hold tokens, and return the logits after the last."""
    pending = finish(cache.prefill(position, tokens, CHUNK))
    logits = finish(cache.feed(mx.array(pending)))
    cache.commit(pending)
    return logits[-1]


def fresh(model: LoadedModel, source: Sequence[int], tokens: Sequence[int]) -> mx.array:
    return logits_after(begin(model, source), 0, tokens)


def same(logits: mx.array, expected: mx.array) -> bool:
    return bool(mx.allclose(logits, expected, atol=1e-4))


@pytest.mark.parametrize("most_weights", [2, 9, 2**20])
@pytest.mark.parametrize("num_steps", range(12))
def test_a_source_that_is_superseded_half_way_is_read_on(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, most_weights: int, num_steps: int
) -> None:
    monkeypatch.setattr(network, "_MOST_WEIGHTS", most_weights)
    source, tokens = SOURCES[1], [0, 9, 10]
    cache = begin(model, source)
    run_some(cache.prefill(0, tokens, CHUNK), num_steps)
    assert same(logits_after(cache, 0, tokens), fresh(model, source, tokens))


def test_a_long_source_is_read_in_many_steps(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_MOST_WEIGHTS", 9)
    steps = begin(model, SOURCES[3]).prefill(0, [0], CHUNK)
    part = next(steps)
    parts = 0
    while isinstance(part, Encode):
        parts += 1
        steps.send(part.describe())
        try:
            part = steps.send(None)
        except StopIteration:
            break
    assert parts == 2 * 9 + 2  # layers by tokens, the last norm, and the decoder's keys and values


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(SOURCES), st.lists(st.integers(2, 3), max_size=40).map(lambda rest: [0, *rest])),
        min_size=1,
        max_size=8,
    )
)
def test_sessions_take_over_only_what_answers_their_source(
    model: LoadedModel, sessions: list[tuple[tuple[int, ...], list[int]]]
) -> None:
    prefixes = PrefixCache(10**9)
    left: set[tuple[int, ...]] = set()
    for source, tokens in sessions:
        cache = begin(model, source, prefixes)
        assert same(logits_after(cache, 0, tokens), fresh(model, source, tokens))
        assert (cache.reused_len >= len(source)) == (source in left)
        back = len(tokens) // 2
        assert same(logits_after(cache, back, tokens[back:]), fresh(model, source, tokens))
        cache.keep()
        left.add(source)
    assert prefixes.nbytes == sum(entry.layers.nbytes for entry in prefixes._entries)


def test_what_a_session_takes_is_what_it_says(model: LoadedModel) -> None:
    for source in SOURCES:
        cache = begin(model, source)
        logits_after(cache, 0, [0, 1, 2])
        held = sum(array.nbytes for array in cache.layers.last_rows) * len(cache.layers.caches)
        assert held == model.cache_footprint.bytes_for(3, len(source))


def test_a_source_is_for_models_with_an_encoder(model: LoadedModel) -> None:
    check_source(model.info, [1])
    check_source(DECODER.info, [])
    for info, source, reason in (
        (DECODER.info, [1], "CONTRADICTION"),
        (model.info, [], "EMPTY_TOKEN_IDS"),
        (model.info, [10**6], "TOKEN_OUT_OF_VOCABULARY"),
    ):
        with pytest.raises(InvalidRequestError) as refused:
            check_source(info, source)
        assert refused.value.reason == reason


def test_where_answers_begin_comes_from_the_generation_config(tmp_path: Path) -> None:
    directory = Path(save_t5(tmp_path / "model", decoder_start_token_id=5))
    assert load(str(directory), blas="").info.decoder_start_token_id == 5
    (directory / "generation_config.json").write_text('{"decoder_start_token_id": 7}')
    assert load(str(directory), blas="").info.decoder_start_token_id == 7
