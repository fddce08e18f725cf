"""What callers can get wrong: every mistake gets a status that says so, nothing crashes and nothing stays behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry

from coordinator.coordinator import Coordinator
from coordinator.drafter import NoDraft
from coordinator.metrics import CoordinatorMetrics
from specd.channel import open_channel
from specd.client import Client
from specd.errors import DOMAIN, InvalidRequestError, error_info
from specd.model_info import ModelInfo
from specd.server import MAX_MESSAGE_BYTES
from specd.settings import CoordinatorSettings
from specd.supervisor import Child, Stack
from specd.v1 import draft_pb2_grpc, generation_pb2_grpc, target_pb2_grpc
from specd.v1.draft_pb2 import ProposeRequest
from specd.v1.generation_pb2 import GenerateRequest, TokenIds
from specd.v1.target_pb2 import VerifyRequest
from tests.processes import PATIENCE_SECONDS, eventually, read_metric, wait_until_idle

pytestmark = pytest.mark.processes

# Of the embedded pair.
VOCABULARY_SIZE = 8192
CONTEXT_LENGTH = 2048
END_TOKEN = 0

LARGEST_UINT32 = 2**32 - 1
OUT_OF_VOCABULARY = (VOCABULARY_SIZE, 2**31 - 1, LARGEST_UINT32)

NOT_PROTOBUF = b"\xff\xff\xff"
# gRPC parses messages itself, and chooses the status itself.
PARSE_ERRORS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}


async def responses_to(call: AsyncIterator[Any]) -> list[Any]:
    async with asyncio.timeout(PATIENCE_SECONDS):
        return [response async for response in call]


async def error_of(call: AsyncIterator[Any]) -> grpc.aio.AioRpcError:
    """Read a stream that must end with an error."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await responses_to(call)
    return raised.value


# -- Generate


@pytest.fixture(scope="module")
def generation(client: Client) -> generation_pb2_grpc.GenerationServiceStub:
    return generation_pb2_grpc.GenerationServiceStub(client.channel)


@pytest.fixture
async def unharmed(stack: Stack, client: Client) -> AsyncIterator[None]:
    """After the test, the processes are still the same, hold no session, and serve the next request."""
    pids = [child.pid for child in stack.children]
    yield
    await wait_until_idle(stack)
    responses = await responses_to(client.generate("import", max_tokens=3))
    assert responses[-1].statistics.generated_tokens == 3
    assert [child.pid for child in stack.children] == pids


BAD_GENERATE_REQUESTS = [
    pytest.param(GenerateRequest(), "EMPTY_PROMPT", "prompt", id="no prompt"),
    pytest.param(GenerateRequest(text=""), "EMPTY_PROMPT", "prompt", id="empty text"),
    pytest.param(GenerateRequest(token_ids=TokenIds()), "EMPTY_PROMPT", "prompt", id="empty token ids"),
    pytest.param(
        GenerateRequest(token_ids=TokenIds(ids=[5] * 48), max_tokens=2001),
        "CONTEXT_EXCEEDED",
        "max_tokens can be at most 2000",
        id="prompt and max_tokens over the context",
    ),
    pytest.param(
        GenerateRequest(token_ids=TokenIds(ids=[5] * CONTEXT_LENGTH)),
        "CONTEXT_EXCEEDED",
        "the prompt has 2048 tokens",
        id="prompt fills the context",
    ),
    pytest.param(
        GenerateRequest(token_ids=TokenIds(ids=[5] * 100_000)),
        "CONTEXT_EXCEEDED",
        "the prompt has 100000 tokens",
        id="prompt over the context",
    ),
    pytest.param(GenerateRequest(text="é" * 500_000), "CONTEXT_EXCEEDED", "the context of", id="a megabyte of text"),
    pytest.param(GenerateRequest(text="a", num_draft_tokens=33), "OUT_OF_RANGE", "num_draft_tokens is 33", id="k 33"),
    pytest.param(
        GenerateRequest(text="a", num_draft_tokens=LARGEST_UINT32),
        "OUT_OF_RANGE",
        f"num_draft_tokens is {LARGEST_UINT32}",
        id="largest k",
    ),
    pytest.param(GenerateRequest(text="a", max_tokens=0), "OUT_OF_RANGE", "max_tokens is 0", id="max_tokens 0"),
    pytest.param(
        GenerateRequest(text="a", max_tokens=LARGEST_UINT32),
        "CONTEXT_EXCEEDED",
        f"max_tokens {LARGEST_UINT32}",
        id="largest max_tokens",
    ),
    *(
        pytest.param(
            GenerateRequest(token_ids=TokenIds(ids=[5, token_id, 7])),
            "TOKEN_OUT_OF_VOCABULARY",
            f"token_ids has {token_id}",
            id=f"token {token_id}",
        )
        for token_id in OUT_OF_VOCABULARY
    ),
]


