"""The client for threads."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Unpack

import grpc

from specd.client.options import GenerationOptions
from specd.client.protocol.chats import Messages, chat_of
from specd.client.protocol.errors import CallError, client_closed, error_from
from specd.client.protocol.service import ServiceDescription, TokenCount, counted, described
from specd.client.protocol.wire import to_count, to_request
from specd.client.resuming.generation import Connection, ResumableGeneration, Turn
from specd.client.resuming.retries import DEFAULT_RETRIES, RetryPolicy
from specd.client.session import ClientSession
from specd.client.stream import Stream
from specd.rpc.channel import open_blocking_channel
from specd.rpc.credentials import PLAIN, ClientCredentials
from specd.settings import DEFAULT_ADDRESS
from specd.v1 import generation_pb2, generation_pb2_grpc, session_pb2, session_pb2_grpc

_CALL_SECONDS = 30.0  # for calls that compute nothing


class Client:
    """A client of the coordinator at `address` (HOST:PORT or unix:PATH), as a context manager.

    Threads may share it; processes that fork may not.

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
        self._metadata = credentials.metadata
        self._channel = open_blocking_channel(address, credentials)
        self._generations = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._sessions = session_pb2_grpc.SessionServiceStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End what runs, and close the connection: a thread that reads a stream gets a CallError (CLIENT_CLOSED)."""
        self._connection.is_closed = True
        self._channel.close()

    def generate(self, prompt: str | Sequence[int], **options: Unpack[GenerationOptions]) -> Stream:
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
    ) -> Stream:
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

    def session(self, session_id: str = "") -> ClientSession:
        """Return a new session, whose turns share their caches; or the one with this id.

        A session that begins here is restored where the coordinator has lost it: nothing is known of another one's
        turns, so its streams are not resumed. As a context manager it is deleted at the end.
        """
        return ClientSession(self._stream, self.delete_session, session_id)

    def delete_session(self, session_id: str) -> None:
        """Let the coordinator forget a session. Raises NotFoundError, or ConflictError while it is in use."""
        self._call(self._sessions.DeleteSession, session_pb2.DeleteSessionRequest(session_id=session_id))

    def count_tokens(
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
        return counted(self._call(self._generations.CountTokens, request))

    def describe(self) -> ServiceDescription:
        """Return the models behind the coordinator, and the limits of a request."""
        return described(self._call(self._generations.GetModelInfo, generation_pb2.GetModelInfoRequest()))

    def _stream(self, turn: Turn, options: GenerationOptions) -> Stream:
        generation = ResumableGeneration(
            turn, policy=self._retries, clock=time.monotonic, chance=random.random, connection=self._connection
        )
        return Stream(generation, self._open, self.address, options.get("timeout_seconds"))

    def _open(self, request: generation_pb2.GenerateRequest, timeout_seconds: float | None) -> Any:
        with self._ending_when_closed():
            return self._generations.Generate(request, timeout=timeout_seconds, metadata=self._metadata)

    def _call(self, method: Any, request: Any) -> Any:
        with self._ending_when_closed():
            try:
                response = method(request, timeout=_CALL_SECONDS, metadata=self._metadata)
            except grpc.RpcError as error:
                raise error_from(error, self.address) from error
        self._connection.has_answered = True
        return response

    @contextmanager
    def _ending_when_closed(self) -> Iterator[None]:
        """Raise CallError instead of what gRPC raises for a closed channel, which another thread may have closed."""
        try:
            yield
        except (ValueError, CallError) as error:
            if self._connection.is_closed:
                raise client_closed() from error
            raise
