"""A target worker that drafts itself: two models, one engine, two answers to a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import grpc
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.llama import Model
from prometheus_client import CollectorRegistry

from specd.cache_footprint import ALL_TOKENS, CacheFootprint
from specd.rpc.deferred import Deferred
from specd.rpc.messages import to_distribution, to_session_sampling
from specd.sampling import Acceptance, Sampling, certain
from specd.step_costs import StepCosts
from specd.v1.target_pb2 import VerifyRequest, VerifyResponse
from specd.worker.engine.engine import Engine
from specd.worker.model.loader import LoadedModel
from specd.worker.sampling.distribution import encode_distributions
from specd.worker.sampling.sampler import Sampler
from specd.worker.session.capacity import CacheCapacity
from specd.worker.session.metrics import WorkerMetrics
from specd.worker.session.prefix_cache import PrefixCache, common_prefix_len
from specd.worker.session.proposal import DraftedTokens, propose
from specd.worker.session.self_draft import ModelDraft, SelfDraft, SessionDraft
from specd.worker.session.session_cache import SessionCache
from specd.worker.session.stream import Worker
from target_worker.service import TargetService
from tests.worker.driving import finish
from tests.worker.models import TINY_VOCABULARY_SIZE, tiny_model
from tests.worker.prefixes import CHUNK, PLENTY
from tests.worker.test_session_stream import FakeContext

COSTS = StepCosts({1: {1: 0.01}})
TARGET = tiny_model()
DRAFTS = {"the target itself": TARGET, "another": tiny_model(seed=1)}


@asynccontextmanager
async def serving(
    draft: LoadedModel | SelfDraft | None, target: LoadedModel = TARGET, *, runs_ahead: bool = False
) -> AsyncIterator[TargetService]:
    """Serve a target, which drafts with this model, or as this says."""
    engine = Engine(mx.clear_streams)
    caches = CacheCapacity(10**9, CacheFootprint({ALL_TOKENS: 1}))
    metrics = WorkerMetrics(CollectorRegistry(), caches, PrefixCache(0))
    own = ModelDraft(draft, COSTS, PrefixCache(PLENTY), CHUNK) if isinstance(draft, LoadedModel) else draft
    deferred = Deferred[Worker]("the model")
    prefixes = PrefixCache(PLENTY)
    deferred.set(Worker(engine, target, caches, prefixes, metrics, CHUNK, COSTS, runs_ahead=runs_ahead, self_draft=own))
    try:
        yield TargetService(deferred)
    finally:
        await asyncio.to_thread(engine.stop)


@dataclass
class Caller:
    """A coordinator's end of one session, which uses proposals as it likes."""

    service: TargetService
    sampling: Sampling
    random: Random
    tokens: list[int]
    num_accepted: int = 0
    num_proposed: int = 0
    faults: set[str] = field(default_factory=set)
    proposals: list[tuple[int, list[int]]] = field(default_factory=list)  # with the number of tokens before each

    async def decode(self, num_tokens: int, *, ks: tuple[int, ...], is_erratic: bool) -> list[int]:
        """Return tokens after the prompt. An erratic caller cuts proposals, replaces them, and does not wait."""
        context: Any = FakeContext()
        call = asyncio.create_task(self.service.Verify(None, context))  # type: ignore[arg-type]
        prompt_len, agreed, own, number = len(self.tokens), 0, list[int](), 0
        while len(self.tokens) < prompt_len + num_tokens:
            number += 1
            k = self.random.choice(ks)
            proposal = own
            if is_erratic and own:
                cut = self.random.randint(0, len(own))
                proposal = [*own[:cut], *(self.random.randrange(TINY_VOCABULARY_SIZE) for _ in range(cut % 3))]
            request = VerifyRequest(
                round=number,
                position=agreed,
                token_ids=self.tokens[agreed:],
                proposal=proposal,
                num_draft_tokens=k,
                min_confidences=[0.9] * (k - 1) if is_erratic and k and self.random.random() < 0.5 else [],
            )
            if self.sampling.acceptance is Acceptance.REJECTION and proposal != own:
                request.distributions.extend(self._guesses(proposal, own))
            if number == 1:
                request.sampling.CopyFrom(to_session_sampling(self.sampling))
            await context.requests.put(request)
            verdict = await self._answer(context, number)
            assert not verdict.HasField("self_proposal")
            accepted = proposal[: verdict.num_accepted]
            self.num_accepted, self.num_proposed = self.num_accepted + len(accepted), self.num_proposed + len(proposal)
            agreed = len(self.tokens) + len(accepted)
            self.tokens += [*accepted, verdict.next_token_id]
            own = []
            if k and not (is_erratic and self.random.random() < 0.3):  # otherwise the next request supersedes it
                answer = await self._answer(context, number)
                assert answer.HasField("self_proposal")
                self.faults.add(answer.self_proposal.fault)
                own = list(answer.self_proposal.token_ids)
                assert len(own) <= k
                self.proposals.append((len(self.tokens), own))
        await context.requests.put(grpc.aio.EOF)
        await call
        return self.tokens[prompt_len : prompt_len + num_tokens]

    async def _answer(self, context: FakeContext, number: int) -> VerifyResponse:
        """Return the next answer to this request; proposals of earlier ones may come late."""
        while (answer := await context.answer()).round != number:
            assert answer.round < number
            assert answer.HasField("self_proposal")
        return answer

    def _guesses(self, proposal: list[int], own: list[int]) -> list[Any]:
        num_own = common_prefix_len(proposal, own)
        return [to_distribution(certain(token)) for token in proposal[num_own:]]


