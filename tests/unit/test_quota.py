"""Quotas of clients: their average use per minute equals the quota."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.sessions.quota import Quotas
from coordinator.sessions.request import resolve_max_tokens
from specd.caller import CallerLimits
from specd.errors import InvalidRequestError, ResourceExhaustedError
from specd.model_info import ModelInfo
from tests.unit.crowd import Clock

LIMITS = CallerLimits(tokens_per_minute=60)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@given(st.lists(st.tuples(st.integers(1, 100), st.floats(0, 120)), max_size=40))
def test_a_client_uses_no_more_than_it_may_but_for_the_last_request(uses: list[tuple[int, float]]) -> None:
    clock = Clock()
    quotas = Quotas(clock)
    began_at, used = clock.now, 0
    for num_tokens, pause in uses:
        clock.now += pause
        try:
            quotas.check("a", LIMITS)
        except ResourceExhaustedError as error:
            assert used >= 60
            clock.now += error.retry_after_seconds + 1e-3
            quotas.check("a", LIMITS)  # as it was told
        assert used <= 60 + (clock.now - began_at) * 1.001
        quotas.count("a", LIMITS, num_tokens)
        used += num_tokens


def test_one_clients_use_is_nothing_to_another(clock: Clock) -> None:
    quotas = Quotas(clock)
    quotas.count("a", LIMITS, 100)
    with pytest.raises(ResourceExhaustedError, match="60 tokens per minute") as error:
        quotas.check("a", LIMITS)
    assert error.value.reason == "CLIENT_TOKENS"
    assert error.value.retry_after_seconds == pytest.approx(41)
    quotas.check("b", LIMITS)
    quotas.check("a", CallerLimits())


def test_what_is_not_used_is_not_saved_beyond_a_minute(clock: Clock) -> None:
    quotas = Quotas(clock)
    quotas.check("a", LIMITS)
    clock.now += 3600
    quotas.count("a", LIMITS, 60)
    with pytest.raises(ResourceExhaustedError):
        quotas.check("a", LIMITS)


def test_a_request_asks_for_no_more_tokens_than_its_client_may_generate() -> None:
    model = ModelInfo("m", "llama", "", "", 8192, 2048, (0,), "float32", "cpu")
    assert resolve_max_tokens(model, 5, None, limit=10) == 10
    assert resolve_max_tokens(model, 5, 10, limit=10) == 10
    assert resolve_max_tokens(model, 5, None, limit=1000) == 256
    assert resolve_max_tokens(model, 2045, None, limit=10) == 3
    with pytest.raises(InvalidRequestError, match="max_tokens is 11: this client may generate at most 10") as error:
        resolve_max_tokens(model, 5, 11, limit=10)
    assert error.value.reason == "OUT_OF_RANGE"
