"""Check 27: hostile grammars, several at once, hold up no other client's stream, and end with an answer or an error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import grpc
import pytest

from specd.grammar import MAX_GRAMMAR_BYTES
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from specd.v1.sampling_pb2 import Grammar, SamplingParameters
from tests.e2e.completions import complete
from tests.raw_client import RawClient
from tests.security.http_door import HttpDoor
from tests.security.test_26_hostile_shapes import LONGEST_STALL_SECONDS, Watch

pytestmark = pytest.mark.alone

AT_ONCE = 4


def nested(levels: int) -> object:
    schema: object = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema, "b": {"type": "string", "maxLength": 2000}}}
    return schema


GRAMMARS = {
    "deep": Grammar(json_schema=json.dumps(nested(25))),
    "wide": Grammar(json_schema=json.dumps({"type": "object", "properties": {f"k{i}": {} for i in range(2500)}})),
    "alternatives": Grammar(
        json_schema=json.dumps({"anyOf": [{"type": "string", "pattern": f"^a{{{i}}}b.*c$"} for i in range(400)]})
    ),
    "long strings": Grammar(json_schema=json.dumps({"type": "array", "items": {"type": "string", "maxLength": 10**6}})),
    "repetitions": Grammar(regex="((a{1,100}){1,100}){1,100}"),
    "ambiguity": Grammar(regex="(.*a){12}.*(.*b){12}.*"),
    "many words": Grammar(regex="|".join(f"word{i}x*" for i in range(4500))[:MAX_GRAMMAR_BYTES]),
    "ambiguous rules": Grammar(lark='start: a\na: a a | b | a b a\nb: /[a-z]*/ | /[a-y ]*/ | b b'),
}  # fmt: skip


@pytest.fixture(scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, http="127.0.0.1:0") as running:
        yield running


@pytest.fixture
async def watch(stack: Stack) -> AsyncIterator[Watch]:
    assert stack.gateway is not None
    watch = Watch(HttpDoor(stack.gateway.facts["address"]))
    streaming = asyncio.ensure_future(watch.stream())
    yield watch
    streaming.cancel()
    await asyncio.gather(streaming, return_exceptions=True)


@pytest.mark.parametrize("name", GRAMMARS)
async def test_a_hostile_grammar_holds_up_nobody(stack: Stack, watch: Watch, name: str) -> None:
    async with RawClient(stack.address) as client:

        async def ask(seed: int) -> str:
            sampling = SamplingParameters(temperature=1.0, seed=seed)
            try:
                await complete(client, "x = ", grammar=GRAMMARS[name], max_tokens=40, sampling=sampling)
            except grpc.aio.AioRpcError as error:
                assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error.details()
                return error.details() or ""
            return "answered"

        async def attack() -> None:
            outcomes.update(await asyncio.gather(*(ask(seed) for seed in range(AT_ONCE))))

        async def honest() -> None:
            """As many sessions without a grammar: they share the passes, too."""
            await asyncio.gather(*(complete(client, "x = ", max_tokens=40) for _ in range(AT_ONCE)))

        stalls, outcomes = [], set[str]()
        for _ in range(3):
            undisturbed = await watch.longest_gap(honest)
            gap = await watch.longest_gap(attack)
            print(f"longest gap {gap:.3f} s, beside honest sessions {undisturbed:.3f} s; {outcomes}")
            stalls.append(gap - undisturbed)
            if stalls[-1] < LONGEST_STALL_SECONDS:
                return
        raise AssertionError(f"a stream stood still for {stalls} s longer than beside honest sessions")
