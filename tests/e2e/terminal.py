"""A `specd` command on a pseudo-terminal, with its input and its screen."""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.e2e.processes import PATIENCE_SECONDS, environment

CTRL_C, CTRL_D = "\x03", "\x04"
UP, TAB, ALT_ENTER = "\x1b[A", "\t", "\x1b\r"
# Nothing behind this terminal answers where its cursor is, which prompt_toolkit would wait for.
_WITHOUT_ANSWERS = {"PROMPT_TOOLKIT_NO_CPR": "1"}
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[a-zA-Z]|\].*?\x07)")

# A process of its own makes the terminal, because this one has threads, and must not fork. Tests that run in the
# background of a shell ignore SIGINT, and so would the command.
_ON_TERMINAL = (
    "import os, pty, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
)


class Terminal:
    """A command that runs on a terminal, of 100 columns if not told otherwise, as a context manager."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        command = [sys.executable, "-c", _ON_TERMINAL, sys.executable, "-m", "specd", *arguments]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(
                **{"COLUMNS": "100", "LINES": "40", "TERM": "xterm-256color", **_WITHOUT_ANSWERS, **variables}
            ),
            cwd=Path(__file__).parent,
        )
        self.shown = ""  # all of it, escape sequences included
        self._seen = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    @property
    def text(self) -> str:
        """The shown text, without colours."""
        return _ESCAPES.sub("", self.shown)

    @property
    def screen(self) -> list[str]:
        """The lines that are there now, empty ones left out."""
        lines, row, column = [""], 0, 0
        for part in re.findall(r"\x1b\[[0-9;?]*[a-zA-Z]|[^\x1b]", self.shown):
            if part == "\n":
                row += 1
                lines += [""] * (row + 1 - len(lines))
            elif part == "\r":
                column = 0
            elif part.endswith("A") and part != "A":
                row = max(row - int(part[2:-1] or 1), 0)
            elif part.endswith("K") and part != "K":
                lines[row] = ""
            elif not part.startswith("\x1b"):
                lines[row] = lines[row].ljust(column)[:column] + part + lines[row][column + 1 :]
                column += 1
        return [line for line in lines if line.strip()]

    def type(self, keys: str) -> None:
        """Type keys; Enter is a line's end."""
        assert self._process.stdin is not None
        self._process.stdin.write(keys.encode())
        self._process.stdin.flush()

    def paste(self, text: str) -> None:
        """Paste a text, as terminals do where a program asks them to mark what is pasted."""
        self.type(f"\x1b[200~{text}\x1b[201~")

    def wait_for(self, pattern: str) -> str:
        """Wait until a pattern is seen behind the last one that was waited for, and return what it matched."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (match := re.compile(pattern).search(self.text, self._seen)) is None:
            assert self._read(deadline), f"{pattern!r} does not come: {self.text[-2000:]}"
        self._seen = match.end()
        return match[0]

    def exit_code(self) -> int:
        """Wait for the end."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._read(deadline):
            pass
        return self._process.wait(PATIENCE_SECONDS)

    def _read(self, deadline: float) -> bool:
        """Read the next output; returns False at the end, or after the deadline."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(max(deadline - time.monotonic(), 0)):
                return False
        part = os.read(self._process.stdout.fileno(), 65536)
        self.shown += part.decode(errors="replace")
        return bool(part)
