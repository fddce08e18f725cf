"""Rendering of chat templates in processes of their own, with limits of time, memory and length."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import struct
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from weakref import WeakValueDictionary

import structlog

from specd.errors import InvalidRequestError
from specd.text.chat import Chat, ChatTemplate

log = structlog.get_logger()

_LENGTH = struct.Struct(">I")
MEMORY_BYTES = 512 * 2**20
MOST_CHARACTERS = 16 * 2**20
# A client has one rendering at a time, so that slow conversations of one client do not delay the others.
_MOST_PROCESSES = 2
_START_SECONDS = 60.0


class TemplateRenderer:
    """Renders a model's chat template, which is a program of unknown origin, on conversations of unknown users.

    The processes are started at their first use, and kept, because an import takes half a second. A process that
    exceeds its time or memory is killed.
    """

    def __init__(
        self,
        template: ChatTemplate,
        *,
        seconds: float,
        memory_bytes: int = MEMORY_BYTES,
        most_characters: int = MOST_CHARACTERS,
    ) -> None:
        """Set the limits of a rendering: its seconds, its memory and the characters of its prompt."""
        self._template = template
        self._seconds = seconds
        self._memory_bytes = memory_bytes
        self._most_characters = most_characters
        self._free: list[asyncio.subprocess.Process] = []
        self._all: set[asyncio.subprocess.Process] = set()
        self._room = asyncio.Semaphore(_MOST_PROCESSES)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def render(self, chat: Chat, client: str) -> str:
        """Return the prompt that the template makes of a client's conversation.

        Raises what ChatTemplate.render raises, and InvalidRequestError (CHAT_TEMPLATE_FAILED) beyond a limit.
        """
        self._template.check(chat)
        turn = self._turns.setdefault(client, asyncio.Lock())
        async with turn, self._room:
            process = self._free.pop() if self._free else await self._start()
            try:
                async with asyncio.timeout(self._seconds):
                    answer = await self._exchange(process, lambda: asdict(chat))
            except BaseException as error:
                self._kill(process)
                if isinstance(error, TimeoutError):
                    raise self._failed(f"it took longer than {self._seconds:g} s") from None
                if isinstance(error, (OSError, asyncio.IncompleteReadError)):
                    why = f"its process ended, because of an error or more than {self._memory_bytes // 2**20} MiB"
                    raise self._failed(why) from None
                raise
            self._free.append(process)
        if "prompt" in answer:
            return answer["prompt"]
        raise InvalidRequestError(answer["reason"], answer["error"], for_log=answer["for_log"])

    async def close(self) -> None:
        """End the processes."""
        processes = [*self._all]
        for process in processes:
            self._kill(process)
        await asyncio.gather(*(process.wait() for process in processes), return_exceptions=True)

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "specd.text.template_process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Without the coordinator's environment, so that a template outside its sandbox finds no token.
            env={name: os.environ[name] for name in ("PATH", "HOME", "LANG", "PYTHONPATH") if name in os.environ},
            start_new_session=True,
        )
        self._all.add(process)
        limits = {
            "seconds": self._seconds,
            "memory_bytes": self._memory_bytes,
            "most_characters": self._most_characters,
        }
        try:
            async with asyncio.timeout(_START_SECONDS):
                await self._exchange(process, lambda: {**asdict(self._template), **limits})
        except BaseException:
            self._kill(process)
            raise
        log.info("started a process for chat templates", pid=process.pid)
        return process

    async def _exchange(
        self, process: asyncio.subprocess.Process, message: Callable[[], dict[str, Any]]
    ) -> dict[str, str]:
        assert process.stdin is not None
        assert process.stdout is not None
        # A conversation can have a million values, and the event loop has other sessions.
        data = await asyncio.to_thread(lambda: json.dumps(message()).encode())
        process.stdin.write(_LENGTH.pack(len(data)) + data)
        await process.stdin.drain()
        (length,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
        answer: dict[str, str] = await asyncio.to_thread(json.loads, await process.stdout.readexactly(length))
        return answer

    def _kill(self, process: asyncio.subprocess.Process) -> None:
        self._all.discard(process)
        with contextlib.suppress(ProcessLookupError):
            process.kill()

    def _failed(self, why: str) -> InvalidRequestError:
        log.warning("a chat template exceeded its limits", reason="CHAT_TEMPLATE_FAILED", why=why)
        return InvalidRequestError("CHAT_TEMPLATE_FAILED", f"the chat template failed on this conversation: {why}")
