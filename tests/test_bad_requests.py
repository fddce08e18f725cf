"""What callers can get wrong: every mistake gets a status that says so, nothing crashes and nothing stays behind."""

from __future__ import annotations

import asyncio
import math
import struct
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import grpc
import mlx.core as mx
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry

from coordinator.coordinator import Coordinator
from coordinator.drafter import NoDraft
from coordinator.metrics import CoordinatorMetrics
from coordinator.request import GenerationRequest
from specd.channel import open_channel
from specd.client import Client
from specd.deferred import Deferred
from specd.errors import DOMAIN, InvalidRequestError, error_info
from specd.model_info import ModelInfo
from specd.server import MAX_MESSAGE_BYTES
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET, CoordinatorSettings
from specd.step_costs import StepCosts
from specd.supervisor import Child, Stack
from specd.v1 import draft_pb2_grpc, generation_pb2_grpc, target_pb2_grpc
from specd.v1.draft_pb2 import ProposeRequest
from specd.v1.generation_pb2 import Chat, GenerateRequest, StopConditions, TokenIds
from specd.v1.sampling_pb2 import (
    ACCEPTANCE_METHOD_COUPLED,
    ACCEPTANCE_METHOD_REJECTION,
    SamplingParameters,
    SessionSampling,
    TokenDistribution,
)
from specd.v1.target_pb2 import VerifyRequest
from specd.worker.engine import Engine, Steps
from specd.worker.live_caches import LiveCaches
from specd.worker.metrics import WorkerMetrics
from specd.worker.prefix_cache import PrefixCache
from specd.worker.session import WorkerSession
from specd.worker.session_stream import SessionStreams
from specd.worker.worker import Worker as SpecdWorker
from tests.driving import Chunks
from tests.models import save_poisoned, tiny_model
from tests.processes import PATIENCE_SECONDS, eventually, read_metric, wait_until_idle

pytestmark = pytest.mark.processes

# Of the embedded pair.
VOCABULARY_SIZE = 8192
CONTEXT_LENGTH = 2048
END_TOKEN = 0

LARGEST_UINT32 = 2**32 - 1
NAN, INF = math.nan, math.inf
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
    pytest.param(GenerateRequest(chat=Chat()), "EMPTY_PROMPT", "messages", id="chat without messages"),
    pytest.param(
        GenerateRequest(text="a", top_log_probabilities=21),
        "OUT_OF_RANGE",
        "top_log_probabilities is 21",
        id="21 log-probabilities",
    ),
    pytest.param(
        GenerateRequest(text="a", top_log_probabilities=LARGEST_UINT32),
        "OUT_OF_RANGE",
        f"top_log_probabilities is {LARGEST_UINT32}",
        id="most log-probabilities",
    ),
]

REJECTION: dict[str, Any] = {"acceptance": ACCEPTANCE_METHOD_REJECTION}

BAD_SAMPLING = [
    *(
        pytest.param(
            SamplingParameters(**{name: value}), "OUT_OF_RANGE", f"{name} is {value:.8g}", id=f"{name} {value:g}"
        )
        for name, values in {
            "temperature": (-1, 0.001, 1e-45, 101, NAN, INF, -INF),
            "top_p": (0, 1e-7, -0.5, 1 + 2**-23, NAN, INF),
            "min_p": (-0.5, 1.5, NAN, INF),
            "repetition_penalty": (0, 1e-30, -1, 11, NAN, INF),
            "presence_penalty": (-2.5, 2.5, NAN, INF),
            "frequency_penalty": (-2.5, 2.5, NAN, INF),
        }.items()
        for value in (struct.unpack("f", struct.pack("f", value))[0] for value in values)
    ),
    *(
        pytest.param(
            SamplingParameters(lenience=value, **REJECTION),
            "OUT_OF_RANGE",
            f"lenience is {value}",
            id=f"lenience {value}",
        )
        for value in (-0.5, 1.5, NAN, INF)
    ),
    pytest.param(SamplingParameters(lenience=0.5), "CONTRADICTION", "lenience is 0.5", id="lenience without method"),
    pytest.param(
        SamplingParameters(lenience=1, acceptance=ACCEPTANCE_METHOD_COUPLED),
        "CONTRADICTION",
        "acceptance is COUPLED",
        id="lenience with COUPLED",
    ),
    pytest.param(
        SamplingParameters(acceptance=cast(Any, 100)), "OUT_OF_RANGE", "acceptance is 100", id="unknown acceptance"
    ),
    *(
        pytest.param(
            SamplingParameters(penalty_context_size=size, presence_penalty=1),
            "OUT_OF_RANGE",
            f"penalty_context_size is {size}",
            id=f"penalty_context_size {size}",
        )
        for size in (2**31, LARGEST_UINT32)
    ),
    *(
        pytest.param(
            SamplingParameters(logit_bias={7: bias}),
            "OUT_OF_RANGE",
            f"logit_bias of token 7 is {bias}",
            id=f"bias {bias}",
        )
        for bias in (101, -101, NAN, INF, -INF)
    ),
    *(
        pytest.param(
            SamplingParameters(logit_bias={5: 1, token_id: 1}),
            "TOKEN_OUT_OF_VOCABULARY",
            f"logit_bias has {token_id}",
            id=f"bias of token {token_id}",
        )
        for token_id in OUT_OF_VOCABULARY
    ),
    pytest.param(
        SamplingParameters(logit_bias=dict.fromkeys(range(1025), 1)), "OUT_OF_RANGE", "1025 entries", id="1025 biases"
    ),
]

