"""The writing end of a multiplexed call."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from specd.v1.multiplex_pb2 import Frame

# The most bytes that one message gathers. A longer frame goes by itself.
_MOST_BYTES = 1 << 20
# The most bytes that wait for a peer that does not read; then its streams write nothing, and nothing is read from it.
_MOST_WAITING_BYTES = 1 << 23
_FRAME_BYTES = 128  # of a frame in memory, without its message


class FrameWriter:
    """Sends frames in order, and gathers those of one pass of the event loop into one message."""

    def __init__(self, write: Callable[[list[Frame]], Awaitable[None]]) -> None:
        """`write` sends frames in one message."""
        self._write = write
        self._waiting: deque[Frame] = deque()
        self._waiting_bytes = 0
        self._writing: asyncio.Future[None] | None = None
        self._is_broken = False

    def put(self, frame: Frame) -> None:
        """Send a frame soon. Frames of an ended call are dropped: its reader has the reason."""
        if self._is_broken:
            return
        self._waiting.append(frame)
        self._waiting_bytes += len(frame.message) + _FRAME_BYTES
        if self._writing is None:
            self._writing = asyncio.ensure_future(self._write_all())

    async def flush(self) -> None:
        """Wait until all frames are sent, or the call has ended."""
        if self._writing is not None:
            await asyncio.shield(self._writing)

    async def make_room(self) -> None:
        """Wait for a peer that has left megabytes unread."""
        while self._waiting_bytes > _MOST_WAITING_BYTES:
            await self.flush()
        if self._is_broken:  # no write waits any more, and a task that never waits cannot be cancelled
            await asyncio.sleep(0)

    async def _write_all(self) -> None:
        try:
            while self._waiting:
                await self._write(self._next_frames())
        except (Exception, asyncio.CancelledError):  # gRPC has several for a call that has ended
            self._is_broken = True
            self._waiting.clear()
            self._waiting_bytes = 0
        finally:
            self._writing = None

    def _next_frames(self) -> list[Frame]:
        frames = [self._waiting.popleft()]
        size = len(frames[0].message)
        while self._waiting and (size := size + len(self._waiting[0].message)) <= _MOST_BYTES:
            frames.append(self._waiting.popleft())
        self._waiting_bytes -= sum(len(frame.message) + _FRAME_BYTES for frame in frames)
        return frames
