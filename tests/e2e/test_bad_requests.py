"""Mistakes of callers: each gets a status with the reason, nothing crashes and nothing stays behind.

One case for each check that a process makes; tests/unit/test_validation.py has the limits of every field.
"""

from __future__ import annotations

import math
import struct
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import pytest

from specd.errors import DOMAIN, error_info
from specd.rpc.channel import open_channel
from specd.rpc.limits import MAX_MESSAGE_BYTES
from specd.supervisor import Stack
from specd.v1.draft_pb2 import ProposeRequest
from specd.v1.draft_pb2_grpc import DraftServiceStub
from specd.v1.generation_pb2 import Chat, GenerateRequest, GenerateResponse, StopConditions, TokenIds
from specd.v1.generation_pb2_grpc import GenerationServiceStub
from specd.v1.sampling_pb2 import (
    ACCEPTANCE_METHOD_REJECTION,
    SamplingParameters,
    SessionSampling,
    TokenDistribution,
)
from specd.v1.target_pb2 import VerifyRequest
from specd.v1.target_pb2_grpc import TargetServiceStub
from tests.e2e.calls import CONTEXT_LENGTH, END_TOKEN, VOCABULARY_SIZE, Worker, error_of, responses_to
from tests.e2e.processes import read_metric
from tests.raw_client import RawClient

pytestmark = pytest.mark.usefixtures("unharmed")

LARGEST_UINT32 = 2**32 - 1

NOT_PROTOBUF = b"\xff\xff\xff"


def assert_refused(error: grpc.aio.AioRpcError, reason: str, named: str) -> None:
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (error_info(error).domain, error_info(error).reason) == (DOMAIN, reason)
    assert named in (error.details() or "")


# -- Generate


def generate(client: RawClient, request: GenerateRequest) -> AsyncIterator[GenerateResponse]:
    return cast(AsyncIterator[GenerateResponse], GenerationServiceStub(client.channel).Generate(request))


BAD_GENERATE_REQUESTS = {
    "no prompt": (GenerateRequest(), "EMPTY_PROMPT", "prompt"),
    "chat without messages": (GenerateRequest(chat=Chat()), "EMPTY_PROMPT", "messages"),
    "prompt over the context": (
        GenerateRequest(token_ids=TokenIds(ids=[5] * 100_000)),
        "CONTEXT_EXCEEDED",
        "the prompt has 100000 tokens",
    ),
    "a megabyte of text": (GenerateRequest(text="é" * 500_000), "CONTEXT_EXCEEDED", "maximum context length"),
    "prompt and max_tokens over the context": (
        GenerateRequest(token_ids=TokenIds(ids=[5] * 48), max_tokens=CONTEXT_LENGTH - 47),
        "CONTEXT_EXCEEDED",
        f"max_tokens can be at most {CONTEXT_LENGTH - 48}",
    ),
    "token": (
        GenerateRequest(token_ids=TokenIds(ids=[5, VOCABULARY_SIZE, 7])),
        "TOKEN_OUT_OF_VOCABULARY",
        f"token_ids has {VOCABULARY_SIZE}",
    ),
    "k": (GenerateRequest(text="a", num_draft_tokens=33), "OUT_OF_RANGE", "num_draft_tokens is 33"),
    "max_tokens": (GenerateRequest(text="a", max_tokens=0), "OUT_OF_RANGE", "max_tokens is 0"),
    "log-probabilities": (
        GenerateRequest(text="a", top_log_probabilities=21),
        "OUT_OF_RANGE",
        "top_log_probabilities is 21",
    ),
    "log-probabilities of too long a prompt": (
        GenerateRequest(token_ids=TokenIds(ids=[5] * 1600), top_log_probabilities=20, echo=True),
        "OUT_OF_RANGE",
        "makes 33600 log-probabilities",
    ),
    "temperature": (
        GenerateRequest(text="a", sampling=SamplingParameters(temperature=math.nan)),
        "OUT_OF_RANGE",
        "temperature is nan",
    ),
    "acceptance": (
        GenerateRequest(text="a", sampling=SamplingParameters(acceptance=cast(Any, 100))),
        "OUT_OF_RANGE",
        "acceptance is 100",
    ),
    "lenience": (
        GenerateRequest(text="a", sampling=SamplingParameters(lenience=0.5)),
        "CONTRADICTION",
        "lenience is 0.5",
    ),
    "bias": (
        GenerateRequest(text="a", sampling=SamplingParameters(logit_bias={5: 1, LARGEST_UINT32: 1})),
        "TOKEN_OUT_OF_VOCABULARY",
        f"logit_bias has {LARGEST_UINT32}",
    ),
    "stop token": (
        GenerateRequest(text="a", stop=StopConditions(token_ids=[5, VOCABULARY_SIZE])),
        "TOKEN_OUT_OF_VOCABULARY",
        f"stop.token_ids has {VOCABULARY_SIZE}",
    ),
    "stop string": (
        GenerateRequest(text="a", stop=StopConditions(strings=["é" * 1_000_000])),
        "OUT_OF_RANGE",
        "of 1000000 characters",
    ),
    "min_tokens": (
        GenerateRequest(text="a", max_tokens=3, stop=StopConditions(min_tokens=4)),
        "CONTRADICTION",
        "min_tokens is 4",
    ),
}


