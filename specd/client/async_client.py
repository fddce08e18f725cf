"""The client for event loops."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import grpc

from specd.client.async_session import AsyncClientSession
from specd.client.async_stream import AsyncStream, is_task_cancelled
from specd.client.options import GenerationOptions
from specd.client.protocol.chats import Messages, chat_of
from specd.client.protocol.errors import client_closed, error_from
from specd.client.protocol.service import ServiceDescription, TokenCount, counted, described
from specd.client.protocol.wire import to_count, to_request
from specd.client.resuming.generation import Connection, ResumableGeneration, Turn
from specd.client.resuming.retries import DEFAULT_RETRIES, RetryPolicy
from specd.rpc.channel import open_channel
from specd.rpc.credentials import PLAIN, ClientCredentials
from specd.settings import DEFAULT_ADDRESS
from specd.v1 import generation_pb2, generation_pb2_grpc, session_pb2, session_pb2_grpc

_CALL_SECONDS = 30.0  # for calls that compute nothing


class AsyncClient:
    """A client of the coordinator at `address` (HOST:PORT or unix:PATH), as an async context manager.

    It belongs to the event loop in which it is made.

    Generations that are refused for now are asked for again, and those whose stream breaks are resumed, as `retries`
    says. All calls raise a SpecdError, whose `reason` a program can switch on.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        credentials: ClientCredentials = PLAIN,
        retries: RetryPolicy = DEFAULT_RETRIES,
    ) -> None:
        """Connect with the first call. Raises StartupError for credentials that cannot be used."""
        self.address = address
        self._retries = retries
        self._connection = Connection()
        self._channel = open_channel(address, credentials)
        self._generations = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._sessions = session_pb2_grpc.SessionServiceStub(self._channel)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End what runs, and close the connection: a task that reads a stream gets a CallError (CLIENT_CLOSED)."""
        self._connection.is_closed = True
        await self._channel.close()

    def generate(self, prompt: str | Sequence[int], **options: Unpack[GenerationOptions]) -> AsyncStream:
        """Return the stream of a completion: of a text, or of token ids, which are taken as they are.

        For a model with an encoder (T5), `prompt` is the source that it answers.
        """
        return self._stream(Turn(to_request(prompt, options)), options)

    def chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        **options: Unpack[GenerationOptions],
    ) -> AsyncStream:
        """Return the stream of the assistant's answer to a conversation, written by the model's own chat template.

        `messages` are a text of the user, or messages with `role`, `content` and what else the template reads. `tools`
        are JSON schemas, `template_arguments` variables such as `enable_thinking`.
        """
        chat = chat_of(
            messages,
            tools=tools,
            template_arguments=template_arguments,
            continue_final_message=continue_final_message,
        )
        return self._stream(Turn(to_request(chat, options)), options)

    def session(self, session_id: str = "") -> AsyncClientSession:
        """Return a new session, whose turns share their caches; or the one with this id.

        A session that begins here is restored where the coordinator has lost it: nothing is known of another one's
        turns, so its streams are not resumed. As a context manager it is deleted at the end.
        """
        return AsyncClientSession(self._stream, self.delete_session, session_id)

    async def delete_session(self, session_id: str) -> None:
        """Let the coordinator forget a session. Raises NotFoundError, or ConflictError while it is in use."""
        await self._call(self._sessions.DeleteSession, session_pb2.DeleteSessionRequest(session_id=session_id))

    async def count_tokens(
        self,
        prompt: str | Sequence[int] | Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        session_id: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Any] | None = None,
        **options: Unpack[GenerationOptions],
    ) -> TokenCount:
        """Return how many tokens `generate` begins with for a text or token ids, or `chat` for messages.

        `max_tokens` is what is to fit behind them.
        """
        request = to_count(prompt, options, session_id=session_id, tools=tools, template_arguments=template_arguments)
        return counted(await self._call(self._generations.CountTokens, request))

    async def describe(self) -> ServiceDescription:
        """Return the models behind the coordinator, and the limits of a request."""
        return described(await self._call(self._generations.GetModelInfo, generation_pb2.GetModelInfoRequest()))

    def _stream(self, turn: Turn, options: GenerationOptions) -> AsyncStream:
        generation = ResumableGeneration(
            turn, policy=self._retries, clock=time.monotonic, chance=random.random, connection=self._connection
        )
        return AsyncStream(generation, self._open, self.address, options.get("timeout_seconds"))

    def _open(self, request: generation_pb2.GenerateRequest, timeout_seconds: float | None) -> Any:
        return self._generations.Generate(request, timeout=timeout_seconds)

    async def _call(self, method: Any, request: Any) -> Any:
        if self._connection.is_closed:
            raise client_closed()
        try:
            response = await method(request, timeout=_CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise error_from(error, self.address) from error
        except asyncio.CancelledError as cancelled:
            if is_task_cancelled():
                raise
            raise client_closed() from cancelled
        self._connection.has_answered = True
        return response