BAD_STOPS = [
    *(
        pytest.param(
            StopConditions(token_ids=[5, token_id]),
            "TOKEN_OUT_OF_VOCABULARY",
            f"stop.token_ids has {token_id}",
            id=f"stop token {token_id}",
        )
        for token_id in OUT_OF_VOCABULARY
    ),
    pytest.param(StopConditions(token_ids=[5] * 1025), "OUT_OF_RANGE", "1025 entries", id="1025 stop tokens"),
    pytest.param(StopConditions(strings=["x"] * 65), "OUT_OF_RANGE", "65 entries", id="65 stop strings"),
    pytest.param(StopConditions(strings=["x"] * 10_000), "OUT_OF_RANGE", "10000 entries", id="10000 stop strings"),
    pytest.param(StopConditions(strings=["x", ""]), "OUT_OF_RANGE", "'' of 0 characters", id="empty stop string"),
    pytest.param(StopConditions(strings=["é" * 257]), "OUT_OF_RANGE", "of 257 characters", id="long stop string"),
    pytest.param(
        StopConditions(strings=["é" * 1_000_000]), "OUT_OF_RANGE", "of 1000000 characters", id="a megabyte to stop at"
    ),
    pytest.param(StopConditions(min_tokens=4), "CONTRADICTION", "min_tokens is 4", id="min_tokens over max_tokens"),
    pytest.param(
        StopConditions(min_tokens=LARGEST_UINT32),
        "CONTRADICTION",
        f"min_tokens is {LARGEST_UINT32}",
        id="largest min_tokens",
    ),
]