@pytest.mark.parametrize(("request_", "reason", "named"), BAD_GENERATE_REQUESTS.values(), ids=BAD_GENERATE_REQUESTS)
async def test_generate_refuses(client: RawClient, request_: GenerateRequest, reason: str, named: str) -> None:
    assert_refused(await error_of(generate(client, request_)), reason, named)


@pytest.mark.parametrize("session_id", ["nowhere", "\0\r\n", "☃" * 1_000_000], ids=["unknown", "controls", "huge"])
async def test_a_session_that_is_not_there_is_refused(client: RawClient, session_id: str) -> None:
    error = await error_of(generate(client, GenerateRequest(text="a", session_id=session_id)))

    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert (error_info(error).domain, error_info(error).reason) == (DOMAIN, "SESSION_NOT_FOUND")
    assert repr(session_id)[:60].rstrip("'") in (error.details() or "")


@pytest.mark.parametrize("temperature", [0.01, 100])
async def test_everything_at_its_limits_is_taken(client: RawClient, temperature: float) -> None:
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


async def test_a_message_that_is_too_large_is_refused(client: RawClient) -> None:
    error = await error_of(generate(client, GenerateRequest(text="x" * (MAX_MESSAGE_BYTES + 1))))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_bytes_that_are_no_request_are_refused(client: RawClient) -> None:
    error = await error_of(cast(Any, client.channel.unary_stream("/specd.v1.GenerationService/Generate"))(NOT_PROTOBUF))
    assert (error.code(), error_info(error).reason) == (grpc.StatusCode.INVALID_ARGUMENT, "BROKEN_MESSAGE")


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
async def test_generate_continues_any_text(client: RawClient, text: str) -> None:
    completions = [
        await responses_to(client.generate(text, max_tokens=6, num_draft_tokens=num_draft_tokens))
        for num_draft_tokens in (0, 4)
    ]

    alone, speculative = ([token for r in responses for token in r.tokens] for responses in completions)
    assert [token.id for token in alone] == [token.id for token in speculative]
    assert [token.text for token in alone] == [token.text for token in speculative]
    assert len(alone) == 6 or alone[-1].id == END_TOKEN


async def test_clients_that_go_away_leave_nothing(stack: Stack, client: RawClient) -> None:
    calls = [client.generate(f"def f{i}():", max_tokens=1000) for i in range(12)]
    first_responses = [await anext(aiter(call)) for call in calls]
    assert all(response.tokens for response in first_responses)
    assert read_metric(stack.coordinator, "specd_active_sessions") == len(calls)

    for call in calls:
        call.cancel()  # type: ignore[attr-defined]


# -- The streams of the workers