async def decode_all(
    service: TargetService,
    sampling: Sampling,
    prompts: list[list[int]],
    ks: tuple[int, ...],
    *,
    seed: int,
    is_erratic: bool,
) -> tuple[list[list[int]], list[Caller]]:
    callers = [Caller(service, sampling, Random(f"{seed} {i}"), [*prompt]) for i, prompt in enumerate(prompts)]
    texts = await asyncio.gather(*(each.decode(40, ks=ks, is_erratic=is_erratic) for each in callers))
    return texts, callers


def prompts_of(seed: int, count: int) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(TINY_VOCABULARY_SIZE) for _ in range(random.randint(1, 60))] for _ in range(count)]


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft", DRAFTS)
async def test_texts_are_those_of_the_target_alone(draft: str, temperature: float, count: int) -> None:
    for seed in range(2):
        sampling = Sampling(temperature=temperature, seed=seed, repetition_penalty=1.1 if seed % 2 else 1.0)
        prompts = prompts_of(seed, count)
        async with serving(None) as service:
            expected, _ = await decode_all(service, sampling, prompts, (0,), seed=seed, is_erratic=False)
        async with serving(DRAFTS[draft]) as service:
            for is_erratic in (False, True, True):  # the second and third reuse what the first has left
                said, _ = await decode_all(service, sampling, prompts, (0, 1, 4, 8), seed=seed, is_erratic=is_erratic)
                assert said == expected


@pytest.mark.parametrize("acceptance", Acceptance)
async def test_a_draft_that_is_the_target_is_accepted(acceptance: Acceptance) -> None:
    """Its proposals are right only if its cache has exactly the tokens of the session."""
    sampling = Sampling(temperature=1.0, seed=3, acceptance=acceptance)
    async with serving(TARGET) as service:
        _, callers = await decode_all(service, sampling, prompts_of(3, 4), (2, 5), seed=3, is_erratic=False)
    assert {fault for each in callers for fault in each.faults} == {""}
    assert all(each.num_proposed > 20 for each in callers)
    assert sum(each.num_accepted for each in callers) >= 0.97 * sum(each.num_proposed for each in callers)


async def test_proposals_do_not_depend_on_what_was_rewound_replaced_or_superseded() -> None:
    """They are those of a fresh cache with the session's tokens."""
    draft, proposals = DRAFTS["another"], list[tuple[list[int], list[int]]]()
    async with serving(draft) as service:
        for seed in range(4):  # the first leaves its caches to the others
            _, callers = await decode_all(service, Sampling(), prompts_of(7, 3), (0, 2, 8), seed=seed, is_erratic=True)
            proposals += [(each.tokens[:length], own) for each in callers for length, own in each.proposals]
    assert sum(len(own) for _, own in proposals) > 400
    for tokens, own in proposals:
        sampler = Sampler(Sampling(), TINY_VOCABULARY_SIZE)
        fresh = finish(propose(SessionCache(draft), sampler, 0, tokens, len(own), chunk=CHUNK))
        assert own == fresh.token_ids


async def test_rejection_of_own_tokens_needs_no_distribution_and_follows_the_target() -> None:
    """With greedy rejection the text is the target's own, with and without what the worker keeps of its proposals."""
    sampling = Sampling(temperature=0.0, acceptance=Acceptance.REJECTION)
    prompts = prompts_of(5, 3)
    async with serving(None) as service:
        expected, _ = await decode_all(service, sampling, prompts, (0,), seed=5, is_erratic=False)
    async with serving(DRAFTS["another"]) as service:
        for is_erratic in (False, True):
            said, _ = await decode_all(service, sampling, prompts, (3, 6), seed=5, is_erratic=is_erratic)
            assert said == expected


def test_distributions_of_tokens_that_the_worker_did_not_propose_are_certain() -> None:
    drafter = SessionDraft(ModelDraft(TARGET, COSTS, PrefixCache(0), CHUNK), Sampling(), TINY_VOCABULARY_SIZE)
    rows = encode_distributions(np.full((2, 4), 0.25, np.float32))
    drafter._latest = DraftedTokens([1, 2], 0, rows)
    assert drafter.distributions([1]) == rows[:1]
    assert drafter.distributions([1, 2]) == rows
    assert drafter.distributions([1, 3]) == [certain(1), certain(3)]


class NotANumber(Model):
    """A draft with broken weights."""

    def __call__(self, *args: Any, **options: Any) -> mx.array:
        return super().__call__(*args, **options) * mx.nan


@pytest.mark.parametrize(
    ("fault", "count"), [("NON_FINITE_LOGITS", 1), ("NON_FINITE_LOGITS", 3), ("CONTEXT_EXCEEDED", 2)]
)
async def test_a_draft_that_fails_costs_no_token(fault: str, count: int) -> None:
    draft = tiny_model(seed=2)
    if fault == "CONTEXT_EXCEEDED":
        draft = replace(draft, info=replace(draft.info, context_length=20))
    else:
        draft.network.__class__ = NotANumber
    prompts = [[1, 2, 3], [4] * 30, [5, 6]][:count]
    async with serving(None) as service:
        expected, _ = await decode_all(service, Sampling(), prompts, (0,), seed=1, is_erratic=False)
    async with serving(draft) as service:
        said, callers = await decode_all(service, Sampling(), prompts, (4,), seed=1, is_erratic=False)
    assert said == expected
    assert all(fault in each.faults for each in callers)


async def test_a_worker_without_a_draft_refuses_to_propose() -> None:
    async with serving(None) as service:
        context: Any = FakeContext()
        await context.requests.put(VerifyRequest(round=1, token_ids=[1], num_draft_tokens=2))
        with pytest.raises(ConnectionAbortedError, match="num_draft_tokens is 2, but this worker has no draft"):
            await service.Verify(None, context)  # type: ignore[arg-type]
