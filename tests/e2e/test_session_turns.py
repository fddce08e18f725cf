"""Turns of a session, through real processes: what they say, what is not computed again, and those that fail."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import mlx.core as mx
import pytest

from specd.supervisor import Stack
from specd.text.tokenizer import Tokenizer
from specd.v1.generation_pb2 import FINISH_REASON_STOP_STRING, Chat, StopConditions
from specd.v1.sampling_pb2 import SamplingParameters
from specd.v1.session_pb2 import DeleteSessionRequest
from specd.v1.session_pb2_grpc import SessionServiceStub
from specd.worker.model.loader import LoadedModel
from tests.e2e.chats import QUESTION, chat_of
from tests.e2e.completions import Completion, complete
from tests.e2e.kept_sessions import IGNORE_EOS, LONG, MAX_LOST, get_session, refusal
from tests.e2e.processes import wait_until_idle
from tests.raw_client import RawClient


def greedy_tokens(target: LoadedModel, token_ids: list[int]) -> list[int]:
    """Return what the target would put in the places of these tokens, the first excepted, given those before each."""
    logits = target.network(mx.array([token_ids[:-1]]))[0]
    chosen: Any = mx.argmax(logits, axis=-1).tolist()
    return chosen


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
async def test_each_turn_goes_on_from_all_before_it(
    client: RawClient,
    sessions: SessionServiceStub,
    target: LoadedModel,
    tokenizer: Tokenizer,
    prompts: list[str],
    num_draft_tokens: int,
) -> None:
    first_prompt = f"# {num_draft_tokens}\n" + prompts[16][:800]  # the code of a long one
    fields: dict[str, Any] = {"max_tokens": 8, "num_draft_tokens": num_draft_tokens}
    fields["stop"] = IGNORE_EOS
    turn = await complete(client, first_prompt, **fields)
    session_id = turn.last.session_id
    token_ids = [*tokenizer.encode(first_prompt), *turn.token_ids]
    assert len(token_ids) > 150
    generated = [*range(len(token_ids) - 8, len(token_ids))]

    said: list[str | list[int]] = [
        "\n\ndef second(x):",
        tokenizer.encode("\n# third", add_special_tokens=False),
        "",
        "é = 'ü'\n",
        [5, 5, 0],
    ]
    for number, prompt in enumerate(said, 2):
        turn = await complete(client, prompt, session_id=session_id, **fields)
        new = tokenizer.encode(prompt, add_special_tokens=False) if isinstance(prompt, str) else prompt
        statistics = turn.statistics
        assert turn.last.session_id == session_id
        assert statistics.prompt_tokens == len(token_ids) + len(new)
        assert statistics.prompt_tokens - statistics.target_reused_tokens <= len(new) + MAX_LOST
        if num_draft_tokens:
            assert statistics.prompt_tokens - statistics.draft_reused_tokens <= len(new) + MAX_LOST
        else:
            assert statistics.draft_reused_tokens == 0
        token_ids += [*new, *turn.token_ids]
        generated += range(len(token_ids) - 8, len(token_ids))

        kept = await get_session(sessions, session_id)
        assert list(kept.token_ids) == token_ids
        assert kept.text == tokenizer.decode(token_ids, skip_special_tokens=False)
        assert (kept.session.num_tokens, kept.session.num_turns) == (len(token_ids), number)
        assert not kept.session.busy

    greedy = [None, *greedy_tokens(target, token_ids)]
    assert [token_ids[i] for i in generated] == [greedy[i] for i in generated]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParameters(),
        SamplingParameters(temperature=0.9, top_k=200, seed=11),
        SamplingParameters(repetition_penalty=1.2, frequency_penalty=0.3, penalty_context_size=0),
    ],
    ids=["greedy", "sampled", "penalties"],
)
async def test_two_turns_of_10_are_one_of_20(client: RawClient, sampling: SamplingParameters) -> None:
    whole = await complete(client, max_tokens=20, sampling=sampling, stop=IGNORE_EOS, num_draft_tokens=0)
    for first_k, second_k in ((0, 4), (4, 0), (3, 8)):
        fields: dict[str, Any] = {"max_tokens": 10, "sampling": sampling, "stop": IGNORE_EOS}
        first = await complete(client, **fields, num_draft_tokens=first_k)
        going_on = {"session_id": first.last.session_id, "num_draft_tokens": second_k}
        second = await complete(client, "", **fields, **going_on)
        assert [*first.token_ids, *second.token_ids] == whole.token_ids
        assert first.text + second.text == whole.text


async def test_a_session_goes_on_after_a_stop_string(client: RawClient, sessions: SessionServiceStub) -> None:
    """Its tokens end with the one that completed the string, and its rounds had been ahead of that."""
    whole = await complete(client, max_tokens=30, num_draft_tokens=0)
    end = len("".join(token.text for token in whole.tokens[:9]))
    first = await complete(client, max_tokens=30, stop=StopConditions(strings=[whole.text[end - 3 : end]]))
    assert first.last.finish_reason == FINISH_REASON_STOP_STRING
    assert first.token_ids == whole.token_ids[: len(first.tokens)]
    session_id = first.last.session_id
    second = await complete(client, [], session_id=session_id, max_tokens=30 - len(first.tokens))
    assert [*first.token_ids, *second.token_ids] == whole.token_ids
    assert list((await get_session(sessions, session_id)).token_ids)[-30:] == whole.token_ids


async def test_a_new_session_takes_over_what_another_left(
    client: RawClient, target: LoadedModel, tokenizer: Tokenizer, prompts: list[str]
) -> None:
    system = [77, *tokenizer.encode(prompts[17])[:300]]
    for ending in ([5, 6], [7], [8, 9, 10], [5, 6]):
        completion = await complete(client, [*system, *ending], max_tokens=6, num_draft_tokens=2, stop=IGNORE_EOS)
        statistics = completion.statistics
        assert completion.token_ids == greedy_tokens(target, [*system, *ending, *completion.token_ids])[-6:]
        if ending != [5, 6]:  # the first
            assert statistics.target_reused_tokens >= len(system)
            assert statistics.draft_reused_tokens >= len(system)


async def test_tokens_that_were_known_are_counted(client: RawClient) -> None:
    prompt = [4000, *range(100, 160)]
    first, again = [await complete(client, prompt, max_tokens=8, num_draft_tokens=3) for _ in range(2)]
    assert again.token_ids == first.token_ids
    assert first.statistics.target_reused_tokens == first.statistics.draft_reused_tokens == 0
    assert again.statistics.prompt_tokens == len(prompt)
    # The last token is always computed, because the request asks for its successor.
    assert again.statistics.target_reused_tokens == len(prompt) - 1
    assert len(prompt) - 1 <= again.statistics.draft_reused_tokens <= len(prompt)
    alone = await complete(client, prompt, max_tokens=8, num_draft_tokens=0)
    assert alone.token_ids == first.token_ids
    assert alone.statistics.draft_reused_tokens == 0
    assert list(alone.statistics.proposed_by_position) == []


@pytest.mark.parametrize("first_turn", [True, False], ids=["first turn", "later turn"])
async def test_a_session_does_one_thing_at_a_time(
    client: RawClient, sessions: SessionServiceStub, target: LoadedModel, tokenizer: Tokenizer, first_turn: bool
) -> None:
    prompt, session_id, before = "import os\n\ndef", "", list[int]()
    token_ids = tokenizer.encode(prompt)
    if not first_turn:
        turn = await complete(client, prompt, max_tokens=3)
        session_id, prompt, before = turn.last.session_id, "", [*token_ids, *turn.token_ids]
        token_ids = before
    call = client.generate(prompt, session_id=session_id, **LONG)
    responses = [await anext(aiter(call))]
    session_id = responses[0].session_id

    busy = (grpc.StatusCode.ABORTED, "SESSION_BUSY")
    assert await refusal(client.generate("x", session_id=session_id, max_tokens=1)) == busy
    assert await refusal(client.generate("", session_id=session_id, max_tokens=1)) == busy
    assert await refusal(sessions.DeleteSession(DeleteSessionRequest(session_id=session_id))) == busy
    kept = await get_session(sessions, session_id)
    assert kept.session.busy
    assert not kept.session.HasField("expires_at")
    assert list(kept.token_ids) == before  # as it was before the turn

    responses += [response async for response in call]
    completion = Completion(responses)
    whole = [*token_ids, *completion.token_ids]
    assert completion.token_ids == greedy_tokens(target, whole)[-LONG["max_tokens"] :]
    kept = await get_session(sessions, session_id)
    assert not kept.session.busy
    assert list(kept.token_ids) == whole


async def test_a_turn_that_does_not_finish_leaves_the_session_as_it_was(
    stack: Stack, client: RawClient, sessions: SessionServiceStub, target: LoadedModel
) -> None:
    first = await complete(client, "def area(width, height):", max_tokens=6)
    session_id = first.last.session_id
    before = await get_session(sessions, session_id)

    async def is_as_before() -> bool:
        kept = await get_session(sessions, session_id)
        assert kept.token_ids == before.token_ids
        assert kept.session.num_turns == 1
        return not kept.session.busy

    for num_messages in (0, 1, 3):  # to be read before the client goes away
        call = client.generate("\n    return", session_id=session_id, **LONG)
        for _ in range(num_messages):
            await anext(aiter(call))
        call.cancel()  # type: ignore[attr-defined]
        while not await is_as_before():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await wait_until_idle(stack)

    for prompt, fields, reason in [
        ("x", {"max_tokens": 2048}, "CONTEXT_EXCEEDED"),
        ("x " * 5000, {}, "CONTEXT_EXCEEDED"),
        ([8192], {}, "TOKEN_OUT_OF_VOCABULARY"),
        ("x", {"sampling": SamplingParameters(temperature=-1)}, "OUT_OF_RANGE"),
        ("x", {"stop": StopConditions(strings=[""])}, "OUT_OF_RANGE"),
        ("x", {"num_draft_tokens": 33}, "OUT_OF_RANGE"),
        (chat_of([QUESTION]), {}, "CONTRADICTION"),
        (Chat(), {}, "CONTRADICTION"),
    ]:
        call = client.generate(prompt, session_id=session_id, **fields)  # type: ignore[arg-type]
        assert await refusal(call) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
        assert await is_as_before()

    second = await complete(client, [366, 286], session_id=session_id, max_tokens=6, stop=IGNORE_EOS)
    whole = [*before.token_ids, 366, 286, *second.token_ids]
    assert second.token_ids == greedy_tokens(target, whole)[-6:]
    assert (await get_session(sessions, session_id)).session.num_turns == 2