BAD_WORKER_REQUESTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "no token ids": ({"token_ids": []}, "EMPTY_TOKEN_IDS", "token_ids is empty"),
    "token": ({"token_ids": [5, LARGEST_UINT32]}, "TOKEN_OUT_OF_VOCABULARY", f"token_ids has {LARGEST_UINT32}"),
    "draft tokens": ({"token_ids": [5], "num_draft_tokens": 33}, "OUT_OF_RANGE", "33 draft tokens"),
    "no room for the draft tokens": ({"token_ids": [5] * 2045}, "CONTEXT_EXCEEDED", "make 2049"),
    "position": ({"token_ids": [5], "position": LARGEST_UINT32}, "CONTEXT_EXCEEDED", str(LARGEST_UINT32)),
    "temperature": (
        {"token_ids": [5], "sampling": SessionSampling(parameters=SamplingParameters(temperature=math.nan))},
        "OUT_OF_RANGE",
        "temperature is nan",
    ),
    "acceptance": (
        {"token_ids": [5], "sampling": SessionSampling(parameters=SamplingParameters(acceptance=cast(Any, 100)))},
        "OUT_OF_RANGE",
        "acceptance is 100",
    ),
    "suppressed token": (
        {
            "token_ids": [5],
            "sampling": SessionSampling(suppressed_token_ids=[5, VOCABULARY_SIZE], suppressed_before=10),
        },
        "TOKEN_OUT_OF_VOCABULARY",
        f"suppressed_token_ids has {VOCABULARY_SIZE}",
    ),
    "bias outside the target's vocabulary": (
        {
            "token_ids": [5],
            "sampling": SessionSampling(vocabulary_size=100, parameters=SamplingParameters(logit_bias={100: 1})),
        },
        "TOKEN_OUT_OF_VOCABULARY",
        "logit_bias has 100",
    ),
}


@pytest.mark.parametrize(("fields", "reason", "named"), BAD_WORKER_REQUESTS.values(), ids=BAD_WORKER_REQUESTS)
async def test_a_worker_refuses(worker: Worker, fields: dict[str, Any], reason: str, named: str) -> None:
    stream = worker.open_stream()
    await stream.send(**fields)
    assert_refused(await stream.error(), reason, named)


async def test_the_target_refuses_a_proposal_outside_the_vocabulary(target_service: TargetServiceStub) -> None:
    request = VerifyRequest(token_ids=[5], proposal=[7, VOCABULARY_SIZE])
    error = await error_of(target_service.Verify(iter([request])))
    assert_refused(error, "TOKEN_OUT_OF_VOCABULARY", f"proposal has {VOCABULARY_SIZE}")


@pytest.mark.parametrize(
    ("fields", "reason", "named"),
    [
        ({"num_draft_tokens": LARGEST_UINT32}, "OUT_OF_RANGE", str(LARGEST_UINT32)),
        ({"num_draft_tokens": 2, "min_confidences": [0.5, 1.5]}, "OUT_OF_RANGE", "min_confidences has 1.5"),
        ({"num_draft_tokens": 2, "min_confidences": [math.nan]}, "OUT_OF_RANGE", "min_confidences has nan"),
        ({"num_draft_tokens": 2, "min_confidences": [0.5] * 33}, "OUT_OF_RANGE", "min_confidences has 33 entries"),
    ],
)
async def test_the_draft_refuses_to_draft_too_much_or_by_no_confidence(
    draft_service: DraftServiceStub, fields: dict[str, Any], reason: str, named: str
) -> None:
    error = await error_of(draft_service.Propose(iter([ProposeRequest(**{"token_ids": [5], **fields})])))
    assert_refused(error, reason, named)


async def test_a_worker_refuses_to_sample_otherwise_from_now_on(worker: Worker) -> None:
    stream = worker.open_stream()
    await stream.ask([5, 7])
    await stream.send([5, 7], sampling=SessionSampling())
    assert error_info(await stream.error()).reason == "CONTRADICTION"


# Penalties would read and write where the logits of these tokens are not.
IN_100_TOKENS = SessionSampling(vocabulary_size=100, parameters=SamplingParameters(presence_penalty=1))


