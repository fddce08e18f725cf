"""The end of a rank's process when a step takes too long, or another rank is lost or silent."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import structlog

from specd.supervised import tell_supervisor
from specd.v1.ranks_pb2 import Beat, RankMessage
from specd.worker.ranks.connection import LostRankError, RankConnection

log = structlog.get_logger()

_LOOK_SECONDS = 0.05
_BEAT_SECONDS = 0.25


def end_process(why: str) -> None:
    """End this process at once, because a thread that waits in a collective cannot be interrupted.

    The other ranks see the end of their connections and end, too. The supervisor starts them again.
    """
    log.error("this rank ends, and with it all others", why=why)
    tell_supervisor(failure=f"its ranks have ended: {why}")
    os._exit(1)


@dataclass
class _Limit:
    what: str
    left_seconds: float


class Watch:
    """Threads beside the one that computes: one counts the seconds of a step, another sends beats.

    It counts its own looks, not the clock, so that a pause of the whole machine ends nothing.
    """

    def __init__(self, silence_seconds: float, end: Callable[[str], None] = end_process) -> None:
        """Call `end` with a reason when another rank is silent for this long, or a step takes too long."""
        self.silence_seconds = silence_seconds
        self.describe: Callable[[], Beat] = Beat  # the beat to send
        self.look_at: Callable[[RankConnection], str] = lambda _: ""  # a fault that the other rank's beat shows
        self._end = end
        self._connections: tuple[RankConnection, ...] = ()
        self._limit: _Limit | None = None
        self._is_closed = threading.Event()
        for run in (self._look, self._beat):
            threading.Thread(target=run, name="ranks", daemon=True).start()

    def add(self, connection: RankConnection) -> None:
        """Send beats on a connection, and expect them."""
        self._connections = (*self._connections, connection)

    def discard(self, connection: RankConnection) -> None:
        """Forget a connection."""
        self._connections = tuple(each for each in self._connections if each is not connection)

    @contextlib.contextmanager
    def within(self, seconds: float, what: str) -> Iterator[None]:
        """Call `end` if the block takes longer than this; `what` names it."""
        self.allow(seconds, what)
        try:
            yield
        finally:
            self.clear()

    def allow(self, seconds: float, what: str) -> None:
        """Call `end` after these seconds, unless `clear` is called before; `what` names what takes them."""
        self._limit = _Limit(what, seconds)

    def clear(self) -> None:
        """Set no limit."""
        self._limit = None

    def close(self) -> None:
        """End nothing from now on, and send no beats."""
        self._is_closed.set()
        self._connections = ()

    def _look(self) -> None:
        while not self._is_closed.is_set():
            time.sleep(_LOOK_SECONDS)
            if (limit := self._limit) is not None:
                limit.left_seconds -= _LOOK_SECONDS
                if limit.left_seconds < 0 and limit is self._limit:
                    self._end(f"{limit.what} takes too long")
            for connection in self._connections:
                connection.silent_seconds += _LOOK_SECONDS
                if connection.silent_seconds > self.silence_seconds and not connection.lost:
                    self._end(f"{connection.peer} is silent for {connection.silent_seconds:.1f} s")
                if fault := self.look_at(connection):
                    self._end(fault)

    def _beat(self) -> None:
        while not self._is_closed.wait(_BEAT_SECONDS):
            message = RankMessage(beat=self.describe())
            for connection in self._connections:
                with contextlib.suppress(LostRankError):  # its reader knows it, too
                    connection.send(message)
