"""The embedded T5 pair through the service: sources, speculation, faults, and what is refused."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import mlx.core as mx
import pytest

from specd.child import Child
from specd.errors import error_info
from specd.settings import EMBEDDED_T5_DRAFT, EMBEDDED_T5_TARGET, EMBEDDED_TARGET
from specd.supervisor import Stack
from specd.text.tokenizer import Tokenizer
from specd.v1 import session_pb2, session_pb2_grpc
from specd.v1.generation_pb2 import (
    DRAFT_SOURCE_LOOKUP,
    DRAFT_SOURCE_NONE,
    Chat,
    ChatMessage,
    FinishReason,
    StopConditions,
    TokenIds,
)
from specd.v1.sampling_pb2 import SamplingParameters
from specd.worker.engine.forward import bare_cache, forward
from specd.worker.engine.jobs import Feed
from specd.worker.model.loader import load
from tests.e2e.completions import Completion, complete
from tests.e2e.faults import ENVIRONMENT, are_free, eventually, is_whole, kill
from tests.e2e.memory import lasting_growth
from tests.e2e.processes import draft_of, read_metric, resident_mib, run_specd, wait_until_idle
from tests.raw_client import RawClient
from tests.thorough import examples

SOURCES = [
    "summarize: def add(a, b):\n    return a + b\n",
    "summarize: def is_empty(self):\n    return not self._items\n",
    'implement: def read_lines(path):\n    """Return the lines of a file."""\n',
    "summarize: def close(self):\n" + "    self._file.flush()\n    self._file.close()\n" * 12,
    "summarize: x",
]
MAX_TOKENS = 40
FIELDS: dict[str, Any] = {"max_tokens": MAX_TOKENS, "stop": StopConditions(ignore_eos=True)}


@pytest.fixture(scope="module")
async def t5_stack() -> AsyncIterator[Stack]:
    async with Stack(target=EMBEDDED_T5_TARGET, draft=EMBEDDED_T5_DRAFT, environment=ENVIRONMENT) as stack:
        yield stack


@pytest.fixture(scope="module")
async def t5_client(t5_stack: Stack) -> AsyncIterator[RawClient]:
    async with RawClient(t5_stack.address) as connected:
        yield connected


def sampled(temperature: float) -> SamplingParameters:
    return SamplingParameters(temperature=temperature, seed=11)


async def answer(client: RawClient, source: Any, **fields: Any) -> Completion:
    return await complete(client, source, **(FIELDS | fields))


async def test_greedy_answers_are_those_of_the_model_alone(t5_client: RawClient) -> None:
    """The reference equals transformers (tests/worker/test_t5.py)."""
    model = load(EMBEDDED_T5_TARGET, blas="")
    tokenizer = Tokenizer(model.tokenizer_json)
    for source in SOURCES:
        cache = bare_cache(model.network, source=tokenizer.encode(source))
        tokens = [0]
        for _ in range(MAX_TOKENS):
            (logits,) = forward([Feed(cache, mx.array(tokens[-1:]))])
            tokens.append(int(mx.argmax(logits[-1])))
        completion = await answer(t5_client, source)
        assert completion.token_ids == tokens[1:]
        assert completion.statistics.prompt_tokens == len(tokenizer.encode(source)) + 1


@pytest.mark.parametrize("temperature", examples([1.0, 0.0, 0.7], 1))
async def test_a_draft_changes_no_token(t5_client: RawClient, temperature: float) -> None:
    for number, source in enumerate(SOURCES):
        sampling = sampled(temperature)
        alone = await answer(t5_client, source, num_draft_tokens=0, sampling=sampling)
        for k in (1 + 2 * number % 8, 2 + 2 * number % 8, None):
            given = {} if k is None else {"num_draft_tokens": k}
            drafted = await answer(t5_client, source, sampling=sampling, **given)
            assert drafted.token_ids == alone.token_ids
            assert k is None or drafted.statistics.proposed_tokens


@pytest.mark.parametrize("temperature", examples([1.0, 0.0], 1))
async def test_sessions_with_other_sources_go_together(t5_client: RawClient, temperature: float) -> None:
    sampling = sampled(temperature)
    alone = [await answer(t5_client, source, num_draft_tokens=0, sampling=sampling) for source in SOURCES]
    together = await asyncio.gather(
        *(answer(t5_client, source, num_draft_tokens=k, sampling=sampling) for source in SOURCES for k in (0, 3))
    )
    assert [each.token_ids for each in together] == [each.token_ids for each in alone for _ in (0, 3)]


async def test_a_source_is_looked_up(t5_client: RawClient) -> None:
    expected = await answer(t5_client, SOURCES[2], draft_source=DRAFT_SOURCE_NONE)
    for given in ({}, {"draft_source": DRAFT_SOURCE_LOOKUP}, {"prediction_text": "    with open(path) as file:"}):
        assert (await answer(t5_client, SOURCES[2], **given)).token_ids == expected.token_ids


async def test_an_answer_ends_with_its_end_token(t5_client: RawClient) -> None:
    completion = await complete(t5_client, SOURCES[0], max_tokens=200)
    assert completion.finish_reasons == [FinishReason.FINISH_REASON_EOS]
    assert completion.text.strip()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_an_answer_goes_on_in_its_session_and_from_its_tokens(t5_client: RawClient, temperature: float) -> None:
    sampling = sampled(temperature)
    whole = await answer(t5_client, SOURCES[2], sampling=sampling)
    first = await answer(t5_client, SOURCES[2], sampling=sampling, max_tokens=10)
    session = first.last.session_id
    rest = await answer(t5_client, "", sampling=sampling, max_tokens=MAX_TOKENS - 10, session_id=session)
    assert first.token_ids + rest.token_ids == whole.token_ids
    assert rest.statistics.target_reused_tokens >= rest.statistics.prompt_tokens - 10
    begun = TokenIds(ids=first.token_ids)
    handed_back = await answer(
        t5_client, SOURCES[2], sampling=sampling, max_tokens=MAX_TOKENS - 10, answer_token_ids=begun
    )
    assert handed_back.token_ids == rest.token_ids
    kept = await session_pb2_grpc.SessionServiceStub(t5_client.channel).GetSession(
        session_pb2.GetSessionRequest(session_id=session)
    )
    assert list(kept.token_ids) == [0, *whole.token_ids]
    assert kept.session.num_tokens == len(kept.token_ids) + len(kept.source_token_ids)
    tokenizer = Tokenizer(load(EMBEDDED_T5_TARGET, blas="").tokenizer_json)
    assert list(kept.source_token_ids) == tokenizer.encode(SOURCES[2])
    by_text = await answer(t5_client, SOURCES[2], answer_text="Return")
    by_ids = TokenIds(ids=tokenizer.encode("Return", add_special_tokens=False))
    assert by_text.token_ids == (await answer(t5_client, SOURCES[2], answer_token_ids=by_ids)).token_ids


@pytest.mark.parametrize("temperature", examples([1.0, 0.0], 1))
@pytest.mark.parametrize("victim", ["draft", "target"])
async def test_a_killed_worker_changes_nothing(
    t5_stack: Stack, t5_client: RawClient, victim: str, temperature: float
) -> None:
    child: Child = draft_of(t5_stack) if victim == "draft" else t5_stack.target
    fields = FIELDS | {"sampling": sampled(temperature), "max_tokens": 60}
    expected = await complete(t5_client, SOURCES[3], **fields, num_draft_tokens=0)
    token_ids: list[int] = []
    number = 0
    async for response in t5_client.generate(SOURCES[3], **fields, num_draft_tokens=2):
        number += 1
        if number == 4:
            kill(child)
        token_ids.extend(token.id for token in response.tokens)
    assert token_ids == expected.token_ids
    await eventually(lambda: is_whole(t5_stack))
    await eventually(lambda: are_free(draft_of(t5_stack), t5_stack.target))


CHAT = Chat(messages=[ChatMessage(role="user", content="Hello")])


@pytest.mark.parametrize(
    ("prompt", "reason", "what"),
    [
        (CHAT, "NO_CHAT_TEMPLATE", "answers a source"),
        ("", "EMPTY_PROMPT", "`text` or `token_ids`"),
        ([8192], "TOKEN_OUT_OF_VOCABULARY", "8192"),
        ([5] * 1_000_000, "CACHE_EXCEEDED", "--cache-bytes"),
    ],
    ids=["chat", "empty", "vocabulary", "room"],
)
async def test_a_source_that_cannot_be_answered_is_refused(
    t5_client: RawClient, prompt: Any, reason: str, what: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await answer(t5_client, prompt)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error_info(refused.value).reason == reason
    assert what in str(refused.value.details())


async def test_a_session_has_one_source(t5_client: RawClient) -> None:
    session = (await answer(t5_client, SOURCES[0], max_tokens=2)).last.session_id
    with pytest.raises(grpc.aio.AioRpcError, match="has a source already"):
        await answer(t5_client, SOURCES[1], session_id=session)


@pytest.mark.thorough
async def test_a_source_longer_than_any_in_training_is_answered(t5_client: RawClient) -> None:
    """In parts of the encoder's layers, while another session continues."""
    source = [5 + i % 8000 for i in range(2500)]
    alone, _ = await asyncio.gather(answer(t5_client, source, num_draft_tokens=0), answer(t5_client, SOURCES[0]))
    assert (await answer(t5_client, source, num_draft_tokens=3)).token_ids == alone.token_ids