BAD_GENERATE_REQUESTS += [
    *(
        pytest.param(
            GenerateRequest(text="a", max_tokens=3, sampling=parameter.values[0]),
            *parameter.values[1:],
            id=parameter.id,
        )
        for parameter in BAD_SAMPLING
    ),
    *(
        pytest.param(
            GenerateRequest(text="a", max_tokens=3, stop=parameter.values[0]), *parameter.values[1:], id=parameter.id
        )
        for parameter in BAD_STOPS
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
@pytest.mark.parametrize("session_id", ["nowhere", "\0\r\n", "☃" * 1_000_000], ids=["unknown", "controls", "huge"])
async def test_a_session_that_is_not_there_is_refused(
    generation: generation_pb2_grpc.GenerationServiceStub, session_id: str
) -> None:
    error = await error_of(generation.Generate(GenerateRequest(text="a", session_id=session_id)))

    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert (error_info(error).domain, error_info(error).reason) == (DOMAIN, "SESSION_NOT_FOUND")
    assert repr(session_id)[:60].rstrip("'") in (error.details() or "")


@pytest.mark.parametrize("temperature", [0.01, 100])
async def test_everything_at_its_limits_is_taken(client: Client, temperature: float) -> None:
    sampling = SamplingParameters(
        temperature=temperature,
        top_k=LARGEST_UINT32,
        top_p=1,
        min_p=0,
        repetition_penalty=0.01 if temperature > 1 else 10,
        presence_penalty=2,
        frequency_penalty=-2,
        penalty_context_size=2**31 - 1,
        logit_bias=dict.fromkeys(range(1, 1025), 100),
        seed=2**64 - 1,
        acceptance=ACCEPTANCE_METHOD_REJECTION,
        lenience=1,
    )
    stop = StopConditions(min_tokens=40, token_ids=range(1024), strings=[chr(300 + i) * 256 for i in range(64)])
    fields: dict[str, Any] = {"stop": stop, "max_tokens": 40, "num_draft_tokens": 32, "top_log_probabilities": 20}
    responses = await responses_to(client.generate("a", sampling=sampling, **fields))

    tokens = [token for response in responses for token in response.tokens]
    assert len(tokens) == 40
    assert all(token.id >= 1024 for token in tokens)
    assert all(len(token.log_probabilities.top_model) == 20 for token in tokens)
    assert responses[-1].seed == 2**64 - 1
    assert responses[-1].statistics.draft_fault == ""
    assert responses[-1].statistics.recovered_tokens == 0


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
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
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
        await anext(coordinator.generate(GenerationRequest("x" * 5000)))
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
        self,
        token_ids: Sequence[int],
        *,
        position: int = 0,
        num_draft_tokens: int = 4,
        round_: int = 1,
        sampling: SessionSampling | None = None,
    ) -> None:
        fields: dict[str, Any] = {"round": round_, "position": position, "token_ids": token_ids, "sampling": sampling}
        if self._kind is ProposeRequest:
            fields["num_draft_tokens"] = num_draft_tokens
        else:
            fields["proposal"] = [5] * num_draft_tokens
        await self.call.write(self._kind(**fields))

    async def receive(self) -> Any:
        """Return the next answer, or EOF, without what depends on the past: its times, and what was cached before."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            response = await self.call.read()
        if response is not grpc.aio.EOF:
            response.ClearField("time")
            response.ClearField("reused_len")
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
@pytest.mark.parametrize(
    ("fields", "reason", "named"),
    [
        ({"num_draft_tokens": 2, "num_ahead_tokens": 33}, "OUT_OF_RANGE", "num_ahead_tokens asks for 33"),
        ({"num_ahead_tokens": 3}, "CONTRADICTION", "num_draft_tokens is 0"),
        ({"num_draft_tokens": 2, "min_confidences": [0.5, 1.5]}, "OUT_OF_RANGE", "min_confidences has 1.5"),
        ({"num_draft_tokens": 2, "min_confidences": [float("nan")]}, "OUT_OF_RANGE", "min_confidences has nan"),
        ({"num_draft_tokens": 2, "min_confidences": [0.5] * 33}, "OUT_OF_RANGE", "min_confidences has 33 entries"),
        ({"num_draft_tokens": 2, "min_ahead_confidence": -1.0}, "OUT_OF_RANGE", "min_ahead_confidence has -1"),
        ({"token_ids": [5] * 2042, "num_draft_tokens": 3, "num_ahead_tokens": 3}, "CONTEXT_EXCEEDED", "make 2049"),
    ],
)
async def test_the_draft_refuses_to_go_nowhere_or_too_far(
    draft: draft_pb2_grpc.DraftServiceStub, fields: dict[str, Any], reason: str, named: str
) -> None:
    error = await error_of(draft.Propose(iter([ProposeRequest(**{"token_ids": [5], **fields})])))

    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error_info(error).reason == reason
    assert named in (error.details() or "")


@pytest.mark.usefixtures("unharmed")
async def test_the_draft_refuses_an_absurd_number_of_draft_tokens(draft: draft_pb2_grpc.DraftServiceStub) -> None:
    error = await error_of(draft.Propose(iter([ProposeRequest(token_ids=[5], num_draft_tokens=LARGEST_UINT32)])))

    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error_info(error).reason == "OUT_OF_RANGE"
    assert str(LARGEST_UINT32) in (error.details() or "")


BAD_SESSION_SAMPLING = [
    *(
        pytest.param(SessionSampling(parameters=parameter.values[0]), *parameter.values[1:], id=parameter.id)
        for parameter in BAD_SAMPLING
        if parameter.id in {"temperature nan", "temperature 0.001", "unknown acceptance", "bias nan"}
        or "of token" in str(parameter.id)
    ),
    *(
        pytest.param(
            SessionSampling(suppressed_token_ids=[5, token_id], suppressed_before=10),
            "TOKEN_OUT_OF_VOCABULARY",
            f"suppressed_token_ids has {token_id}",
            id=f"suppressed token {token_id}",
        )
        for token_id in OUT_OF_VOCABULARY
    ),
    pytest.param(
        SessionSampling(top_log_probabilities=21), "OUT_OF_RANGE", "top_log_probabilities is 21", id="log-probabilities"
    ),
    pytest.param(
        SessionSampling(vocabulary_size=LARGEST_UINT32),
        "OUT_OF_RANGE",
        f"vocabulary_size is {LARGEST_UINT32}",
        id="largest vocabulary",
    ),
    pytest.param(
        SessionSampling(vocabulary_size=100, parameters=SamplingParameters(logit_bias={100: 1})),
        "TOKEN_OUT_OF_VOCABULARY",
        "logit_bias has 100",
        id="bias outside the target's vocabulary",
    ),
    pytest.param(
        SessionSampling(vocabulary_size=100, suppressed_token_ids=[8000], suppressed_before=10),
        "TOKEN_OUT_OF_VOCABULARY",
        "suppressed_token_ids has 8000",
        id="suppressed outside the target's vocabulary",
    ),
]


@pytest.mark.usefixtures("unharmed")
@pytest.mark.parametrize(("sampling", "reason", "named"), BAD_SESSION_SAMPLING)
async def test_a_worker_refuses_sampling(worker: Worker, sampling: SessionSampling, reason: str, named: str) -> None:
    stream = worker.open_stream()
    await stream.send([5, 7], sampling=sampling)
    error = await stream.error()

    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (error_info(error).domain, error_info(error).reason) == (DOMAIN, reason)
    assert named in (error.details() or "")


@pytest.mark.usefixtures("unharmed")
async def test_a_worker_refuses_to_sample_otherwise_from_now_on(worker: Worker) -> None:
    stream = worker.open_stream()
    await stream.ask([5, 7])
    await stream.send([5, 7], sampling=SessionSampling())
    assert error_info(await stream.error()).reason == "CONTRADICTION"


# Penalties would read and write where the logits of these tokens are not.
IN_100_TOKENS = SessionSampling(vocabulary_size=100, parameters=SamplingParameters(presence_penalty=1))


@pytest.mark.usefixtures("unharmed")
async def test_the_target_refuses_a_vocabulary_smaller_than_its_own(target: target_pb2_grpc.TargetServiceStub) -> None:
    error = await error_of(target.Verify(iter([VerifyRequest(token_ids=[5, 8000], sampling=IN_100_TOKENS)])))
    assert error_info(error).reason == "OUT_OF_RANGE"
    assert "vocabulary_size is 100" in (error.details() or "")


@pytest.mark.usefixtures("unharmed")
async def test_the_draft_keeps_to_the_vocabulary_of_the_target(draft: draft_pb2_grpc.DraftServiceStub) -> None:
    first = ProposeRequest(token_ids=[5, 6, 7], num_draft_tokens=8, sampling=IN_100_TOKENS)
    (response,) = await responses_to(draft.Propose(iter([first])))
    assert len(response.token_ids) == 8
    assert max(response.token_ids) < 100
    first.token_ids.append(100)
    later = ProposeRequest(token_ids=[5, 100], num_draft_tokens=8)
    for requests in ([first], [ProposeRequest(token_ids=[5, 6, 7], sampling=IN_100_TOKENS), later]):
        error = await error_of(draft.Propose(iter(requests)))
        assert error_info(error).reason == "TOKEN_OUT_OF_VOCABULARY"


async def test_a_session_with_everything_suppressed_goes_on(worker: Worker) -> None:
    """Nothing can be chosen, which only a caller without sense can ask for: any token will do, as long as it is one."""
    everything = SessionSampling(suppressed_token_ids=range(VOCABULARY_SIZE), suppressed_before=LARGEST_UINT32)
    for temperature in (0, 1):
        everything.parameters.temperature = temperature
        stream = worker.open_stream()
        await stream.send([5, 7], sampling=everything)
        answer = await stream.receive()
        chosen = answer.token_ids if worker.child.name == "draft-worker" else [answer.next_token_id]
        assert all(token_id < VOCABULARY_SIZE for token_id in chosen)
        stream.call.cancel()


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def ids(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


SOUND = TokenDistribution(token_ids=ids(5, 6), probabilities=floats(0.5, 0.5))

BAD_DISTRIBUTIONS = [
    pytest.param([], "there are 0 distributions for 2", id="none"),
    pytest.param([SOUND], "there are 1 distributions for 2", id="one too few"),
    pytest.param([SOUND] * 3, "there are 3 distributions for 2", id="one too many"),
    *(
        pytest.param([SOUND, distribution], "distributions[1]", id=name)
        for name, distribution in {
            "empty": TokenDistribution(),
            "ids without probabilities": TokenDistribution(token_ids=ids(5, 6)),
            "fewer probabilities than ids": TokenDistribution(token_ids=ids(5, 6, 7), probabilities=floats(0.5, 0.5)),
            "more probabilities than ids": TokenDistribution(token_ids=ids(5, 6), probabilities=floats(0.2, 0.2, 0.6)),
            "longer than the vocabulary": TokenDistribution(probabilities=floats(*[1e-4] * (VOCABULARY_SIZE + 1))),
            "half a number": TokenDistribution(probabilities=b"\0\0\0"),
            "half an id": TokenDistribution(token_ids=b"\1\0\0\0\0", probabilities=floats(1)),
            "NaN": TokenDistribution(token_ids=ids(5), probabilities=floats(NAN)),
            "infinite": TokenDistribution(token_ids=ids(5), probabilities=floats(INF)),
            "negative": TokenDistribution(token_ids=ids(5, 6), probabilities=floats(1.5, -0.5)),
            "id outside": TokenDistribution(token_ids=ids(VOCABULARY_SIZE), probabilities=floats(1)),
            "largest id": TokenDistribution(token_ids=ids(LARGEST_UINT32), probabilities=floats(1)),
        }.items()
    ),
]
REJECTING = SessionSampling(parameters=SamplingParameters(temperature=1, seed=1, **REJECTION))


@pytest.mark.usefixtures("unharmed")
@pytest.mark.parametrize(("distributions", "named"), BAD_DISTRIBUTIONS)
async def test_the_target_refuses_distributions(
    target: target_pb2_grpc.TargetServiceStub, distributions: list[TokenDistribution], named: str
) -> None:
    request = VerifyRequest(token_ids=[5], proposal=[5, 6], sampling=REJECTING, distributions=distributions)
    error = await error_of(target.Verify(iter([request])))

    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (error_info(error).domain, error_info(error).reason) == (DOMAIN, "BROKEN_DISTRIBUTION")
    assert named in (error.details() or "")


@pytest.mark.usefixtures("unharmed")
async def test_distributions_that_nobody_asked_for_take_no_memory(target: target_pb2_grpc.TargetServiceStub) -> None:
    """With a vocabulary each, these would be a hundred gigabytes."""
    request = VerifyRequest(token_ids=[5], proposal=[5], distributions=[SOUND] * 2_000_000)
    error = await error_of(target.Verify(iter([request])))
    assert error_info(error).reason == "BROKEN_DISTRIBUTION"


async def test_odd_distributions_are_taken(target: target_pb2_grpc.TargetServiceStub) -> None:
    """What sums to nothing, or to far too much, costs exactness, which is the affair of who sends it."""
    odd = [
        TokenDistribution(token_ids=ids(5), probabilities=floats(0)),
        TokenDistribution(probabilities=floats(0.5)),  # a draft's rows, of which there can be fewer
        TokenDistribution(token_ids=ids(5, 5), probabilities=floats(0.1, 0.2)),
        TokenDistribution(token_ids=ids(*range(VOCABULARY_SIZE)), probabilities=floats(*[3e38] * VOCABULARY_SIZE)),
    ]
    request = VerifyRequest(token_ids=[5], proposal=[5] * len(odd), sampling=REJECTING, distributions=odd)
    (response,) = await responses_to(target.Verify(iter([request])))
    assert response.num_accepted <= len(odd)
    assert response.next_token_id < VOCABULARY_SIZE


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


async def test_a_status_waits_for_the_answer_that_is_being_sent() -> None:
    """GRPC refuses to send a status meanwhile, and the caller would wait for one for ever."""

    def begin(worker: object, session: object, request: ProposeRequest) -> Steps[None]:
        if not request.token_ids:
            raise InvalidRequestError("EMPTY_TOKEN_IDS", "empty")
        return nothing()

    def nothing() -> Steps[None]:
        return
        yield

    class Context:
        """The server's end of a call whose client takes its time."""

        def __init__(self) -> None:
            self.requests = [ProposeRequest(token_ids=[5]), ProposeRequest()]
            self.is_sending = False
            self.sending = asyncio.Event()
            self.status: grpc.Status | None = None

        def invocation_metadata(self) -> tuple[()]:
            return ()

        async def read(self) -> ProposeRequest:
            if len(self.requests) == 1:
                await self.sending.wait()
            return self.requests.pop(0)

        async def write(self, answer: object) -> None:
            self.is_sending = True
            self.sending.set()
            for _ in range(10):
                await asyncio.sleep(0)
            self.is_sending = False

        async def abort_with_status(self, status: grpc.Status) -> None:
            assert not self.is_sending
            self.status = status
            raise grpc.aio.AbortError

    worker = Deferred[SpecdWorker]("the model")
    engine, prefixes, caches = Engine(mx.clear_streams), PrefixCache(0), LiveCaches(10**9)
    metrics = WorkerMetrics(CollectorRegistry(), caches, prefixes, bytes_per_token=1)
    costs = StepCosts({1: {1: 0.01}})
    worker.set(SpecdWorker(engine, tiny_model(), caches, prefixes, metrics, chunk=Chunks(512), costs=costs))
    streams = SessionStreams[WorkerSession, ProposeRequest, None, None](
        worker, new_session=WorkerSession, begin=begin, answer=lambda *_: None
    )
    context = Context()
    with pytest.raises(grpc.aio.AbortError):
        await streams.serve(cast(Any, context))
    engine.stop()
    assert context.status is not None
    assert context.status.code is grpc.StatusCode.INVALID_ARGUMENT


# -- Models whose logits are not finite

DRAFT_NAN, DRAFT_INF, TARGET_NAN, TARGET_INF = range(VOCABULARY_SIZE - 4, VOCABULARY_SIZE)


@pytest.fixture(scope="module")
async def poisoned_stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """The embedded pair, but the draft fails after two of the tokens and the target after two others."""
    directory = tmp_path_factory.mktemp("poisoned")
    target = save_poisoned(EMBEDDED_TARGET, directory / "target", nan=TARGET_NAN, inf=TARGET_INF)
    draft = save_poisoned(EMBEDDED_DRAFT, directory / "draft", nan=DRAFT_NAN, inf=DRAFT_INF)
    async with Stack(target=target, draft=draft) as running:
        yield running


@pytest.fixture
async def poisoned(poisoned_stack: Stack) -> AsyncIterator[Client]:
    """A client of it; after the test the processes are still the same, hold no session, and serve."""
    pids = [child.pid for child in poisoned_stack.children]
    async with Client(poisoned_stack.address) as connected:
        yield connected
    await wait_until_idle(poisoned_stack)
    for child in poisoned_stack.children:
        async with open_channel(child.facts["address"]) as channel:
            response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert response.status == health_pb2.HealthCheckResponse.SERVING
    assert [child.pid for child in poisoned_stack.children] == pids


async def tokens_of(call: AsyncIterator[Any]) -> list[int]:
    return [token.id for response in await responses_to(call) for token in response.tokens]


@pytest.mark.parametrize("token_id", [DRAFT_NAN, DRAFT_INF], ids=["NaN", "inf"])
async def test_a_draft_without_finite_logits_is_done_without(
    poisoned: Client, client: Client, token_ids: list[int], token_id: int
) -> None:
    prompt = [*token_ids[:20], token_id]
    responses = await responses_to(poisoned.generate(prompt, max_tokens=8, num_draft_tokens=4))

    statistics = responses[-1].statistics
    assert statistics.draft_fault == "NON_FINITE_LOGITS"
    assert statistics.rounds_without_draft > 0
    assert statistics.proposed_tokens == 0
    alone = await tokens_of(client.generate(prompt, max_tokens=8, num_draft_tokens=0))
    assert [token.id for response in responses for token in response.tokens] == alone


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
@pytest.mark.parametrize("token_id", [TARGET_NAN, TARGET_INF], ids=["NaN", "inf"])
async def test_a_target_without_finite_logits_fails_the_session(
    poisoned: Client, client: Client, token_ids: list[int], token_id: int, num_draft_tokens: int
) -> None:
    prefix = [100 * (token_id % 7 + 1) + num_draft_tokens, *token_ids]  # which no other test has
    call = poisoned.generate([*prefix, token_id], max_tokens=8, num_draft_tokens=num_draft_tokens)
    error = await error_of(call)

    assert error.code() is grpc.StatusCode.INTERNAL
    assert (error_info(error).domain, error_info(error).reason) == (DOMAIN, "NON_FINITE_LOGITS")

    # Nothing of it is left: not in the cache, where the NaN spread to the tokens before it, and not in the session.
    responses = await responses_to(poisoned.generate(prefix, max_tokens=8, num_draft_tokens=4))
    assert responses[-1].statistics.target_reused_tokens == 0
    assert responses[-1].statistics.draft_fault == ""
    sound = await tokens_of(client.generate(prefix, max_tokens=8, num_draft_tokens=0))
    assert [token.id for response in responses for token in response.tokens] == sound


async def test_a_session_that_fails_does_not_disturb_others(
    poisoned: Client, client: Client, token_ids: list[int]
) -> None:
    expected = await tokens_of(client.generate(token_ids[:9], max_tokens=30, num_draft_tokens=0))
    others = [asyncio.ensure_future(tokens_of(poisoned.generate(token_ids[:9], max_tokens=30))) for _ in range(2)]
    while not all(other.done() for other in others):
        error = await error_of(poisoned.generate([*token_ids[:9], TARGET_NAN, *token_ids[:9]], max_tokens=8))
        assert error_info(error).reason == "NON_FINITE_LOGITS"
        slowed = await responses_to(poisoned.generate([*token_ids[:9], DRAFT_NAN], max_tokens=4))
        assert slowed[-1].statistics.draft_fault == "NON_FINITE_LOGITS"
    assert [other.result() for other in others] == [expected] * 2


async def test_a_target_that_fails_later_fails_the_session_then(poisoned: Client, token_ids: list[int]) -> None:
    """With a bias, the fourth token is the one after which the target fails."""
    sampling = SamplingParameters(logit_bias={TARGET_NAN: 100})
    stop = StopConditions(min_tokens=3, token_ids=[TARGET_NAN])
    ended = await tokens_of(poisoned.generate(token_ids[:9], sampling=sampling, stop=stop, num_draft_tokens=0))
    assert ended[3:] == [TARGET_NAN]
    for num_draft_tokens in (0, 4):
        fields = {"sampling": sampling, "num_draft_tokens": num_draft_tokens, "max_tokens": 8}
        error = await error_of(poisoned.generate(token_ids[:9], **fields))
        assert error_info(error).reason == "NON_FINITE_LOGITS"


async def test_a_prefill_that_is_not_finite_is_not_kept(poisoned: Client, token_ids: list[int]) -> None:
    """A prefill computes no logits. The session ends before the draft proposes, so that nobody notices."""
    prefix = [11, *token_ids[:30]]
    at_once = SamplingParameters(logit_bias={END_TOKEN: 100})
    prompt = [*prefix, DRAFT_NAN, *token_ids]
    responses = await responses_to(poisoned.generate(prompt, sampling=at_once, num_draft_tokens=4, max_tokens=8))
    assert responses[-1].statistics.generated_tokens == 1

    responses = await responses_to(poisoned.generate(prefix, num_draft_tokens=4, max_tokens=8))
    assert responses[-1].statistics.draft_fault == ""


# -- Health and reflection

SERVICES = {
    "coordinator": {"specd.v1.GenerationService", "specd.v1.SessionService"},
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
