"""Refusal of calls before they reach a service: callers without the right, unknown methods, broken messages."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from inspect import isasyncgenfunction
from typing import Any, TypeAlias

import grpc
import structlog
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from specd.errors import (
    InvalidRequestError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    to_status,
)
from specd.protocol import ProtocolMismatchError, check_protocol_in
from specd.rpc.access import Identify, serve_caller
from specd.rpc.limits import MAX_MESSAGE_BYTES, MAX_SHORT_BYTES, check_length, check_metadata
from specd.rpc.message_values import TooManyValuesError, check_values

log = structlog.get_logger()

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class BrokenMessageError(InvalidRequestError):
    """A request cannot be parsed as a message of its type."""

    def __init__(self, method: str, why: str) -> None:
        super().__init__("BROKEN_MESSAGE", f"cannot parse the request to {method}: {why}")


def refusing_server(
    options: Sequence[tuple[str, Any]], identify: Identify, max_message_bytes: int = MAX_MESSAGE_BYTES
) -> grpc.aio.Server:
    """Return a server that refuses broken or long messages, unknown methods, and calls for which `identify` raises.

    Register all its methods by name.
    """
    original, cygrpc.AioServer = cygrpc.AioServer, _Core  # grpc.aio has no parameter for it
    try:
        return grpc.aio.server(options=options, interceptors=[_Refuse(identify, max_message_bytes)])
    finally:
        cygrpc.AioServer = original


class _Refuse(grpc.aio.ServerInterceptor):
    """Identifies the caller, and answers INVALID_ARGUMENT where grpc.aio would answer UNKNOWN and log a traceback.

    Every method is served as one with a stream of requests, and its only request is read once the caller is known. So a
    stranger's message, which can be as large as the limit, is never kept. grpc.aio itself would read and parse it
    before a context exists that could answer.
    """

    def __init__(self, identify: Identify, max_message_bytes: int) -> None:
        self._identify, self._max_message_bytes = identify, max_message_bytes

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Return the method's handler, which refuses broken messages and callers without the right."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        return _refusing(handler, handler_call_details.method, self._identify, self._max_message_bytes)


def _refusing(handler: Any, method: str, identify: Identify, max_message_bytes: int) -> _Handler:
    answers = "stream" if handler.response_streaming else "unary"
    serve = getattr(handler, f"{'stream' if handler.request_streaming else 'unary'}_{answers}")

    message = None if handler.request_streaming else _request_of(method)

    def parse(data: bytes) -> Any:
        check_length(method, data, max_message_bytes)
        if message is not None and len(data) > MAX_SHORT_BYTES:
            check_values(method, message, data)
        try:
            return handler.request_deserializer(data) if handler.request_deserializer else data
        except DecodeError as error:
            raise BrokenMessageError(method, str(error)) from error

    async def received(requests: Any, context: _Context) -> Any:
        if handler.request_streaming:
            return requests
        if (data := await context.read()) is grpc.aio.EOF:
            raise BrokenMessageError(method, "the call has no message")
        return parse(data) if len(data) <= MAX_SHORT_BYTES else await asyncio.to_thread(parse, data)

    async def answer(requests: Any, context: _Context) -> Any:
        async with _refusals(context):
            serve_caller(identify(method, context))
            return await serve(await received(requests, context), context)

    async def generate(requests: Any, context: _Context) -> AsyncIterator[Any]:
        async with _refusals(context):
            serve_caller(identify(method, context))
            async for response in serve(await received(requests, context), context):
                yield response

    new_handler = getattr(grpc, f"stream_{answers}_rpc_method_handler")
    refusing: _Handler = new_handler(
        generate if isasyncgenfunction(serve) else answer,
        parse if handler.request_streaming else None,
        handler.response_serializer,
    )
    return refusing


def _request_of(method: str) -> Descriptor | None:
    """Return the type of a method's requests, or None if the process has no descriptor of the method."""
    try:
        return descriptor_pool.Default().FindMethodByName(method.strip("/").replace("/", ".")).input_type
    except KeyError:
        return None


@contextlib.asynccontextmanager
async def _refusals(context: _Context) -> AsyncIterator[None]:
    try:
        check_metadata(context)
        check_protocol_in(context.invocation_metadata() or ())
        yield
    except (
        BrokenMessageError,
        TooManyValuesError,
        ResourceExhaustedError,
        UnauthenticatedError,
        PermissionDeniedError,
        ProtocolMismatchError,
    ) as error:
        log.info("request refused", reason=error.reason, error=str(error))
        await context.abort_with_status(to_status(error))


class _Core(cygrpc.AioServer):  # type: ignore[misc]
    """Core of a grpc.aio server that survives a call to a method with a name that is not UTF-8; the original stops.

    Only calls to unknown methods arrive here, because registered methods have their own path.
    """

    async def _request_call(self) -> Any:
        refusals: set[asyncio.Task[None]] = set()
        while True:
            refusal = asyncio.ensure_future(_refuse_unknown_method(await super()._request_call()))
            refusals.add(refusal)
            refusal.add_done_callback(refusals.discard)


async def _refuse_unknown_method(call: Any) -> None:
    context = cygrpc._ServicerContext(call, None, None, asyncio.get_running_loop())
    with contextlib.suppress(grpc.aio.BaseError, cygrpc.ExecuteBatchError):  # aborted, or the client is gone
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "unknown method")