@pytest.mark.parametrize(
    ("target", "draft"), [(EMBEDDED_TARGET, EMBEDDED_T5_DRAFT), (EMBEDDED_T5_TARGET, EMBEDDED_TARGET)]
)
def test_a_pair_of_both_kinds_is_refused(target: str, draft: str) -> None:
    done = run_specd("up", "--target", target, "--draft", draft, "--listen", "127.0.0.1:0")
    assert done.returncode == 2
    assert "has an encoder and" in done.stderr


@pytest.mark.thorough  # what sessions hold, by kinds: tests/worker/test_held_memory.py
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
async def test_hundreds_of_sources_on_a_small_budget_leave_memory_flat() -> None:
    """Of 200 tokens each: what the layers hold of the sources between the compared readings is some 90 MiB."""
    budget = 16 * 2**20
    environment = ENVIRONMENT | {f"SPECD_{each}_WORKER_PREFIX_CACHE_BYTES": str(budget) for each in ("TARGET", "DRAFT")}
    readings = []
    async with (
        Stack(target=EMBEDDED_T5_TARGET, draft=EMBEDDED_T5_DRAFT, environment=environment) as stack,
        RawClient(stack.address) as client,
    ):
        for start in range(0, 288, 24):
            for first in range(start, start + 24, 8):
                sources = [[5 + (number + 7 * i) % 8000 for i in range(200)] for number in range(first, first + 8)]
                await asyncio.gather(*(answer(client, each, max_tokens=4, num_draft_tokens=2) for each in sources))
            await wait_until_idle(stack)
            for worker in (stack.target, draft_of(stack)):
                assert 0 < read_metric(worker, "specd_worker_prefix_cache_bytes") <= budget
            readings.append([resident_mib(child.pid) for child in stack.children])
        for worker in (stack.target, draft_of(stack)):
            assert read_metric(worker, "specd_worker_prefix_cache_evictions_total") > 0
    for child, *memory in zip(stack.children, *readings, strict=True):
        assert lasting_growth(memory) < 24, (child.name, memory)
