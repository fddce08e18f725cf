"""A pass that fails, in whose rows other sessions only rest: all can be fed again, and none computes wrong tokens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from specd.errors import CacheTooShortError
from specd.sampling import Sampling
from specd.worker.engine import scheduler, shared_rows
from specd.worker.engine.engine import Engine
from specd.worker.engine.forward import compute
from specd.worker.engine.jobs import Encode, Feed, Steps
from specd.worker.engine.shared_rows import Sharing
from specd.worker.engine.static_step import MOST_TOKENS, StaticStep
from specd.worker.sampling.sampler import Sampler
from specd.worker.session.prefix_cache import PrefixCache
from specd.worker.session.session_cache import SessionCache, free_on_error
from target_worker.verification import Verification, verify
from tests.worker.driving import Chunks
from tests.worker.fake_model import held_up
from tests.worker.models import TINY_VOCABULARY_SIZE, tiny_model
from tests.worker.whole_buffers import whole_buffers

MODEL = tiny_model()
GREEDY = Sampler(Sampling(), TINY_VOCABULARY_SIZE)
NUM_SESSIONS = 5


class PassError(Exception):
    """A failed pass."""


class FailingDevice:
    """Computes, and fails when it is told to: while a shared pass is described, or evaluated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails: str | None = None
        self.stepping: list[Any] = []  # the buffers that the running step has written to
        run, evaluate = StaticStep.run, mx.eval

        def failing_run(static: StaticStep, tokens: Any, offsets: Any, rows: list[Any], *args: Any) -> Any:
            result = run(static, tokens, offsets, rows, *args)
            if self.fails == "described":
                rows[:] = [(mx.nan * keys, mx.nan * values) for keys, values in rows]
                self._fail()
            return result

        def failing_eval(*arrays: Any) -> None:
            if self.fails == "evaluated" and self.stepping:
                self._fail()
            evaluate(*arrays)

        monkeypatch.setattr(StaticStep, "run", failing_run)
        monkeypatch.setattr(mx, "eval", failing_eval)

    def compute(self, wanted: Sequence[Feed | Encode], *, owns_all_cores: bool) -> Sequence[Any]:
        self.stepping = []
        outputs = compute(wanted, owns_all_cores=owns_all_cores)
        self.stepping = [shared for feed in wanted if (shared := feed.cache.layers.shared)]  # type: ignore[union-attr]
        return outputs

    def _fail(self) -> None:
        self.fails = None
        for shared in self.stepping:  # a failed pass can leave anything
            shared._rows = [(mx.nan * keys, mx.nan * values) for keys, values in shared._rows]
        raise PassError


def next_token(network: Any, tokens: Sequence[int]) -> int:
    return int(np.array(mx.argmax(network(mx.array([tokens]))[0, -1])))


@pytest.mark.parametrize("seed", range(8))
async def test_sessions_get_their_own_texts_or_are_asked_for_their_tokens(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sessions that are asked send all tokens to a new stream, as the coordinator does; they fail at most once."""
    monkeypatch.setattr(KVCache, "step", 4)
    monkeypatch.setattr(shared_rows, "_SHORTEST", MOST_TOKENS + 16)
    monkeypatch.setattr(scheduler, "MAX_STEP_TOKENS", 8)  # so that sessions wait while a pass fails
    draw = random.Random(seed)
    num_resting = num_failed = 0
    with whole_buffers(MODEL.network) as network:
        static = StaticStep(network, 10**6, 1)
        sharing = Sharing(static, 10**9)
        model = replace(MODEL, static=static, sharing=sharing)
        device = FailingDevice(monkeypatch)
        engine, prefixes = Engine(mx.clear_streams, compute=device.compute), PrefixCache(10**9)

        def begin(i: int) -> None:
            caches[i], cached[i] = SessionCache(model, prefixes), 0

        def end(cache: SessionCache) -> Steps[None]:
            cache.keep()
            return
            yield

        def request(i: int, proposal: Sequence[int] = ()) -> asyncio.Future[Any]:
            cache, position = caches[i], cached[i]
            steps = verify(cache, GREEDY, position, sessions[i][position:], proposal, chunk=Chunks(3))
            return engine.submit(free_on_error(cache, steps))

        sessions = [[draw.randrange(TINY_VOCABULARY_SIZE) for _ in range(3)] for _ in range(NUM_SESSIONS)]
        cached = [0] * NUM_SESSIONS
        caches: dict[int, SessionCache] = {}
        for i in range(NUM_SESSIONS):
            begin(i)
        for _ in range(80):
            device.fails = draw.choice([None, "described", "evaluated"])
            asking = draw.sample(range(NUM_SESSIONS), draw.randint(1, NUM_SESSIONS))
            while asking:
                async with held_up(engine):
                    jobs = [request(i, [0] * draw.randrange(3)) for i in asking]
                outcomes = await asyncio.gather(*jobs, return_exceptions=True)
                again = []
                for i, outcome in zip(asking, outcomes, strict=True):
                    if isinstance(outcome, BaseException):
                        assert isinstance(outcome, (PassError, CacheTooShortError))
                        num_failed += isinstance(outcome, PassError)
                        num_resting += isinstance(outcome, CacheTooShortError)
                        await engine.submit(end(caches[i]))
                        begin(i)
                        again.append(i)
                        continue
                    verdict: Verification = outcome.result
                    accepted = [0] * verdict.num_accepted
                    cached[i] = len(sessions[i]) + len(accepted)
                    for token in [*accepted, verdict.next_token_id]:
                        assert token == next_token(network, sessions[i])
                        sessions[i].append(token)
                asking = again
        engine.stop()
    assert num_failed
    assert num_resting
