"""The process that renders a chat template, with bounded resources; it can be killed.

It reads a template, then conversations, from standard input: JSON, preceded by its length. It writes answers to
standard output: a line of JSON, which has an error or the number of characters of the prompt that follows it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

from specd.errors import InvalidRequestError
from specd.text.chat import Chat, ChatTemplate

_LENGTH = struct.Struct(">I")
_WATCH_SECONDS = 0.02


def main() -> None:
    """Render until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at a terminal: the coordinator decides when to stop
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print to standard error
    setup = _read(requests)
    if setup is None:
        return
    template = ChatTemplate(setup["source"], setup["special_tokens"], setup["model_name"])
    ChatTemplate("{{ messages }}").render(Chat(({"role": "user", "content": ""},)))  # imports what it needs
    seconds, memory_bytes, most_characters = (setup[name] for name in ("seconds", "memory_bytes", "most_characters"))
    _limit(memory_bytes)
    _write(answers, {}, b"")
    while (request := _read(requests)) is not None:
        used = time.process_time()
        # A limit of processor time ends an endless template, also if the coordinator dies during it.
        resource.setrlimit(resource.RLIMIT_CPU, (int(used + seconds) + 2, resource.RLIM_INFINITY))
        _write(answers, *_answer(template, Chat(**request), memory_bytes, most_characters))


def _answer(
    template: ChatTemplate, chat: Chat, memory_bytes: int, most_characters: int
) -> tuple[dict[str, Any], bytes]:
    """Return the line of JSON and the prompt behind it."""
    try:
        prompt = template.render(chat)
        if len(prompt) <= most_characters:
            return {"characters": len(prompt)}, prompt.encode()
        failed = f"it wrote {len(prompt)} characters, more than {most_characters}"
    except UnicodeEncodeError:
        failed = "it wrote half of a surrogate pair"
    except InvalidRequestError as error:
        if not isinstance(error.__cause__, MemoryError):
            return {"reason": error.reason, "error": str(error), "for_log": error.for_log}, b""
        failed = f"it needed more than {memory_bytes // 2**20} MiB of memory"
    why = f"the chat template failed on this conversation: {failed}"
    return {"reason": "CHAT_TEMPLATE_FAILED", "error": why, "for_log": why}, b""


def _limit(memory_bytes: int) -> None:
    """Bound the memory of rendering, beyond this process's present memory, and forbid writing files."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # only Linux enforces this limit
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * os.sysconf("SC_PAGE_SIZE") + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        return
    threading.Thread(target=_watch, args=(_resident_bytes() + memory_bytes,), daemon=True).start()


def _watch(most_bytes: int) -> None:
    """End the process when it takes too much memory, because macOS enforces no limit."""
    while _resident_bytes() < most_bytes:
        time.sleep(_WATCH_SECONDS)
    os._exit(1)


def _resident_bytes() -> int:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _read(file: BinaryIO) -> dict[str, Any] | None:
    header = file.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    message: dict[str, Any] = json.loads(file.read(_LENGTH.unpack(header)[0]))
    return message


def _write(file: BinaryIO, message: dict[str, Any], prompt: bytes) -> None:
    file.write(json.dumps(message).encode() + b"\n")
    file.write(prompt)
    file.flush()


if __name__ == "__main__":
    main()
