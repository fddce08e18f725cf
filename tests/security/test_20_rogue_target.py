"""Check 20: a target worker that lies costs that session, with a clear error, or is replayed; no false token comes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from specd.errors import error_info
from specd.supervisor import Stack
from specd.v1.target_pb2 import Margin, VerifyResponse
from tests.e2e.completions import Completion, complete
from tests.e2e.processes import RunningSpecd, draft_of, eventually
from tests.raw_client import RawClient
from tests.security.rogue import Lie, Rogue, coordinator_of, truth

PROMPT = "class Stack:\n    def"
MAX_TOKENS = 32
Victim = tuple[Rogue, RawClient, Completion, RunningSpecd]


@pytest.fixture(scope="module")
async def victim(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Victim]:
    """A coordinator with a lying target, and the right text."""
    address = f"unix:{tmp_path_factory.mktemp('rogue') / 'target'}"
    async with (
        Rogue("target", stack.target, address) as rogue,
        coordinator_of(address, draft_of(stack).facts["address"]) as (coordinator, client, _),
    ):
        expected = await complete(client, PROMPT, max_tokens=MAX_TOKENS, num_draft_tokens=4)
        yield rogue, client, expected, coordinator


def in_round(number: int, change: Callable[[VerifyResponse], object]) -> Lie:
    async def lie(answer: VerifyResponse) -> AsyncIterator[VerifyResponse]:
        if answer.round == number:
            change(answer)
        yield answer

    return lie


async def answer_twice(answer: VerifyResponse) -> AsyncIterator[VerifyResponse]:
    yield answer
    yield answer


async def repeat_the_first(answer: VerifyResponse) -> AsyncIterator[VerifyResponse]:
    """Answer the third round with the previous verdict, like a proxy that replays."""
    if answer.round == 3:
        answer.num_accepted, answer.cached_len = 0, answer.cached_len - 1
    yield answer


BROKEN: dict[str, Lie] = {
    "a margin that is not a number": in_round(2, lambda a: setattr(a.margins[0], "value", math.nan)),
    "a million margins": in_round(2, lambda a: a.margins.extend([Margin(value=1.0)] * 10**6)),
    "more accepted than proposed": in_round(2, lambda a: setattr(a, "num_accepted", 1000)),
    "a token of no vocabulary": in_round(3, lambda a: setattr(a, "next_token_id", 2**32 - 1)),
    "the cache of another request": in_round(3, lambda a: setattr(a, "cached_len", a.cached_len + 1)),
    "an empty cache": in_round(3, lambda a: setattr(a, "cached_len", 0)),
    "2^32 reused": in_round(1, lambda a: setattr(a, "reused_len", 2**32 - 1)),
    "a future round": in_round(2, lambda a: setattr(a, "round", 2**63)),
    "answers twice": answer_twice,
    "a stale verdict": repeat_the_first,
}


@pytest.mark.parametrize("case", BROKEN)
async def test_the_session_ends_with_a_clear_error_and_the_others_go_on(victim: Victim, case: str) -> None:
    rogue, client, expected, _ = victim
    honest = aiter(client.generate(PROMPT, max_tokens=256, num_draft_tokens=4))
    responses = [await anext(honest)]  # its stream is open
    rogue.lie, rogue.lies_once = BROKEN[case], True
    received: list[int] = []
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for response in client.generate(PROMPT, max_tokens=MAX_TOKENS, num_draft_tokens=4):
            received += [token.id for token in response.tokens]
    assert raised.value.code() is grpc.StatusCode.INTERNAL
    assert error_info(raised.value).reason == "TARGET_BROKEN"
    assert received == expected.token_ids[: len(received)]
    responses += [response async for response in honest]
    assert Completion(responses).token_ids[:MAX_TOKENS] == expected.token_ids
    assert (await complete(client, PROMPT, max_tokens=MAX_TOKENS, num_draft_tokens=4)).text == expected.text


async def fail_late(answer: VerifyResponse) -> AsyncIterator[VerifyResponse]:
    if answer.round == 3:
        await asyncio.sleep(3600)
    yield answer


HARMLESS: dict[str, Lie] = {
    "times of NaN": in_round(2, lambda a: setattr(a.time, "compute_seconds", math.nan)),
    "times of 1e300": in_round(2, lambda a: setattr(a.time, "queue_seconds", -1e300)),
    "steps of no session": in_round(2, lambda a: a.ClearField("time")),
}


@pytest.mark.parametrize("case", HARMLESS)
async def test_times_decide_no_token(victim: Victim, case: str) -> None:
    rogue, client, expected, _ = victim
    rogue.lie, rogue.lies_once = HARMLESS[case], True
    completion = await complete(client, PROMPT, max_tokens=MAX_TOKENS)
    assert completion.text == expected.text


async def test_an_answer_of_another_life_is_never_used(victim: Victim) -> None:
    """All its streams are lost ones: the session ends when it has been replayed as often as may be."""
    rogue, client, expected, _ = victim
    await rogue.sessions_ended()
    rogue.incarnation = "an earlier life"
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in client.generate(PROMPT, max_tokens=MAX_TOKENS, num_draft_tokens=0):
            raise AssertionError("a token came from a target with an unchecked model")
    rogue.incarnation = ""
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert (await complete(client, PROMPT, max_tokens=MAX_TOKENS, num_draft_tokens=4)).text == expected.text


async def test_a_stream_of_another_life_is_replayed_on_the_right_one(victim: Victim) -> None:
    rogue, client, expected, _ = victim
    await rogue.sessions_ended()
    rogue.incarnation, rogue.lies_once = "an earlier life", True
    completion = await complete(client, PROMPT, max_tokens=MAX_TOKENS, num_draft_tokens=4)
    assert completion.text == expected.text
    assert completion.statistics.target_replays == 1


async def test_a_target_that_stalls_ends_the_session_in_time(victim: Victim) -> None:
    rogue, client, expected, _ = victim
    rogue.lie = fail_late
    received: list[int] = []
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async with asyncio.timeout(30):
            async for response in client.generate(PROMPT, max_tokens=MAX_TOKENS, num_draft_tokens=4):
                received += [token.id for token in response.tokens]
    rogue.lie = truth
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert received == expected.token_ids[: len(received)]


async def test_a_target_that_comes_back_with_other_weights_is_refused(victim: Victim) -> None:
    """They look the same at first sight: the quick fingerprint, the tokenizer and the end tokens are."""
    rogue, client, expected, coordinator = victim

    def with_fingerprint(whole: str) -> Callable[[Any], None]:
        def describe(response: Any) -> None:
            response.incarnation = "another"
            response.model.whole_fingerprint = whole or response.model.whole_fingerprint

        return describe

    async def until_the_error_says(text: str) -> None:
        async with asyncio.timeout(30):
            while True:
                try:
                    await complete(client, PROMPT, max_tokens=4, num_draft_tokens=0)
                except grpc.aio.AioRpcError as error:
                    if text in (error.details() or ""):
                        return
                await asyncio.sleep(0.1)

    await rogue.sessions_ended()
    rogue.incarnation, rogue.describe = "another", with_fingerprint("0" * 64)
    await rogue.set_serving(False)
    await asyncio.sleep(0.3)
    await rogue.set_serving(True)
    await until_the_error_says("TARGET_REFUSED")
    # Why, with the address, is for the operator.
    await eventually(lambda: any("with other weights than before" in line for line in coordinator.lines))

    rogue.describe = with_fingerprint("")  # the same weights in another life
    await rogue.set_serving(False)
    await asyncio.sleep(0.3)
    await rogue.set_serving(True)
    async with asyncio.timeout(30):
        completion = await complete(client, PROMPT, max_tokens=MAX_TOKENS, num_draft_tokens=4)
    assert completion.text == expected.text
