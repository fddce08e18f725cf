# Written by `make client` from async_client.py: change that one.
"""The client for threads."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Unpack

from grpc_health.v1 import health_pb2, health_pb2_grpc

from specd.client.calls import failures, open_channel, token_metadata
from specd.client.options import GenerationOptions
from specd.client.protocol.chats import Messages, chat_of, prompt_of
from specd.client.protocol.errors import client_closed
from specd.client.protocol.service import ModelStatus, ServiceDescription, TokenCount, counted, described, status_from
from specd.client.protocol.wire import metadata_of, to_count, to_request
from specd.client.resuming.generation import Connection, ResumableGeneration, Turn
from specd.client.resuming.retries import DEFAULT_RETRIES, RetryPolicy
from specd.client.session import ClientSession
from specd.client.stream import Stream
from specd.errors import SpecdError
from specd.model_info import ModelInfo
from specd.rpc.credentials import PLAIN, ClientCredentials
from specd.rpc.messages import model_from
from specd.settings import DEFAULT_ADDRESS
from specd.v1 import generation_pb2, generation_pb2_grpc, session_pb2, session_pb2_grpc

_CALL_SECONDS = 30.0  # for calls that compute nothing


class Client:
    """A client of the coordinator at `address` (HOST:PORT or unix:PATH), as a context manager.

    Threads may share it; processes that fork may not.

    Generations that are refused for now are asked for again, and those whose stream breaks are resumed, as `retries`
    says. All calls raise a SpecdError, whose `reason` a program can switch on.

    Without `keeps_tokens`, the streams keep only what resuming needs: their events have everything, their `text`,
    `tokens` and `completion` nothing.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        credentials: ClientCredentials = PLAIN,
        retries: RetryPolicy = DEFAULT_RETRIES,
        keeps_tokens: bool = True,
    ) -> None:
        """Connect with the first call. Raises StartupError for credentials that cannot be used."""
        self.address = address
        self._retries = retries
        self._keeps_tokens = keeps_tokens
        self._connection = Connection()
        self._metadata = token_metadata(credentials)
        self._channel = open_channel(address, credentials)
        self._generations = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._sessions = session_pb2_grpc.SessionServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        # Takes bytes: a request is kept for as long as its stream may have to be resumed, and a message is far larger.
        self._generate: Any = self._channel.unary_stream(
            "/specd.v1.GenerationService/Generate", response_deserializer=generation_pb2.GenerateResponse.FromString
        )
        self._count: Any = self._channel.unary_unary(
            "/specd.v1.GenerationService/CountTokens",
            response_deserializer=generation_pb2.CountTokensResponse.FromString,
        )

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
        continue_final_message: bool = False,
        **options: Unpack[GenerationOptions],
    ) -> TokenCount:
        """Return how many tokens `generate` begins with for a text or token ids, or `chat` for messages.

        `max_tokens` are to fit behind them.
        """
        asked = prompt_of(
            prompt,
            tools=tools,
            template_arguments=template_arguments,
            continue_final_message=continue_final_message,
        )
        request = to_count(asked, options, session_id=session_id)
        return self.count(request, token=options.get("token", ""))

    def tokenize(
        self,
        prompt: str | Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        model: str = "",
        add_special_tokens: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Return the tokens that `generate` begins with for a text, or `chat` for messages.

        Without `add_special_tokens`, a text has none in front.
        """
        asked = prompt_of(prompt, tools=tools, template_arguments=template_arguments)
        request = to_count(asked, {"model": model}, return_token_ids=True, add_special_tokens=add_special_tokens)
        return (self.count(request)).token_ids

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", token: str = "") -> str:
        """Return the text of tokens, with the names of special ones. `token` is that of another caller."""
        request = generation_pb2.DetokenizeRequest(token_ids=token_ids, model=model)
        text: str = (self._call(self._generations.Detokenize, request, token=token)).text
        return text

    def count(self, request: bytes, *, token: str = "") -> TokenCount:
        """Return the count that a request by `to_count` asks for, which takes a while to make for a long prompt.

        `token` is that of another caller, for a client without one of its own.
        """
        return counted(self._call(self._count, request, token=token))

    def describe(
        self,
        model: str = "",
        *,
        session_id: str = "",
        refuse_unloaded: bool = False,
        token: str = "",
        timeout_seconds: float | None = _CALL_SECONDS,
    ) -> ServiceDescription:
        """Return a model of the coordinator with its draft, and the limits of a request.

        Without `model`, it is that of the session, or else the default one. Without `refuse_unloaded`, it waits for a
        model that is not loaded. `token` is that of another caller, for a client without one of its own.
        """
        request = generation_pb2.GetModelInfoRequest(
            model=model, session_id=session_id, refuse_unloaded=refuse_unloaded
        )
        return described(self._call(self._generations.GetModelInfo, request, timeout_seconds, token))

    def models(self, *, token: str = "", timeout_seconds: float = _CALL_SECONDS) -> tuple[ModelInfo, ...]:
        """Return the models that the option `model` can name. One that was never loaded has its name alone."""
        request = generation_pb2.ListModelsRequest()
        response = self._call(self._generations.ListModels, request, timeout_seconds, token)
        return tuple(map(model_from, response.models))

    def statuses(self, *, token: str = "", timeout_seconds: float = _CALL_SECONDS) -> tuple[ModelStatus, ...]:
        """Return the states of the coordinator's models, the default one first; none if it serves one alone."""
        request = generation_pb2.ListModelsRequest()
        response = self._call(self._generations.ListModels, request, timeout_seconds, token)
        return tuple(map(status_from, response.statuses))

    def is_serving(self, *, timeout_seconds: float = _CALL_SECONDS) -> bool:
        """Return whether a generation could begin now."""
        request = health_pb2.HealthCheckRequest(service="specd.v1.GenerationService")
        check: Any = self._health.Check  # type: ignore[attr-defined]
        try:
            response = self._call(check, request, timeout_seconds)
        except SpecdError:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    def _stream(self, turn: Turn, options: GenerationOptions) -> Stream:
        generation = ResumableGeneration(
            turn,
            policy=self._retries,
            clock=time.monotonic,
            chance=random.random,
            connection=self._connection,
            keeps_tokens=self._keeps_tokens,
            options=options,
        )
        metadata = [*self._metadata, *metadata_of(options)]
        return Stream(generation, partial(self._open, metadata), self.address, options.get("timeout_seconds"))

    def _open(self, metadata: Sequence[tuple[str, str]], request: bytes, timeout_seconds: float | None) -> Any:
        return self._generate(request, timeout=timeout_seconds, metadata=metadata)

    def _call(self, method: Any, request: Any, timeout_seconds: float | None = _CALL_SECONDS, token: str = "") -> Any:
        if self._connection.is_closed:
            raise client_closed()
        metadata = [*self._metadata, *metadata_of({"token": token})]
        with failures(self.address, self._connection):
            response = method(request, timeout=timeout_seconds, metadata=metadata)
        self._connection.has_answered = True
        return response
