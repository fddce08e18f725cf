"""A process's life: it announces itself, stops on a signal, exits on a second one, and ends with its supervisor."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import json
import os
import signal
import socket
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from specd.supervised import BEAT_SECONDS, supervisor, tell_supervisor
from specd.version import __version__

log = structlog.get_logger()


class Lifeline:
    """Signals, and the supervisor if there is one. Call `open` on the event loop of the process."""

    def __init__(self) -> None:
        self._stop = asyncio.Event()
        self._announced = False
        self._supervisor = supervisor()
        self._unread = b""
        self.on_message: Callable[[Mapping[str, Any]], None] | None = None  # called with those of the supervisor

    def open(self) -> None:
        """Watch for SIGINT, SIGTERM and the end of the supervisor."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        if self._supervisor is not None:
            loop.add_reader(self._supervisor, self._on_supervisor)

    @property
    def announced(self) -> bool:
        """Whether `announce` has been called."""
        return self._announced

    def announce(self, address: str, **facts: str) -> None:
        """Log that the process is ready at its address, and tell the supervisor. Only the first call counts."""
        if self._announced:
            return
        self._announced = True
        # The start's objects live as long as the process. Each collection would visit them all, while everything waits.
        gc.collect()
        gc.freeze()
        atexit.register(gc.unfreeze)  # otherwise libraries report at the end that their objects are still there
        log.info("ready", version=__version__, address=address, **facts)
        if tell_supervisor(address=address, **facts) and self._supervisor is not None:
            self._supervisor.setblocking(False)
            self._beat()

    async def wait_for_stop(self) -> None:
        """Wait for SIGINT or SIGTERM, or the end of the supervisor."""
        await self._stop.wait()

    def _beat(self) -> None:
        """Show the supervisor that the event loop runs, now and every second."""
        assert self._supervisor is not None
        with contextlib.suppress(OSError):  # the supervisor has ended, or hangs
            self._supervisor.send(b"\n")
        asyncio.get_running_loop().call_later(BEAT_SECONDS, self._beat)

    def _on_supervisor(self) -> None:
        """Take the messages of the supervisor, or its end."""
        assert self._supervisor is not None
        try:
            received = self._supervisor.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self._on_supervisor_gone()
            return
        *lines, self._unread = (self._unread + received).split(b"\n")
        for line in lines:
            if self.on_message is not None:
                self.on_message(json.loads(line))

    def _on_supervisor_gone(self) -> None:
        assert self._supervisor is not None
        asyncio.get_running_loop().remove_reader(self._supervisor)
        if not self._stop.is_set():
            log.warning("the supervisor has ended: stopping")
            self._stop.set()

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            log.warning("second signal: exiting at once")
            os._exit(128 + number)
        log.info("stopping", signal=number.name)
        self._stop.set()