@pytest.mark.usefixtures("unharmed")
@pytest.mark.parametrize(("request_", "reason", "named"), BAD_GENERATE_REQUESTS)
async def test_generate_refuses(
    generation: generation_pb2_grpc.GenerationServiceStub, request_: GenerateRequest, reason: str, named: str
) -> None:
    error = await error_of(generation.Generate(request_))

    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (error_info(error).domain, error_info(error).reason) == (DOMAIN, reason)
    assert named in (error.details() or "")


@pytest.mark.usefixtures("unharmed")
async def test_a_message_that_is_too_large_is_refused(generation: generation_pb2_grpc.GenerationServiceStub) -> None:
    error = await error_of(generation.Generate(GenerateRequest(text="x" * (MAX_MESSAGE_BYTES + 1))))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.usefixtures("unharmed")
async def test_bytes_that_are_no_request_are_refused(client: Client) -> None:
    error = await error_of(client.channel.unary_stream("/specd.v1.GenerationService/Generate")(NOT_PROTOBUF))
    assert error.code() in PARSE_ERRORS


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("\0", id="NUL"),
        pytest.param("a\0b", id="NUL inside"),
        pytest.param("\ufffe", id="noncharacter"),
        pytest.param("\U0010ffff", id="last code point"),
        pytest.param("\u0301", id="combining accent alone"),
        pytest.param("\u200d", id="joiner alone"),
        pytest.param("\ufeff", id="byte order mark"),
        pytest.param("\u202e", id="right-to-left override"),
        pytest.param("🏳️‍🌈", id="emoji of four code points"),
        pytest.param("<|endoftext|>", id="special token as text"),
        pytest.param("\r\n\t ", id="white space"),
    ],
)
async def test_generate_continues_any_text(client: Client, text: str) -> None:
    completions = [
        await responses_to(client.generate(text, max_tokens=6, num_draft_tokens=num_draft_tokens))
        for num_draft_tokens in (0, 4)
    ]

    alone, speculative = ([token for r in responses for token in r.tokens] for responses in completions)
    assert [token.id for token in alone] == [token.id for token in speculative]
    assert [token.text for token in alone] == [token.text for token in speculative]
    assert len(alone) == 6 or alone[-1].id == END_TOKEN


async def test_a_long_text_is_encoded_beside_the_event_loop() -> None:
    """A megabyte takes a second, in which other sessions go on."""

    class SlowTokenizer:
        def encode(self, text: str) -> list[int]:
            threads.append(threading.current_thread())
            return [5] * len(text)

    threads: list[threading.Thread] = []
    coordinator = Coordinator(
        CoordinatorSettings(),
        CoordinatorMetrics(CollectorRegistry()),
        model=ModelInfo("m", "llama", "", "", VOCABULARY_SIZE, CONTEXT_LENGTH, (END_TOKEN,), "float32", "cpu"),
        tokenizer=cast(Any, SlowTokenizer()),
        target=cast(Any, None),
        draft=NoDraft(),
    )
    with pytest.raises(InvalidRequestError):
        await anext(coordinator.generate("x" * 5000, max_tokens=None, num_draft_tokens=None))
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


