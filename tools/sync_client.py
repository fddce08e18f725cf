"""Writes the client for threads from the client for event loops: `make client`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import tokenize_rt
import unasync

CLIENT = Path(__file__).parents[1] / "specd" / "client"
MODULES = {"async_client": "client", "async_session": "session", "async_stream": "stream"}
NAMES = {
    **MODULES,
    "AsyncClient": "Client",
    "AsyncClientSession": "ClientSession",
    "AsyncStream": "Stream",
    "async_calls": "calls",
    "aclose": "close",
    "aclosing": "closing",
    "anext": "next",
    "RuntimeError": "ValueError",  # what closing a generator raises while it runs
}
# Docstrings and comments, which unasync leaves as they are.
PHRASES = {
    "The client for event loops.": "The client for threads.",
    "It belongs to the event loop in which it is made.": "Threads may share it; processes that fork may not.",
    "an async context manager": "a context manager",
    "`async with`": "`with`",
    "`AsyncClient": "`Client",
    ", in an event loop.": ", in a thread of the caller's.",
    "a task that reads": "a thread that reads",
    "another task reads": "another thread reads",
}


def synchronous(source: str) -> str:
    """Return the module for threads that has this source for event loops, unformatted."""
    rule = unasync.Rule("", "", additional_replacements=NAMES)
    text: str = tokenize_rt.tokens_to_src(list(rule._unasync_tokens(tokenize_rt.src_to_tokens(source))))
    for phrase, other in PHRASES.items():
        text = text.replace(phrase, other)
    return text


def write() -> None:
    """Write the modules."""
    ruff = Path(sys.executable).with_name("ruff")
    for name, other in MODULES.items():
        path = CLIENT / f"{other}.py"
        head = f"# Written by `make client` from {name}.py: change that one.\n"
        path.write_text(head + synchronous((CLIENT / f"{name}.py").read_text()))
        fix = ["check", "--quiet", "--fix", "--unsafe-fixes", "--select", "I,UP028"]
        for arguments in (fix, ["format", "--quiet"]):
            subprocess.run([ruff, *arguments, path], check=True)


if __name__ == "__main__":
    write()
