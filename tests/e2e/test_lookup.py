"""Look-up through the service: alone, beside the draft, with predictions; exact, counted, and refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from specd.errors import error_info
from specd.settings import EMBEDDED_TARGET
from specd.supervisor import Stack
from specd.v1.generation_pb2 import (
    DRAFT_SOURCE_LOOKUP,
    DRAFT_SOURCE_MODEL,
    DRAFT_SOURCE_NONE,
    TOKEN_SOURCE_DRAFT,
    TOKEN_SOURCE_LOOKUP,
    StopConditions,
    TokenIds,
)
from specd.v1.sampling_pb2 import ACCEPTANCE_METHOD_REJECTION, SamplingParameters
from tests.e2e.completions import Completion, complete
from tests.e2e.faults import ENVIRONMENT, kill
from tests.e2e.processes import draft_of, read_metric, run_specd
from tests.raw_client import RawClient
from tests.thorough import examples

PROMPT = """\
class Vector:
    def __add__(self, other):
        return Vector(self.x + other.x, self.y + other.y)

    def __sub__(self, other):
        return Vector(self.x - other.x, self.y - other.y)

    def __mul__(self, other):"""
FIELDS: dict[str, Any] = {"max_tokens": 60, "stop": StopConditions(ignore_eos=True)}
SOURCES = (0, DRAFT_SOURCE_MODEL, DRAFT_SOURCE_LOOKUP)


@pytest.fixture(scope="module")
async def alone() -> AsyncIterator[Stack]:
    """A target without a draft model."""
    async with Stack(target=EMBEDDED_TARGET, draft="", environment=ENVIRONMENT) as stack:
        yield stack


def sampled(temperature: float, **fields: Any) -> SamplingParameters:
    return SamplingParameters(temperature=temperature, seed=5, **fields)


async def ask(client: RawClient, prompt: Any = PROMPT, **fields: Any) -> Completion:
    return await complete(client, prompt, **(FIELDS | fields))


@pytest.mark.parametrize("temperature", examples([1.0, 0.0, 0.7], 1))
async def test_no_source_changes_a_token(client: RawClient, temperature: float) -> None:
    sampling = sampled(temperature)
    expected = await ask(client, draft_source=DRAFT_SOURCE_NONE, sampling=sampling)
    assert expected.statistics.proposed_tokens == 0
    predictions = {
        "right": expected.token_ids,
        "edited": [*expected.token_ids[:20], 5, 6, 7, *expected.token_ids[24:]],
        "wrong": [5, 6, 7, 8] * 10,
        "none": [],
    }
    for source in SOURCES:
        names = ("none",) if source == DRAFT_SOURCE_MODEL else predictions
        for number, name in enumerate(names):
            ids = predictions[name]
            for k in ((None, 5), (1, 32))[number % 2] if len(names) > 1 else (None, 1, 5, 32):
                given = {} if k is None else {"num_draft_tokens": k}
                predicted = {"prediction_token_ids": TokenIds(ids=ids)} if ids else {}
                got = await ask(client, draft_source=source, sampling=sampling, **given, **predicted)
                assert got.token_ids == expected.token_ids, (source, k, name)
                if source == DRAFT_SOURCE_MODEL:
                    assert got.statistics.sources.keys() <= {"draft"}
                if source == DRAFT_SOURCE_LOOKUP:
                    assert got.statistics.sources.keys() <= {"lookup", "prediction"}
                    if name == "right":
                        counts = got.statistics.sources["prediction"]
                        assert counts.accepted == got.statistics.accepted_tokens
                        assert counts.accepted >= (25 if k == 1 else 35)
                        assert counts.proposed == counts.accepted


async def test_the_response_says_where_each_token_is_from(client: RawClient) -> None:
    got = await ask(client)
    for response in got.responses:
        of = [token.source for token in response.tokens]
        assert [token.drafted for token in response.tokens] == [
            source in {TOKEN_SOURCE_DRAFT, TOKEN_SOURCE_LOOKUP} for source in of
        ]
        assert sum(each.proposed for each in response.round.sources.values()) == response.round.proposed
        assert sum(each.accepted for each in response.round.sources.values()) == response.round.accepted
    sources = [token.source for token in got.tokens]
    for source, name in ((TOKEN_SOURCE_DRAFT, "draft"), (TOKEN_SOURCE_LOOKUP, "lookup")):
        assert sources.count(source) == got.statistics.sources[name].accepted


@pytest.mark.parametrize("temperature", examples([0.0, 1.0], 1))
async def test_sessions_of_all_sources_go_together(client: RawClient, temperature: float) -> None:
    sampling = sampled(temperature)
    prompts = [PROMPT, PROMPT[:120], "def f(x):\n    return f(x)\n\ndef f(x):"]
    expected = [await ask(client, each, draft_source=DRAFT_SOURCE_NONE, sampling=sampling) for each in prompts]
    together = await asyncio.gather(
        *(ask(client, each, draft_source=source, sampling=sampling) for each in prompts for source in SOURCES)
    )
    assert [each.token_ids for each in together] == [each.token_ids for each in expected for _ in SOURCES]


@pytest.mark.thorough
async def test_rejection_takes_looked_up_tokens(client: RawClient) -> None:
    """And is greedy at temperature 0."""
    expected = await ask(client, draft_source=DRAFT_SOURCE_NONE)
    for temperature in (0.0, 0.8):
        sampling = sampled(temperature, acceptance=ACCEPTANCE_METHOD_REJECTION)
        for source, fields in ((0, {}), (DRAFT_SOURCE_LOOKUP, {"num_draft_tokens": 4})):
            got = await ask(client, draft_source=source, sampling=sampling, **fields)
            assert got.statistics.sources["lookup"].proposed or not fields  # without k, the planner decides
            assert temperature or got.token_ids == expected.token_ids


@pytest.mark.parametrize("victim", examples(["target", "draft"], 1))
async def test_a_killed_worker_changes_nothing(harmed_stack: Stack, harmed_client: RawClient, victim: str) -> None:
    child = draft_of(harmed_stack) if victim == "draft" else harmed_stack.target
    expected = await ask(harmed_client, draft_source=DRAFT_SOURCE_NONE, max_tokens=120)
    token_ids: list[int] = []
    number = 0
    async for response in harmed_client.generate(PROMPT, **(FIELDS | {"max_tokens": 120})):
        number += 1
        if number == 4:
            kill(child)
        token_ids.extend(token.id for token in response.tokens)
    assert token_ids == expected.token_ids


async def test_a_continued_session_looks_up_all_of_its_text(client: RawClient) -> None:
    whole = await ask(client, draft_source=DRAFT_SOURCE_NONE, max_tokens=80)
    first = await ask(client, max_tokens=30)
    rest = await ask(client, "", session_id=first.last.session_id, max_tokens=50, draft_source=DRAFT_SOURCE_LOOKUP)
    assert first.token_ids + rest.token_ids == whole.token_ids
    assert rest.statistics.sources["lookup"].accepted


async def test_a_target_without_a_draft_model_looks_up(alone: Stack) -> None:
    async with RawClient(alone.address) as own:
        assert (await own.model_info()).sources == ["lookup", "prediction"]
        expected = await ask(own, draft_source=DRAFT_SOURCE_NONE)
        for given in ({}, {"num_draft_tokens": 4}):
            got = await ask(own, **given)
            assert got.token_ids == expected.token_ids
            assert got.statistics.sources["lookup"].accepted == got.statistics.accepted_tokens > 0
            assert not got.statistics.rounds_without_draft
            assert got.statistics.speedup
        with pytest.raises(grpc.aio.AioRpcError, match="no draft model") as refused:
            await ask(own, draft_source=DRAFT_SOURCE_MODEL)
        assert error_info(refused.value).reason == "CONTRADICTION"
    assert read_metric(alone.coordinator, "specd_accepted_tokens_by_source_total", source="lookup") > 0
    assert read_metric(alone.coordinator, "specd_accepted_tokens_by_source_total", source="draft") == 0


@pytest.mark.parametrize(
    ("fields", "reason", "what"),
    [
        ({"prediction_token_ids": TokenIds(ids=[5] * 2049)}, "CONTEXT_EXCEEDED", "2049 tokens"),
        ({"prediction_token_ids": TokenIds(ids=[8192])}, "TOKEN_OUT_OF_VOCABULARY", "8192"),
        ({"prediction_text": "x", "draft_source": DRAFT_SOURCE_NONE}, "CONTRADICTION", "NONE"),
        ({"prediction_text": "x", "draft_source": DRAFT_SOURCE_MODEL}, "CONTRADICTION", "MODEL"),
        ({"prediction_text": "x", "num_draft_tokens": 0}, "CONTRADICTION", "num_draft_tokens is 0"),
        ({"draft_source": DRAFT_SOURCE_NONE, "num_draft_tokens": 4}, "CONTRADICTION", "num_draft_tokens is 4"),
        ({"draft_source": 9}, "OUT_OF_RANGE", "9"),
    ],
    ids=["long", "vocabulary", "none", "model", "no tokens", "none that proposes", "unknown"],
)
async def test_wrong_requests_are_refused(client: RawClient, fields: dict[str, Any], reason: str, what: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ask(client, **fields)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error_info(refused.value).reason == reason
    assert what in str(refused.value.details())


async def test_without_look_up_nothing_is_looked_up() -> None:
    environment = ENVIRONMENT | {"SPECD_COORDINATOR_STREAM_INTERVAL_SECONDS": "0.2"}
    async with (
        Stack(
            target=EMBEDDED_TARGET, draft="", options={"coordinator": {"no_lookup": None}}, environment=environment
        ) as stack,
        RawClient(stack.address) as own,
    ):
        responses = [response async for response in own.generate(PROMPT, **FIELDS)]
        statistics = responses[-1].statistics
        assert not statistics.proposed_tokens
        # Sent five times a second: all rounds of an interval in a message.
        assert len(responses) < statistics.rounds / 2 == sum(len(each.tokens) for each in responses) / 2
        with pytest.raises(grpc.aio.AioRpcError, match="no look-up"):
            await ask(own, draft_source=DRAFT_SOURCE_LOOKUP)


def test_look_up_alone_and_no_look_up_contradict_each_other() -> None:
    done = run_specd("up", "--draft", "lookup", "--no-lookup", "--listen", "127.0.0.1:0")
    assert done.returncode == 2
    assert "contradict" in done.stderr
