"""Sessions that are continued, through real processes: what they say, what is not computed again, and when they end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import mlx.core as mx
import pytest

from coordinator.tokenizer import Tokenizer
from specd.channel import open_channel
from specd.client import Client
from specd.errors import error_info
from specd.settings import EMBEDDED_DRAFT
from specd.supervisor import Stack
from specd.v1.draft_pb2 import ProposeRequest
from specd.v1.draft_pb2_grpc import DraftServiceStub
from specd.v1.generation_pb2 import FINISH_REASON_STOP_STRING, Chat, GenerateResponse, StopConditions
from specd.v1.sampling_pb2 import SamplingParameters
from specd.v1.session_pb2 import DeleteSessionRequest, GetSessionRequest, GetSessionResponse, ListSessionsRequest
from specd.v1.session_pb2_grpc import SessionServiceStub
from specd.worker.model import LoadedModel
from tests.models import save_chat_target
from tests.processes import eventually, read_metric, resident_mib, start_specd, wait_until_idle
from tests.test_requests import QUESTION, REPLY, SYSTEM, TOOL, Completion, chat_of, complete

pytestmark = pytest.mark.processes

PREFIX_CACHE_BYTES = 16 * 2**20
# What a proposal and the token before it can put between the end of a session and the end of what is cached of it.
MAX_LOST = 34

IGNORE_EOS = StopConditions(ignore_eos=True)
# A turn that is far from its end when its first message comes.
LONG: dict[str, Any] = {"max_tokens": 120, "num_draft_tokens": 0, "stop": IGNORE_EOS}


@pytest.fixture(scope="module")
def sessions(client: Client) -> SessionServiceStub:
    return SessionServiceStub(client.channel)


@pytest.fixture(scope="module")
async def own_stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """A stack of this module's own, whose target has a chat template, and whose prefix caches are small."""
    small = str(PREFIX_CACHE_BYTES)
    environment = {f"SPECD_{worker}_WORKER_PREFIX_CACHE_BYTES": small for worker in ("DRAFT", "TARGET")}
    chat_target = save_chat_target(tmp_path_factory.mktemp("own") / "target")
    async with Stack(target=chat_target, draft=EMBEDDED_DRAFT, environment=environment) as running:
        yield running


@pytest.fixture(scope="module")
async def own_client(own_stack: Stack) -> AsyncIterator[Client]:
    async with Client(own_stack.address) as connected:
        yield connected


def greedy_tokens(target: LoadedModel, token_ids: list[int]) -> list[int]:
    """Return what the target would put in the places of these tokens, the first excepted, given those before each."""
    logits = target.network(mx.array([token_ids[:-1]]))[0]
    chosen: list[int] = mx.argmax(logits, axis=-1).tolist()
    return chosen


async def get(sessions: SessionServiceStub, session_id: str) -> GetSessionResponse:
    response: GetSessionResponse = await sessions.GetSession(GetSessionRequest(session_id=session_id))
    return response


