"""Rendering of chat templates in processes of their own, with limits of time, memory and length."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import io
import json
import os
import struct
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import Any
from weakref import WeakValueDictionary

import structlog
from pydantic_core import to_json

from specd.errors import InvalidRequestError
from specd.text.chat import Chat, ChatTemplate

log = structlog.get_logger()

# Judges a prompt by its beginning and the number of its characters. It raises InvalidRequestError.
CheckBeginning = Callable[[str, int], None]

_LENGTH = struct.Struct(">I")
MEMORY_BYTES = 512 * 2**20
MOST_CHARACTERS = 16 * 2**20
# A conversation and its prompt travel in pieces, so that no pipe holds another copy of them.
_PIECE_BYTES = 2**16
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
        beginning_characters: int = 0,
    ) -> None:
        """Set the limits of a rendering: its seconds, its memory and the characters of its prompt.

        The beginning of a prompt, by which a request can be refused, has `beginning_characters`.
        """
        self._template = template
        self._seconds = seconds
        self._memory_bytes = memory_bytes
        self._most_characters = most_characters
        self._beginning_characters = beginning_characters
        self._free: list[asyncio.subprocess.Process] = []
        self._all: set[asyncio.subprocess.Process] = set()
        self._room = asyncio.Semaphore(_MOST_PROCESSES)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def render(self, chat: Chat, client: str, check: CheckBeginning = lambda beginning, length: None) -> str:
        """Return the prompt that the template makes of a client's conversation.

        `check` is called on a thread with the prompt's beginning; what it refuses is read no further. Raises what
        `check` and ChatTemplate.render raise, and InvalidRequestError (CHAT_TEMPLATE_FAILED) beyond a limit.
        """
        self._template.check(chat)
        turn = self._turns.setdefault(client, asyncio.Lock())
        async with turn, self._room:
            process = self._free.pop() if self._free else await self._start()
            try:
                prompt = await self._rendered(process, chat, check)
            except InvalidRequestError:
                self._free.append(process)
                raise
            except BaseException as error:
                self._kill(process)
                if isinstance(error, TimeoutError):
                    raise self._failed(f"it took longer than {self._seconds:g} s") from None
                if isinstance(error, (OSError, EOFError, ValueError)):
                    why = f"its process ended, because of an error or more than {self._memory_bytes // 2**20} MiB"
                    raise self._failed(why) from None
                raise
            self._free.append(process)
        return prompt

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
                await _exchange(process, lambda: {**asdict(self._template), **limits})
        except BaseException:
            self._kill(process)
            raise
        log.info("started a process for chat templates", pid=process.pid)
        return process

    async def _rendered(self, process: asyncio.subprocess.Process, chat: Chat, check: CheckBeginning) -> str:
        async with asyncio.timeout(self._seconds):
            answer = await _exchange(process, lambda: asdict(chat))
        if "reason" in answer:
            raise InvalidRequestError(answer["reason"], answer["error"], for_log=answer["for_log"])
        prompt = _Prompt(process, answer["characters"])
        async with asyncio.timeout(self._seconds):
            await prompt.read(self._beginning_characters)
        try:
            await asyncio.to_thread(lambda: check(prompt.text, prompt.num_characters))
        except InvalidRequestError:
            async with asyncio.timeout(self._seconds):
                await prompt.skip()
            raise
        async with asyncio.timeout(self._seconds):
            await prompt.read(prompt.num_characters)
        return prompt.text

    def _kill(self, process: asyncio.subprocess.Process) -> None:
        self._all.discard(process)
        with contextlib.suppress(ProcessLookupError):
            process.kill()

    def _failed(self, why: str) -> InvalidRequestError:
        log.warning("a chat template exceeded its limits", reason="CHAT_TEMPLATE_FAILED", why=why)
        return InvalidRequestError("CHAT_TEMPLATE_FAILED", f"the chat template failed on this conversation: {why}")


class _Prompt:
    """The prompt that a process writes; `text` is the part that has been read."""

    def __init__(self, process: asyncio.subprocess.Process, num_characters: int) -> None:
        self.num_characters = self._num_left = num_characters
        self._process = process
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text = io.StringIO()

    @property
    def text(self) -> str:
        return self._text.getvalue()

    async def read(self, most: int) -> None:
        """Read the next characters, at most this number."""
        async for piece in self._pieces(most):
            self._text.write(piece)

    async def skip(self) -> None:
        """Read the rest, and forget it."""
        async for _ in self._pieces(self._num_left):
            pass

    async def _pieces(self, most: int) -> AsyncIterator[str]:
        assert self._process.stdout is not None
        end = max(self._num_left - most, 0)
        while (wanted := self._num_left - end) > 0:
            # A character has at least one byte, so these are not too many.
            data = await self._process.stdout.read(min(wanted, _PIECE_BYTES))
            if not data:
                raise EOFError
            piece = self._decoder.decode(data)
            self._num_left -= len(piece)
            yield piece


async def _exchange(process: asyncio.subprocess.Process, message: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Send a message, which is made on a thread, and return the first line of the answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    # Python's json would hold the text beside its bytes, and with a wide character four bytes for each one.
    data = memoryview(await asyncio.to_thread(lambda: to_json(message())))
    process.stdin.write(_LENGTH.pack(len(data)))
    for start in range(0, len(data), _PIECE_BYTES):
        process.stdin.write(data[start : start + _PIECE_BYTES])
        await process.stdin.drain()
    answer: dict[str, Any] = json.loads(await process.stdout.readline())
    return answer
