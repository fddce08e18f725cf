"""The coordinator's end of a call that carries the streams of many sessions: specd/v1/multiplex.proto."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import grpc
from google.rpc import code_pb2

from specd.errors import STATUS_DETAILS
from specd.rpc.frame_writer import FrameWriter
from specd.v1 import multiplex_pb2_grpc
from specd.v1.multiplex_pb2 import End, Frame, MultiplexRequest

_SECONDS_TO_END = 5.0  # for a worker to end the call after the last stream
# Answers to its latest requests, and its status.
_MOST_LATE_FRAMES = 8
_ERRORS = {code.value[0]: code for code in grpc.StatusCode if code is not grpc.StatusCode.OK}


class Multiplexer:
    """One call to a worker, which ends with the last of its streams."""

    def __init__(self, channel: grpc.aio.Channel, parse: Callable[[bytes], Any]) -> None:
        """Begin a call on a channel; `parse` reads the responses of the worker's method."""
        self.channel = channel
        self._call: Any = multiplex_pb2_grpc.MultiplexServiceStub(channel).Multiplex()
        self._parse = parse
        self._writer = FrameWriter(lambda frames: self._call.write(MultiplexRequest(frames=frames)))
        self._streams: dict[int, MultiplexedCall] = {}
        self._numbers = itertools.count(1)
        self._num_late = 0  # the most frames that can still come for streams that were left
        self._reading = asyncio.ensure_future(self._read())
        self._ending: asyncio.Future[None] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether no stream can begin."""
        return self._ending is not None or self._reading.done()

    def open(self, session_id: str) -> MultiplexedCall:
        """Begin a stream for a session."""
        number = next(self._numbers)
        stream = self._streams[number] = MultiplexedCall(self, number)
        self.put(Frame(stream=number, session_id=session_id))
        return stream

    def put(self, frame: Frame) -> None:
        """Send a frame of a stream soon."""
        self._writer.put(frame)

    def parse(self, data: bytes) -> Any:
        """Read a response. Raises google.protobuf.message.DecodeError."""
        return self._parse(data)

    def forget(self, number: int) -> None:
        """Leave a stream, of which no more is sent or read; the last one ends the call."""
        if self._streams.pop(number, None) is None:
            return
        self._num_late += _MOST_LATE_FRAMES
        if not self._streams and self._ending is None:
            self._ending = asyncio.ensure_future(self._end())

    async def initial_metadata(self) -> Any:
        """Wait for the worker's first answer and return its metadata. Raises AioRpcError."""
        return await self._call.initial_metadata()

    async def _end(self) -> None:
        """End the call in order: for each call that is cancelled, grpc.aio leaks memory (grpc/grpc#43360)."""
        with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            async with asyncio.timeout(_SECONDS_TO_END):
                await self._writer.flush()
                await self._call.done_writing()
                await asyncio.shield(self._reading)
        self._call.cancel()  # without effect on an ended call

    async def _read(self) -> None:
        error: BaseException = _status(grpc.StatusCode.UNAVAILABLE, "the worker ended the call of all sessions")
        try:
            while (frames := cast(Any, await self._call.read())) is not grpc.aio.EOF:
                if frames is None:
                    raise ValueError("the frames of all sessions cannot be parsed")
                for frame in frames.frames:
                    if (stream := self._streams.get(frame.stream)) is not None:
                        stream.take(frame)
                        continue
                    self._num_late -= 1
                    if self._num_late < 0:
                        raise ValueError(f"a frame of stream {frame.stream}, which there is not")
        except (Exception, asyncio.CancelledError) as raised:  # grpc.aio cancels the reader of a closed channel
            error = raised
            self._call.cancel()
        for stream in tuple(self._streams.values()):
            stream.fail(error)
        self._streams.clear()


class MultiplexedCall:
    """A stream in a multiplexer, with those methods of `grpc.aio.StreamStreamCall` that streams of sessions use."""

    def __init__(self, multiplexer: Multiplexer, number: int) -> None:
        self._multiplexer = multiplexer
        self._number = number
        self._received: deque[bytes] = deque()
        self._end: BaseException | None = None  # EOFError where the status is OK
        self._coming: asyncio.Future[None] | None = None

    async def initial_metadata(self) -> Any:
        """Wait for the worker's first answer and return its metadata. Raises AioRpcError."""
        return await self._multiplexer.initial_metadata()

    async def write(self, request: Any) -> None:
        """Send a request. Raises InvalidStateError if the stream has ended."""
        if self._end is not None:
            raise asyncio.InvalidStateError("the stream has ended")
        self._multiplexer.put(Frame(stream=self._number, message=request.SerializeToString()))

    async def read(self) -> Any:
        """Return the next response, or EOF.

        Raises AioRpcError with the status of an ended stream, and DecodeError for a broken response.
        """
        while not self._received:
            if isinstance(self._end, EOFError):
                return grpc.aio.EOF
            if self._end is not None:
                raise self._end
            self._coming = asyncio.get_running_loop().create_future()
            await self._coming
        return self._multiplexer.parse(self._received.popleft())

    async def done_writing(self) -> None:
        """Say that no request follows."""
        if self._end is None:
            self._multiplexer.put(Frame(stream=self._number, end=End(code=code_pb2.OK)))

    def cancel(self) -> None:
        """End the stream at once; without effect on an ended one."""
        if self._end is None:
            self._multiplexer.put(Frame(stream=self._number, end=End(code=code_pb2.CANCELLED)))
            self.fail(asyncio.CancelledError())
            self._multiplexer.forget(self._number)

    def take(self, frame: Frame) -> None:
        """Take a frame from the worker."""
        if frame.WhichOneof("content") == "message":
            self._received.append(frame.message)
            self._wake()
            return
        is_ok = frame.end.code == code_pb2.OK and frame.HasField("end")
        self.fail(EOFError() if is_ok else _status_of(frame.end))
        self._multiplexer.forget(self._number)

    def fail(self, error: BaseException) -> None:
        """End the stream with an error."""
        if self._end is None:
            self._end = error
            self._wake()

    def _wake(self) -> None:
        if self._coming is not None and not self._coming.done():
            self._coming.set_result(None)


def _status_of(end: End) -> grpc.aio.AioRpcError:
    code = _ERRORS.get(end.code, grpc.StatusCode.UNKNOWN)
    return _status(code, end.message, *([(STATUS_DETAILS, end.details)] if end.details else []))


def _status(code: grpc.StatusCode, message: str, *trailing: tuple[str, bytes]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), message)