async def refusal(call: AsyncIterator[GenerateResponse] | Any) -> tuple[grpc.StatusCode, str]:
    """Return code and reason of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        if isinstance(call, grpc.aio.UnaryStreamCall):
            async for _ in call:
                pass
        else:
            await call
    return raised.value.code(), error_info(raised.value).reason


# -- What a session says


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
async def test_each_turn_goes_on_from_all_before_it(
    client: Client,
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

    said = ["\n\ndef second(x):", tokenizer.encode("\n# third", add_special_tokens=False), "", "é = 'ü'\n", [5, 5, 0]]
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

        kept = await get(sessions, session_id)
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
async def test_two_turns_of_10_are_one_of_20(client: Client, sampling: SamplingParameters) -> None:
    whole = await complete(client, max_tokens=20, sampling=sampling, stop=IGNORE_EOS, num_draft_tokens=0)
    for first_k, second_k in ((0, 4), (4, 0), (3, 8)):
        fields: dict[str, Any] = {"max_tokens": 10, "sampling": sampling, "stop": IGNORE_EOS}
        first = await complete(client, **fields, num_draft_tokens=first_k)
        going_on = {"session_id": first.last.session_id, "num_draft_tokens": second_k}
        second = await complete(client, "", **fields, **going_on)
        assert [*first.token_ids, *second.token_ids] == whole.token_ids
        assert first.text + second.text == whole.text


async def test_a_session_goes_on_after_a_stop_string(client: Client, sessions: SessionServiceStub) -> None:
    """Its tokens end with the one that completed the string, and its rounds had been ahead of that."""
    whole = await complete(client, max_tokens=30, num_draft_tokens=0)
    end = len("".join(token.text for token in whole.tokens[:9]))
    first = await complete(client, max_tokens=30, stop=StopConditions(strings=[whole.text[end - 3 : end]]))
    assert first.last.finish_reason == FINISH_REASON_STOP_STRING
    assert first.token_ids == whole.token_ids[: len(first.tokens)]
    session_id = first.last.session_id
    second = await complete(client, [], session_id=session_id, max_tokens=30 - len(first.tokens))
    assert [*first.token_ids, *second.token_ids] == whole.token_ids
    assert list((await get(sessions, session_id)).token_ids)[-30:] == whole.token_ids


async def test_a_new_session_takes_over_what_another_left(
    client: Client, target: LoadedModel, tokenizer: Tokenizer, prompts: list[str]
) -> None:
    system = [77, *tokenizer.encode(prompts[17])[:300]]
    for ending in ([5, 6], [7], [8, 9, 10], [5, 6]):
        completion = await complete(client, [*system, *ending], max_tokens=6, num_draft_tokens=2, stop=IGNORE_EOS)
        statistics = completion.statistics
        assert completion.token_ids == greedy_tokens(target, [*system, *ending, *completion.token_ids])[-6:]
        if ending != [5, 6]:  # the first
            assert statistics.target_reused_tokens >= len(system)
            assert statistics.draft_reused_tokens >= len(system)


# -- The sessions that there are


async def test_sessions_are_listed_shown_and_deleted(client: Client, sessions: SessionServiceStub) -> None:
    made = [(await complete(client, max_tokens=2)).last.session_id for _ in range(3)]
    listed = (await sessions.ListSessions(ListSessionsRequest())).sessions
    assert [session.session_id for session in listed[:3]] == made[::-1]
    await complete(client, "", max_tokens=2, session_id=made[0])
    listed = (await sessions.ListSessions(ListSessionsRequest())).sessions
    assert [(session.session_id, session.num_turns) for session in listed[:3]] == [
        (made[0], 2),
        (made[2], 1),
        (made[1], 1),
    ]
    assert listed[0].created_at.ToNanoseconds() < listed[2].created_at.ToNanoseconds()
    assert listed[0].last_used_at.ToNanoseconds() < listed[0].expires_at.ToNanoseconds()
    assert (await get(sessions, made[0])).session == listed[0]

    await sessions.DeleteSession(DeleteSessionRequest(session_id=made[0]))
    listed = (await sessions.ListSessions(ListSessionsRequest())).sessions
    assert made[0] not in [session.session_id for session in listed]
    gone = (grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND")
    assert await refusal(client.generate("x", session_id=made[0])) == gone
    assert await refusal(sessions.GetSession(GetSessionRequest(session_id=made[0]))) == gone
    assert await refusal(sessions.DeleteSession(DeleteSessionRequest(session_id=made[0]))) == gone


@pytest.mark.parametrize("first_turn", [True, False], ids=["first turn", "later turn"])
async def test_a_session_does_one_thing_at_a_time(
    client: Client, sessions: SessionServiceStub, target: LoadedModel, tokenizer: Tokenizer, first_turn: bool
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
    kept = await get(sessions, session_id)
    assert kept.session.busy
    assert not kept.session.HasField("expires_at")
    assert list(kept.token_ids) == before  # as it was before the turn

    responses += [response async for response in call]
    completion = Completion(responses)
    whole = [*token_ids, *completion.token_ids]
    assert completion.token_ids == greedy_tokens(target, whole)[-LONG["max_tokens"] :]
    kept = await get(sessions, session_id)
    assert not kept.session.busy
    assert list(kept.token_ids) == whole


# -- Turns that do not finish


async def test_a_turn_that_does_not_finish_leaves_the_session_as_it_was(
    stack: Stack, client: Client, sessions: SessionServiceStub, target: LoadedModel
) -> None:
    first = await complete(client, "def area(width, height):", max_tokens=6)
    session_id = first.last.session_id
    before = await get(sessions, session_id)

    async def is_as_before() -> bool:
        kept = await get(sessions, session_id)
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
    assert (await get(sessions, session_id)).session.num_turns == 2


async def test_a_session_whose_first_turn_does_not_finish_is_forgotten(
    stack: Stack, client: Client, sessions: SessionServiceStub
) -> None:
    before = read_metric(stack.coordinator, "specd_kept_sessions")
    call = client.generate("def", **LONG)
    session_id = (await anext(aiter(call))).session_id
    assert read_metric(stack.coordinator, "specd_kept_sessions") == before + 1
    call.cancel()  # type: ignore[attr-defined]
    await eventually(lambda: read_metric(stack.coordinator, "specd_kept_sessions") == before)
    gone = (grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND")
    assert await refusal(client.generate("x", session_id=session_id)) == gone
    with pytest.raises(grpc.aio.AioRpcError):
        await complete(client, "x", num_draft_tokens=33)
    assert read_metric(stack.coordinator, "specd_kept_sessions") == before


# -- Conversations


async def test_a_conversation_goes_on(own_client: Client) -> None:
    sessions = SessionServiceStub(own_client.channel)
    fields: dict[str, Any] = {"max_tokens": 8, "stop": IGNORE_EOS}
    arguments = {"opening": "def"}
    first = await complete(own_client, chat_of([SYSTEM, QUESTION], [TOOL], arguments), **fields)
    session_id = first.last.session_id
    said = [SYSTEM, QUESTION, {"role": "assistant", "content": first.text}]

    async def same_as_a_new_one(turn: Completion, chat: Chat) -> None:
        new = await complete(own_client, chat, num_draft_tokens=0, **fields)
        assert new.last.session_id != session_id
        assert turn.last.session_id == session_id
        assert turn.statistics.prompt_tokens == new.statistics.prompt_tokens
        assert turn.token_ids == new.token_ids
        assert turn.text == new.text

    # Only what is new comes; tools and arguments stay.
    second = await complete(own_client, chat_of([QUESTION]), session_id=session_id, **fields)
    said.append(QUESTION)
    # All up to the reply, and of that what the tokenizer writes as the model did.
    for reused in (second.statistics.target_reused_tokens, second.statistics.draft_reused_tokens):
        assert first.statistics.prompt_tokens - 1 <= reused < second.statistics.prompt_tokens
    await same_as_a_new_one(second, chat_of(said, [TOOL], arguments))
    said.append({"role": "assistant", "content": second.text})

    # With other tools and arguments.
    tools = [TOOL, {"type": "function", "function": {"name": "stop"}}]
    third = await complete(own_client, chat_of([QUESTION], tools, {"opening": ""}), session_id=session_id, **fields)
    said.append(QUESTION)
    await same_as_a_new_one(third, chat_of(said, tools, {"opening": ""}))

    # The reply itself goes on.
    fourth = await complete(own_client, "", session_id=session_id, **fields)
    before = third.statistics.prompt_tokens + len(third.tokens)
    assert fourth.statistics.prompt_tokens == before
    assert fourth.statistics.target_reused_tokens >= before - MAX_LOST
    said.append({"role": "assistant", "content": third.text + fourth.text})

    # A message that the client begins, and the model ends.
    fifth = await complete(
        own_client, chat_of([QUESTION, REPLY], continue_final_message=True), session_id=session_id, **fields
    )
    said += [QUESTION, REPLY]
    await same_as_a_new_one(fifth, chat_of(said, tools, {"opening": ""}, continue_final_message=True))
    said[-1] = {**REPLY, "content": REPLY["content"] + fifth.text}
    sixth = await complete(own_client, chat_of([QUESTION]), session_id=session_id, **fields)
    await same_as_a_new_one(sixth, chat_of([*said, QUESTION], tools, {"opening": ""}))
    assert (await get(sessions, session_id)).session.num_turns == 6

    for prompt in ("x", [5]):
        code, reason = await refusal(own_client.generate(prompt, session_id=session_id))
        assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "CONTRADICTION")
    code, reason = await refusal(own_client.generate(chat_of([]), session_id=session_id))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "EMPTY_PROMPT")
    failing = chat_of([{"role": "nobody", "content": ""}])
    code, reason = await refusal(own_client.generate(failing, session_id=session_id))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "CHAT_TEMPLATE_FAILED")
    assert (await get(sessions, session_id)).session.num_turns == 6


async def test_a_session_of_text_takes_no_conversation(own_client: Client) -> None:
    turn = await complete(own_client, max_tokens=2)
    code, reason = await refusal(own_client.generate(chat_of([QUESTION]), session_id=turn.last.session_id))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "CONTRADICTION")


# -- When sessions are forgotten


@asynccontextmanager
async def another_coordinator(stack: Stack, directory: Path, **settings: str) -> AsyncIterator[Client]:
    """Run a coordinator with other settings for the workers of a stack, and yield its client."""
    assert stack.draft is not None
    address = f"unix:{directory / 'coordinator'}"
    options = ["--target", stack.target.facts["address"], "--draft", stack.draft.facts["address"]]
    variables = {f"SPECD_COORDINATOR_{name.upper()}": value for name, value in settings.items()}
    async with start_specd(
        "coordinator", *options, "--listen", address, "--metrics-listen", "", **variables
    ) as coordinator:
        await coordinator.next_event("ready")
        async with Client(address) as connected:
            yield connected


async def test_sessions_expire(stack: Stack, tmp_path: Path) -> None:
    async with another_coordinator(stack, tmp_path, session_idle_seconds="1") as client:
        turn = await complete(client, max_tokens=2)
        kept = SessionServiceStub(client.channel)
        while (await kept.ListSessions(ListSessionsRequest())).sessions:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        gone = (grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND")
        assert await refusal(client.generate("", session_id=turn.last.session_id)) == gone
        # While it runs, a session does not expire, however long that takes.
        call = client.generate("def", **LONG)
        session_id = (await anext(aiter(call))).session_id
        await asyncio.sleep(1.2)
        responses = [response async for response in call]
        assert responses[-1].statistics.generated_tokens == LONG["max_tokens"]
        assert responses[-1].session_id == session_id


async def test_the_least_recently_used_sessions_go_when_there_are_too_many_tokens(stack: Stack, tmp_path: Path) -> None:
    async with another_coordinator(stack, tmp_path, session_budget_tokens="60") as client:
        kept = SessionServiceStub(client.channel)

        async def turn(num_tokens: int, session_id: str = "") -> str:
            prompt = [5] * (num_tokens - 2)
            return (await complete(client, prompt, max_tokens=2, session_id=session_id)).last.session_id

        async def listed() -> list[str]:
            return [session.session_id for session in (await kept.ListSessions(ListSessionsRequest())).sessions]

        first, second, third = [await turn(20) for _ in range(3)]
        assert await listed() == [third, second, first]
        fourth = await turn(10)
        assert await listed() == [fourth, third, second]
        await turn(10, second)
        assert await listed() == [second, fourth, third]
        await turn(2, third)  # which is no longer the one to go
        assert await listed() == [third, second]
        too_large = await turn(61)
        assert await listed() == [third, second]
        gone = (grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND")
        assert await refusal(client.generate("", session_id=too_large)) == gone
        assert await refusal(client.generate("", session_id=first)) == gone


# -- The workers behind sessions


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
async def test_sessions_that_end_take_no_more_memory_than_they_may(own_stack: Stack, own_client: Client) -> None:
    assert own_stack.draft is not None

    async def run(draft: DraftServiceStub, number: int) -> None:
        """A session of a token, and, because it would not take the draft, one there."""
        prompt = [5 + number % 4000, number, number // 2]
        await complete(own_client, prompt, max_tokens=1)
        proposals = draft.Propose(iter([ProposeRequest(token_ids=prompt, num_draft_tokens=2)]))
        assert [len(proposal.token_ids) async for proposal in proposals] == [2]

    resident = []
    for half in range(2):
        async with open_channel(own_stack.draft.facts["address"]) as channel:
            draft = DraftServiceStub(channel)
            for start in range(250 * half, 250 * (half + 1), 5):
                await asyncio.gather(*(run(draft, number) for number in range(start, start + 5)))
        await wait_until_idle(own_stack)
        for worker in (own_stack.target, own_stack.draft):
            assert 0 < read_metric(worker, "specd_worker_prefix_cache_bytes") <= PREFIX_CACHE_BYTES
            assert read_metric(worker, "specd_worker_prefix_cache_evictions_total") > 200 * (half + 1)
        resident.append([resident_mib(child) for child in own_stack.children])
    for child, before, after in zip(own_stack.children, *resident, strict=True):
        assert after - before < 8, child.name


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
async def test_a_session_survives_the_target(own_stack: Stack, own_client: Client, num_draft_tokens: int) -> None:
    fields: dict[str, Any] = {"max_tokens": 10, "stop": IGNORE_EOS}
    sampling = SamplingParameters(temperature=0.8, top_k=100, seed=3)
    whole = await complete(own_client, sampling=sampling, num_draft_tokens=0, **{**fields, "max_tokens": 20})
    first = await complete(own_client, sampling=sampling, num_draft_tokens=num_draft_tokens, **fields)

    os.kill(own_stack.target.pid, signal.SIGKILL)
    second = await complete(
        own_client,
        "",
        session_id=first.last.session_id,
        sampling=sampling,
        num_draft_tokens=num_draft_tokens,
        **fields,
    )
    assert [*first.token_ids, *second.token_ids] == whole.token_ids
    assert second.statistics.target_reused_tokens == 0