@pytest.mark.usefixtures("unharmed")
async def test_clients_that_go_away_leave_nothing(stack: Stack, client: Client) -> None:
    calls = [client.generate(f"def f{i}():", max_tokens=1000) for i in range(12)]
    first_responses = [await anext(aiter(call)) for call in calls]
    assert all(response.tokens for response in first_responses)
    assert read_metric(stack.coordinator, "specd_active_sessions") == len(calls)

    for call in calls:
        call.cancel()


# -- The streams of the workers


@pytest.fixture(scope="module")
async def target(stack: Stack) -> AsyncIterator[target_pb2_grpc.TargetServiceStub]:
    async with open_channel(stack.target.facts["address"]) as channel:
        yield target_pb2_grpc.TargetServiceStub(channel)


@pytest.fixture(scope="module")
async def draft(stack: Stack) -> AsyncIterator[draft_pb2_grpc.DraftServiceStub]:
    assert stack.draft is not None
    async with open_channel(stack.draft.facts["address"]) as channel:
        yield draft_pb2_grpc.DraftServiceStub(channel)


class WorkerStream:
    """A session's stream to one of the workers, and the two services alike: token ids and a number of draft tokens.

    To the target the draft tokens are the same ones each time, so its answers depend on nothing but the request.
    """

    def __init__(self, call: grpc.aio.StreamStreamCall[Any, Any], kind: type[Message]) -> None:
        self.call = call
        self._kind = kind

    async def send(
        self, token_ids: Sequence[int], *, position: int = 0, num_draft_tokens: int = 4, round_: int = 1
    ) -> None:
        fields: dict[str, Any] = {"round": round_, "position": position, "token_ids": token_ids}
        if self._kind is ProposeRequest:
            fields["num_draft_tokens"] = num_draft_tokens
        else:
            fields["proposal"] = [5] * num_draft_tokens
        await self.call.write(self._kind(**fields))

    async def receive(self) -> Any:
        """Return the next answer without its times, or EOF."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            response = await self.call.read()
        if response is not grpc.aio.EOF:
            response.ClearField("time")
        return response

    async def ask(self, token_ids: Sequence[int], *, position: int = 0) -> Any:
        await self.send(token_ids, position=position)
        return await self.receive()

    async def error(self) -> grpc.aio.AioRpcError:
        """Read to the error that ends the stream."""
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            while await self.receive() is not grpc.aio.EOF:
                pass
        return raised.value


class Worker:
    """One of the two workers of the shared stack."""

    def __init__(self, child: Child, open_call: grpc.aio.StreamStreamMultiCallable[Any, Any], kind: type[Message]):
        self.child = child
        self._open_call = open_call
        self._kind = kind

    def open_stream(self) -> WorkerStream:
        return WorkerStream(self._open_call(), self._kind)

    async def ask_on_a_new_stream(self, token_ids: Sequence[int]) -> Any:
        stream = self.open_stream()
        answer = await stream.ask(token_ids)
        stream.call.cancel()
        return answer

    def active_sessions(self) -> float:
        return read_metric(self.child, "specd_worker_active_sessions")

    def superseded_requests(self) -> float:
        return read_metric(self.child, "specd_worker_requests_total", outcome="superseded")


@pytest.fixture(params=["draft", "target"])
def worker(
    request: pytest.FixtureRequest,
    stack: Stack,
    draft: draft_pb2_grpc.DraftServiceStub,
    target: target_pb2_grpc.TargetServiceStub,
) -> Worker:
    assert stack.draft is not None
    return {
        "draft": Worker(stack.draft, draft.Propose, ProposeRequest),
        "target": Worker(stack.target, target.Verify, VerifyRequest),
    }[request.param]


@pytest.fixture(scope="module")
async def token_ids(client: Client) -> list[int]:
    """64 tokens of a text that the models know how to continue."""
    responses = await responses_to(client.generate("class Stack:\n    def", max_tokens=64))
    generated = [token.id for response in responses for token in response.tokens]
    assert len(generated) == 64
    return generated


BAD_FIELDS = [
    pytest.param({"token_ids": []}, "EMPTY_TOKEN_IDS", "token_ids is empty", id="no token ids"),
    *(
        pytest.param({"token_ids": [5, token_id]}, "TOKEN_OUT_OF_VOCABULARY", f"token_ids has {token_id}", id=name)
        for token_id, name in zip(OUT_OF_VOCABULARY, ["first id", "largest int32", "largest uint32"], strict=True)
    ),
    pytest.param({"token_ids": [5], "num_draft_tokens": 33}, "OUT_OF_RANGE", "33 draft tokens", id="33 draft tokens"),
    pytest.param({"token_ids": [5] * 2049}, "CONTEXT_EXCEEDED", "2049 token_ids", id="too many token ids"),
    pytest.param({"token_ids": [5] * 2045}, "CONTEXT_EXCEEDED", "make 2049", id="no room for the draft tokens"),
    pytest.param(
        {"token_ids": [5], "position": LARGEST_UINT32}, "CONTEXT_EXCEEDED", str(LARGEST_UINT32), id="largest position"
    ),
]


@pytest.mark.usefixtures("unharmed")
@pytest.mark.parametrize(("fields", "reason", "named"), BAD_FIELDS)
async def test_a_worker_refuses(worker: Worker, fields: dict[str, Any], reason: str, named: str) -> None:
    stream = worker.open_stream()
    await stream.send(**fields)
    error = await stream.error()

    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (error_info(error).domain, error_info(error).reason) == (DOMAIN, reason)
    assert named in (error.details() or "")


@pytest.mark.usefixtures("unharmed")
@pytest.mark.parametrize("token_id", OUT_OF_VOCABULARY)
async def test_the_target_refuses_proposals_outside_the_vocabulary(
    target: target_pb2_grpc.TargetServiceStub, token_id: int
) -> None:
    error = await error_of(target.Verify(iter([VerifyRequest(token_ids=[5], proposal=[7, token_id])])))

    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error_info(error).reason == "TOKEN_OUT_OF_VOCABULARY"
    assert f"proposal has {token_id}" in (error.details() or "")


@pytest.mark.usefixtures("unharmed")
async def test_the_draft_refuses_an_absurd_number_of_draft_tokens(draft: draft_pb2_grpc.DraftServiceStub) -> None:
    error = await error_of(draft.Propose(iter([ProposeRequest(token_ids=[5], num_draft_tokens=LARGEST_UINT32)])))

    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error_info(error).reason == "OUT_OF_RANGE"
    assert str(LARGEST_UINT32) in (error.details() or "")


@pytest.mark.usefixtures("unharmed")
async def test_a_worker_refuses_bytes_that_are_no_request(worker: Worker) -> None:
    method = "DraftService/Propose" if worker.child.name == "draft-worker" else "TargetService/Verify"
    async with open_channel(worker.child.facts["address"]) as channel:
        error = await error_of(channel.stream_stream(f"/specd.v1.{method}")(iter([NOT_PROTOBUF])))
    assert error.code() in PARSE_ERRORS


@pytest.mark.usefixtures("unharmed")
async def test_a_position_beyond_the_cache_is_refused_with_the_length_of_the_cache(
    worker: Worker, token_ids: list[int]
) -> None:
    stream = worker.open_stream()
    answer = await stream.ask(token_ids[:10])
    await stream.send(token_ids[20:], position=20)
    error = await stream.error()

    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert error_info(error).reason == "CACHE_TOO_SHORT"
    assert dict(error_info(error).metadata) == {"cached_len": str(answer.cached_len)}
    assert "position is 20" in (error.details() or "")


async def test_a_new_stream_holds_nothing(worker: Worker, token_ids: list[int]) -> None:
    stream = worker.open_stream()
    await stream.send(token_ids[1:], position=1)
    error = await stream.error()

    assert error_info(error).reason == "CACHE_TOO_SHORT"
    assert error_info(error).metadata["cached_len"] == "0"


@pytest.mark.parametrize("same_start", [True, False], ids=["same start", "another start"])
async def test_a_newer_request_supersedes_the_older(worker: Worker, token_ids: list[int], same_start: bool) -> None:
    long = token_ids * 30
    newer = long[:600] if same_start else token_ids[7:20]
    expected = await worker.ask_on_a_new_stream(newer)
    superseded_before = worker.superseded_requests()

    stream = worker.open_stream()
    await stream.send(long, round_=1)
    await stream.send(newer, round_=2)
    await stream.call.done_writing()
    answer = await stream.receive()

    assert answer.round == 2
    answer.round = expected.round
    assert answer == expected
    assert await stream.receive() is grpc.aio.EOF
    assert worker.superseded_requests() == superseded_before + 1


async def test_the_same_request_gets_the_same_answer(worker: Worker, token_ids: list[int]) -> None:
    stream = worker.open_stream()
    await stream.ask(token_ids[:20])
    first = await stream.ask(token_ids[20:30], position=20)
    again = await stream.ask(token_ids[20:30], position=20)

    assert first == again == await worker.ask_on_a_new_stream(token_ids[:30])
    stream.call.cancel()


async def test_after_a_rewind_answers_are_those_of_a_fresh_cache(worker: Worker, token_ids: list[int]) -> None:
    stream = worker.open_stream()
    await stream.ask(token_ids)
    # Backwards, then forwards again to where the cache ends now, then onto tokens that it never held.
    for position in (63, 50, 33, 17, 1, 0, 5, 8):
        rest = token_ids[position : position + 5]
        assert await stream.ask(rest, position=position) == await worker.ask_on_a_new_stream(
            token_ids[:position] + rest
        )
    other = token_ids[40:50]
    assert await stream.ask(other, position=6) == await worker.ask_on_a_new_stream(token_ids[:6] + other)
    stream.call.cancel()


async def test_a_half_closed_stream_still_gets_its_answer(worker: Worker, token_ids: list[int]) -> None:
    stream = worker.open_stream()
    await stream.send(token_ids)
    await stream.call.done_writing()

    assert await stream.receive() == await worker.ask_on_a_new_stream(token_ids)
    assert await stream.receive() is grpc.aio.EOF
    assert await stream.call.code() is grpc.StatusCode.OK


@pytest.mark.usefixtures("unharmed")
async def test_a_stream_without_a_request_ends_well(worker: Worker) -> None:
    stream = worker.open_stream()
    await stream.call.done_writing()
    assert await stream.receive() is grpc.aio.EOF
    assert await stream.call.code() is grpc.StatusCode.OK


@pytest.mark.usefixtures("unharmed")
async def test_dropped_streams_leave_no_session(worker: Worker, token_ids: list[int]) -> None:
    streams = [worker.open_stream() for _ in range(40)]
    for stream in streams:
        await stream.send(token_ids[:4])
    for stream in streams[:20]:
        await stream.receive()
    await eventually(lambda: worker.active_sessions() == len(streams))

    for stream in streams:
        stream.call.cancel()  # half of them with a request under way


# -- Health and reflection

SERVICES = {
    "coordinator": {"specd.v1.GenerationService"},
    "draft-worker": {"specd.v1.DraftService", "specd.v1.ModelService"},
    "target-worker": {"specd.v1.TargetService", "specd.v1.ModelService"},
}


@pytest.fixture(params=SERVICES)
async def process(request: pytest.FixtureRequest, stack: Stack) -> Child:
    return next(child for child in stack.children if child.name == request.param)


async def test_health_answers_for_the_process_and_its_services(process: Child) -> None:
    async with open_channel(process.facts["address"]) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", *SERVICES[process.name]):
            response = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert response.status == health_pb2.HealthCheckResponse.SERVING

        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await health.Check(health_pb2.HealthCheckRequest(service="specd.v1.NoSuchService"))
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_the_services_and_their_files(process: Child) -> None:
    async with open_channel(process.facts["address"]) as channel:
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        questions = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            *(
                reflection_pb2.ServerReflectionRequest(file_containing_symbol=service)
                for service in SERVICES[process.name]
            ),
        ]
        listing, *files = await responses_to(reflection.ServerReflectionInfo(iter(questions)))

    assert {service.name for service in listing.list_services_response.service} == SERVICES[process.name] | {
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert all(file.file_descriptor_response.file_descriptor_proto for file in files)
