"""MultiplexService: the serving end of a call that carries the streams of many sessions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, NoReturn

import grpc
import structlog
from google.protobuf.message import DecodeError
from google.rpc import code_pb2

from specd.errors import STATUS_DETAILS, InvalidRequestError, SpecdError, to_status
from specd.rpc.frame_writer import FrameWriter
from specd.rpc.limits import MAX_STREAMS
from specd.rpc.messages import INCARNATION
from specd.v1 import multiplex_pb2_grpc
from specd.v1.multiplex_pb2 import End, Frame, MultiplexRequest, MultiplexResponse

log = structlog.get_logger()

# The most requests of a stream that wait. Sessions read at once, and each request supersedes the one before.
_MOST_UNREAD = 64


class MultiplexService(multiplex_pb2_grpc.MultiplexServiceServicer):
    """Serves each stream of a call as the worker's method serves a call by itself."""

    def __init__(
        self, incarnation: Callable[[], str], serve: Callable[[Any], Awaitable[None]], parse: Callable[[bytes], Any]
    ) -> None:
        """`incarnation` returns the worker's, or raises the SpecdError for which it cannot serve yet.

        `serve` serves one session over a context, and `parse` reads its requests.
        """
        self._incarnation = incarnation
        self._serve = serve
        self._parse = parse

    async def Multiplex(
        self,
        request_iterator: AsyncIterator[MultiplexRequest],
        context: grpc.aio.ServicerContext[MultiplexRequest, MultiplexResponse],
    ) -> None:
        """Serve the sessions of a coordinator."""
        try:
            incarnation = self._incarnation()
        except SpecdError as error:
            await context.read()  # gRPC loses a status that meets a write of the caller
            await context.abort_with_status(to_status(error))
        await context.send_initial_metadata(((INCARNATION, incarnation),))
        writer = FrameWriter(lambda frames: context.write(MultiplexResponse(frames=frames)))
        try:
            async with asyncio.TaskGroup() as serving:
                await self._serve_streams(context, writer, serving)
        except ExceptionGroup as group:  # the streams report their own errors, so this is of a request
            raise group.exceptions[0] from None
        await writer.flush()

    async def _serve_streams(self, context: Any, writer: FrameWriter, serving: asyncio.TaskGroup) -> None:
        streams: dict[int, _Stream] = {}
        while (request := await context.read()) is not grpc.aio.EOF:
            for frame in request.frames:
                if (stream := streams.get(frame.stream)) is not None:
                    stream.take(frame)
                elif frame.WhichOneof("content") == "session_id":
                    stream = streams[frame.stream] = _Stream(frame, writer, self._parse)
                    stream.serving = serving.create_task(self._serve_stream(stream, len(streams)))
                    # Not at the end of the task, because one that is cancelled first never runs.
                    stream.serving.add_done_callback(partial(_forget, streams, stream.number))
            await writer.make_room()
        for stream in streams.values():
            stream.say_eof()

    async def _serve_stream(self, stream: _Stream, num_streams: int) -> None:
        end = End(code=code_pb2.CANCELLED)
        try:
            if num_streams > MAX_STREAMS:
                await stream.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"a call has at most {MAX_STREAMS} streams")
            await self._serve(stream)
            end = End(code=code_pb2.OK)
        except _EndedError as ended:
            end = ended.end
        except Exception:
            log.exception("a session's stream failed")
            end = End(code=code_pb2.INTERNAL, message="the worker failed on this request; its log has the cause")
        finally:
            stream.end(end)


def _forget(streams: dict[int, _Stream], number: int, serving: asyncio.Task[None]) -> None:
    del streams[number]


class _EndedError(Exception):
    """Ends a stream with a status."""

    def __init__(self, end: End) -> None:
        super().__init__(end.message)
        self.end = end


class _Stream:
    """A stream in a call, with those methods of `grpc.aio.ServicerContext` that sessions use."""

    def __init__(self, opening: Frame, writer: FrameWriter, parse: Callable[[bytes], Any]) -> None:
        self.number = opening.stream
        self.serving: asyncio.Task[None] | None = None
        self._session_id = opening.session_id
        self._writer = writer
        self._parse = parse
        self._received = asyncio.Queue[bytes | None]()

    def take(self, frame: Frame) -> None:
        """Take a frame from the coordinator."""
        if frame.WhichOneof("content") == "message" and self._received.qsize() < _MOST_UNREAD:
            self._received.put_nowait(frame.message)
        elif frame.end.code == code_pb2.OK and frame.HasField("end"):
            self.say_eof()
        elif self.serving is not None:
            self.serving.cancel()

    def say_eof(self) -> None:
        """Note that no request follows."""
        self._received.put_nowait(None)

    def end(self, end: End) -> None:
        """Send the status of the stream."""
        self._writer.put(Frame(stream=self.number, end=end))

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of the session."""
        return (("specd-session-id", self._session_id),)

    async def send_initial_metadata(self, metadata: object) -> None:
        """Do nothing: the call has sent them."""

    async def read(self) -> Any:
        """Return the next request, or EOF. Raises InvalidRequestError for a broken one."""
        data = await self._received.get()
        if data is None:
            return grpc.aio.EOF
        try:
            return self._parse(data)
        except DecodeError as error:
            raise InvalidRequestError("BROKEN_MESSAGE", f"cannot parse a session's request: {error}") from error

    async def write(self, response: Any) -> None:
        """Send a response."""
        await self._writer.make_room()
        self._writer.put(Frame(stream=self.number, message=response.SerializeToString()))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        """End the stream with a status."""
        for_programs = dict(trailing_metadata).get(STATUS_DETAILS, b"")
        raise _EndedError(End(code=code.value[0], message=details, details=for_programs))

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        """End the stream with a status that has details for programs."""
        await self.abort(status.code, status.details or "", status.trailing_metadata or ())