async def test_the_target_refuses_a_vocabulary_smaller_than_its_own(target_service: TargetServiceStub) -> None:
    error = await error_of(target_service.Verify(iter([VerifyRequest(token_ids=[5, 8000], sampling=IN_100_TOKENS)])))
    assert error_info(error).reason == "OUT_OF_RANGE"
    assert "vocabulary_size is 100" in (error.details() or "")


async def test_the_draft_keeps_to_the_vocabulary_of_the_target(draft_service: DraftServiceStub) -> None:
    first = ProposeRequest(token_ids=[5, 6, 7], num_draft_tokens=8, sampling=IN_100_TOKENS)
    (response,) = await responses_to(draft_service.Propose(iter([first])))
    assert len(response.token_ids) == 8
    assert max(response.token_ids) < 100
    first.token_ids.append(100)
    later = ProposeRequest(token_ids=[5, 100], num_draft_tokens=8)
    for requests in ([first], [ProposeRequest(token_ids=[5, 6, 7], sampling=IN_100_TOKENS), later]):
        error = await error_of(draft_service.Propose(iter(requests)))
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
REJECTING = SessionSampling(
    parameters=SamplingParameters(temperature=1, seed=1, acceptance=ACCEPTANCE_METHOD_REJECTION)
)


@pytest.mark.parametrize(
    ("distributions", "named"),
    [
        pytest.param([SOUND], "distributions has 1 entries, but", id="one too few"),
        pytest.param([SOUND] * 3, "distributions has 3 entries, but", id="one too many"),
        pytest.param(
            [SOUND, TokenDistribution(token_ids=ids(VOCABULARY_SIZE), probabilities=floats(1))],
            "distributions[1]",
            id="id outside",
        ),
    ],
)
async def test_the_target_refuses_distributions(
    target_service: TargetServiceStub, distributions: list[TokenDistribution], named: str
) -> None:
    request = VerifyRequest(token_ids=[5], proposal=[5, 6], sampling=REJECTING, distributions=distributions)
    assert_refused(await error_of(target_service.Verify(iter([request]))), "BROKEN_DISTRIBUTION", named)


async def test_distributions_that_nobody_asked_for_take_no_memory(target_service: TargetServiceStub) -> None:
    """With a vocabulary each, these would be a hundred gigabytes."""
    request = VerifyRequest(token_ids=[5], proposal=[5], distributions=[SOUND] * 2_000_000)
    error = await error_of(target_service.Verify(iter([request])))
    assert error_info(error).reason == "BROKEN_DISTRIBUTION"


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(TokenDistribution(token_ids=ids(5), probabilities=floats(0)), id="nothing"),
        pytest.param(TokenDistribution(probabilities=floats(0.5)), id="half"),
        pytest.param(TokenDistribution(token_ids=ids(6), probabilities=floats(1)), id="of another token"),
        pytest.param(
            TokenDistribution(token_ids=ids(*range(VOCABULARY_SIZE)), probabilities=floats(*[3e38] * VOCABULARY_SIZE)),
            id="far too much",
        ),
    ],
)
async def test_the_target_refuses_what_its_token_cannot_be_a_sample_of(
    target_service: TargetServiceStub, odd: TokenDistribution
) -> None:
    request = VerifyRequest(token_ids=[5], proposal=[5, 5], sampling=REJECTING, distributions=[SOUND, odd])
    assert_refused(await error_of(target_service.Verify(iter([request]))), "BROKEN_DISTRIBUTION", "distributions[1]")


async def test_a_worker_refuses_bytes_that_are_no_request(worker: Worker) -> None:
    method = "DraftService/Propose" if worker.child.name == "draft-worker" else "TargetService/Verify"
    async with open_channel(worker.child.facts["address"]) as channel:
        error = await error_of(cast(Any, channel.stream_stream(f"/specd.v1.{method}"))(iter([NOT_PROTOBUF])))
    assert (error.code(), error_info(error).reason) == (grpc.StatusCode.INVALID_ARGUMENT, "BROKEN_MESSAGE")
