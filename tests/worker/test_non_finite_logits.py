"""Logits that are not numbers are an error, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from specd.sampling import (
    Acceptance,
    Sampling,
)
from specd.worker.model.loader import LoadedModel
from specd.worker.sampling.sampler import NonFiniteLogitsError, Sampler
from specd.worker.session.proposal import propose
from specd.worker.session.session_cache import SessionCache
from target_worker.verification import verify
from tests.worker.driving import Chunks, finish
from tests.worker.models import TINY_VOCABULARY_SIZE
from tests.worker.test_sampling import PROMPT, TARGET, decode_alone, verify_in_one_go

pytestmark = pytest.mark.usefixtures("small_last_pass")


class Poisoned(nn.Module):
    """A network that fails after the token at one position: in a logit, or in its caches."""

    def __init__(self, network: Any, position: int, value: float, *, in_cache: bool = False) -> None:
        super().__init__()
        self.network = network
        self.layers = network.layers
        self._position, self._value, self._in_cache = position, value, in_cache

    def __call__(self, token_ids: mx.array, cache: list[Any]) -> mx.array:
        row = self._position - cache[0].offset
        logits = self.network(token_ids, cache=cache)
        if 0 <= row < token_ids.shape[1]:
            if self._in_cache:
                cache[0].values[..., self._position, 0] = self._value
            else:
                logits[0, row, 5] = self._value
        return logits


def poisoned(position: int, value: float, *, in_cache: bool = False) -> LoadedModel:
    return replace(TARGET, network=Poisoned(TARGET.network, position, value, in_cache=in_cache))


LAST = len(PROMPT) - 1
NOT_FINITE = [float("nan"), float("inf"), float("-inf")]


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("acceptance", Acceptance)
@pytest.mark.parametrize(
    ("position", "in_cache"),
    [(2, True), (LAST, False), (LAST + 2, False), (LAST + 4, False)],
    ids=["prefill", "first row", "middle row", "last row"],
)
def test_logits_that_are_not_finite_are_an_error(
    position: int, in_cache: bool, acceptance: Acceptance, temperature: float, value: float
) -> None:
    sampler = Sampler(Sampling(temperature=temperature, acceptance=acceptance, top_k=6), TINY_VOCABULARY_SIZE)
    cache = SessionCache(poisoned(position, value, in_cache=in_cache))
    rows = np.full((4, TINY_VOCABULARY_SIZE), 1 / TINY_VOCABULARY_SIZE, np.float32)
    with pytest.raises(NonFiniteLogitsError):
        finish(verify(cache, sampler, 0, PROMPT, [1, 2, 3, 4], rows, chunk=Chunks(3)))
    cache = SessionCache(poisoned(position, value, in_cache=in_cache))
    with pytest.raises(NonFiniteLogitsError):
        finish(propose(cache, sampler, 0, PROMPT, 5, chunk=Chunks(3)))


@pytest.mark.parametrize(
    "run",
    [
        lambda cache, sampler: verify(cache, sampler, 0, PROMPT, [1, 2], chunk=Chunks(3)),
        lambda cache, sampler: propose(cache, sampler, 0, PROMPT, 3, chunk=Chunks(3)),
    ],
    ids=["verify", "propose"],
)
def test_a_cache_survives_logits_that_are_not_finite(run: Callable[..., Any]) -> None:
    """The next request can still rewind: what was fed is not committed."""
    sampler = Sampler(Sampling(temperature=1.0), TINY_VOCABULARY_SIZE)
    cache = SessionCache(poisoned(LAST, float("nan")))
    with pytest.raises(NonFiniteLogitsError):
        finish(run(cache, sampler))
    assert cache.cached_len <= LAST
    shorter = PROMPT[:-2]
    assert verify_in_one_go(cache, sampler, 0, shorter).next_token_id == decode_alone(sampler.sampling, shorter, 1)[0]
