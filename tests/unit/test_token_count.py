"""Counting the tokens of a prompt: as many as Generate begins with, by both clients, over a real channel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from prometheus_client import CollectorRegistry

from coordinator.coordinator import Coordinator
from coordinator.service import GenerationService
from coordinator.sessions.request import GenerationRequest
from coordinator.telemetry.metrics import error_counter
from coordinator.token_count import count_tokens
from specd.cache_footprint import ALL_TOKENS, CacheFootprint
from specd.caller import CallerLimits
from specd.client import AsyncClient, Client, TokenCount
from specd.client.protocol.chats import chat_of
from specd.errors import InvalidRequestError, NotFoundError, ResourceExhaustedError
from specd.identity.roles import Role
from specd.rpc.access import Guard
from specd.rpc.server import Server
from specd.v1 import generation_pb2, generation_pb2_grpc
from tests.unit.mortal_server import MODEL, MortalServer
from tests.unit.served_models import models_of

MESSAGES = [{"role": "user", "content": "What is a monad?"}, {"role": "assistant", "content": "A burrito."}]
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}


@pytest.fixture
def coordinator() -> Coordinator:
    coordinator = MortalServer()._coordinator
    coordinator.replicas.workers.first.footprint = CacheFootprint({ALL_TOKENS: 1})
    return coordinator


@pytest.fixture
async def address(coordinator: Coordinator, tmp_path: Path) -> AsyncIterator[str]:
    listen = f"unix:{tmp_path}/server"
    server = Server(listen, (), Guard(Role.COORDINATOR, listen=listen))
    service = GenerationService(models_of(coordinator), error_counter(CollectorRegistry()), server, stall_seconds=30)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(service, server.grpc)
    await server.start()
    yield listen
    await server.stop(grace_seconds=1)


async def counts(address: str, prompt: Any, **options: Any) -> TokenCount:
    """Return what both clients say."""

    def blocking() -> TokenCount:
        with Client(address) as client:
            return client.count_tokens(prompt, **options)

    async with AsyncClient(address) as client:
        count = await client.count_tokens(prompt, **options)
    assert await asyncio.to_thread(blocking) == count
    return count


async def begun(address: str, request: generation_pb2.GenerateRequest) -> tuple[int, str]:
    """Return how many tokens a generation began with, and its session."""
    request.max_tokens, request.return_prompt_token_ids = 4, True
    async with grpc.aio.insecure_channel(address) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request)
        responses = [response async for response in call]
    return len(responses[0].prompt_token_ids), responses[0].session_id


async def test_a_prompt_has_as_many_tokens_as_a_generation_begins_with(address: str) -> None:
    text, _ = await begun(address, generation_pb2.GenerateRequest(text="Grüße, 世界"))
    assert await counts(address, "Grüße, 世界") == TokenCount(text, 0, MODEL.context_length - text, True)
    assert (await counts(address, [5, 6, 7])).prompt_tokens == 3
    request = generation_pb2.GenerateRequest()
    for message in MESSAGES:
        request.chat.messages.add(**message)
    chat, _ = await begun(address, request)
    assert (await counts(address, MESSAGES)).prompt_tokens == chat > len("What is a monad?A burrito.")
    assert (await counts(address, MESSAGES[0])).prompt_tokens < chat


async def test_a_session_counts_and_is_not_used(address: str, coordinator: Coordinator) -> None:
    num_tokens, session_id = await begun(address, generation_pb2.GenerateRequest(text="abc"))
    kept = coordinator.sessions.get(session_id, "")
    before = replace(kept)
    assert (await counts(address, "de", session_id=session_id)).prompt_tokens == len(kept.token_ids) + 2
    assert len(kept.token_ids) >= num_tokens
    assert vars(kept) == vars(before)
    assert len(coordinator.sessions) == 1
    with pytest.raises(NotFoundError):
        await count_tokens(coordinator, GenerationRequest("x", session_id=session_id, client="another"))


async def test_it_fits_as_far_as_context_and_caches_have_room(address: str, coordinator: Coordinator) -> None:
    room = MODEL.context_length - 10
    assert await counts(address, "x" * 10, max_tokens=room) == TokenCount(10, 0, room, True)
    assert await counts(address, "x" * 10, max_tokens=room + 1) == TokenCount(10, 0, room, False)
    full = MODEL.context_length
    assert await counts(address, "x" * (full - 1)) == TokenCount(full - 1, 0, 1, True)
    assert await counts(address, "x" * full) == TokenCount(full, 0, 0, False)
    assert await counts(address, "x" * 2 * full) == TokenCount(2 * full, 0, 0, False)
    coordinator.replicas.workers.first.cache_bytes = 15
    assert (await counts(address, "x" * 10, max_tokens=5)).fits
    assert not (await counts(address, "x" * 10, max_tokens=6)).fits


async def test_what_is_wrong_with_a_prompt_is_an_error(address: str) -> None:
    for prompt, reason in (("", "EMPTY_PROMPT"), ([MODEL.vocabulary_size], "TOKEN_OUT_OF_VOCABULARY")):
        with pytest.raises(InvalidRequestError) as raised:
            await counts(address, prompt)
        assert raised.value.reason == reason
    with pytest.raises(InvalidRequestError) as raised:
        await counts(address, "x", tools=[TOOL])
    assert raised.value.reason == "CONTRADICTION"


async def test_counting_has_the_limits_of_a_generation(coordinator: Coordinator) -> None:
    limits = CallerLimits(max_sessions=1, tokens_per_minute=10)
    request = GenerationRequest("x", client="alice", client_limits=limits)
    with coordinator.admission.place("alice", None):
        with pytest.raises(ResourceExhaustedError) as raised:
            await count_tokens(coordinator, request)
        assert raised.value.reason == "CLIENT_SESSIONS"
        assert (await count_tokens(coordinator, replace(request, client="bob"))).fits
    assert (await count_tokens(coordinator, request)).fits
    assert coordinator.admission.num_queued == 0
    coordinator.quotas.count("alice", limits, 20)
    with pytest.raises(ResourceExhaustedError) as raised:
        await count_tokens(coordinator, request)
    assert raised.value.reason == "CLIENT_TOKENS"


async def test_a_conversation_is_rendered_for_its_client(coordinator: Coordinator) -> None:
    """It waits for the client's own renderings alone."""
    rendered: list[str] = []
    original = coordinator.renderer.render

    async def render(chat: Any, client: str, check: Any) -> str:
        rendered.append(client)
        return await original(chat, client, check)

    cast(Any, coordinator.renderer).render = render
    await count_tokens(coordinator, GenerationRequest(chat_of("hello"), client="alice"))
    assert rendered == ["alice"]
