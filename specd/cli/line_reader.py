"""The lines that a person types: edited on a terminal, with a history, or plain from a pipe."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

_LONGEST_HISTORY = 2**20  # bytes; a longer one loses its older half


class LineReader(Protocol):
    """Reads what a person says."""

    def read(self, begun: str = "") -> str:
        """Return the next message, on a terminal beginning with a text to edit. Raises EOFError, KeyboardInterrupt."""


def line_reader(console: Console, commands: Mapping[str, Iterable[str] | None], *, keeps_history: bool) -> LineReader:
    """Return the reader for where standard input comes from. It completes commands and their arguments."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        return EditedLines(commands, history_file() if keeps_history else None)
    return PlainLines(console)


class PlainLines:
    """Lines of a pipe, or of a terminal where the output goes elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def read(self, begun: str = "") -> str:
        """Return the next line; there is no way to edit a text."""
        return self._console.input("[bold]>[/] ")


class EditedLines:
    """Messages that can be edited.

    Enter ends a message, Alt-Enter begins a line, and a paste of several lines is one message. Ctrl-C deletes the typed
    text; without any it raises KeyboardInterrupt.
    """

    def __init__(self, commands: Mapping[str, Iterable[str] | None], history: Path | None) -> None:
        # Imported here, because a command that reads no lines must not wait for it.
        from prompt_toolkit import PromptSession
        from prompt_toolkit.formatted_text import HTML
        from prompt_toolkit.history import FileHistory, InMemoryHistory

        self._session: PromptSession[str] = PromptSession(
            HTML("<b>></b> "),
            multiline=True,
            prompt_continuation="  ",
            key_bindings=_key_bindings(),
            completer=_completer(commands),
            complete_while_typing=False,
            enable_history_search=True,
            history=FileHistory(str(history)) if history is not None else InMemoryHistory(),
        )

    def read(self, begun: str = "") -> str:
        """Return the next message, with all its lines."""
        return self._session.prompt(default=begun)


def _completer(commands: Mapping[str, Iterable[str] | None]) -> Any:
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    paths = PathCompleter(expanduser=True)

    class CommandCompleter(Completer):
        """Completes commands, and behind one its arguments; messages are left alone."""

        def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
            name, space, begun = document.text_before_cursor.partition(" ")
            if space and name == "/save":
                yield from paths.get_completions(Document(begun), complete_event)
                return
            words: Iterable[str] = commands.get(name) or () if space else commands if name.startswith("/") else ()
            begun = begun if space else name
            yield from (Completion(word, -len(begun)) for word in words if word.startswith(begun))

    return CommandCompleter()


def _key_bindings() -> Any:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    bindings = KeyBindings()

    @bindings.add("enter")
    def end(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("c-c")
    def clear(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    return bindings


def history_file() -> Path | None:
    """Return the file of the history, which only the user can read; None if it cannot be written."""
    try:
        home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        path = Path(home) / "specd" / "chat-history"
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
        path.chmod(0o600)
        _shorten(path)
    except (OSError, RuntimeError):  # RuntimeError: HOME is not set, and the user id has no name
        return None
    return path


def _shorten(path: Path) -> None:
    if path.stat().st_size <= _LONGEST_HISTORY:
        return
    newer = path.read_bytes()[-_LONGEST_HISTORY // 2 :]
    with contextlib.suppress(ValueError):  # an entry begins with a comment of its time
        path.write_bytes(newer[newer.index(b"\n# ") :])
