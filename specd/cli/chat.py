"""The command `specd chat`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specd.cli.completion import LEGEND, print_retrying, print_tokens, summary
from specd.cli.connection import Address, Insecure, TlsCa, TlsCert, TlsKey, TlsName, Token, reported_errors, words_for
from specd.cli.line_reader import LineReader, line_reader
from specd.cli.loading import LoadingLine, load_model, state_of
from specd.cli.options import RequestOptions, with_request_options
from specd.cli.rewindable_chat import RewindableChat, names_of_models, statuses_of
from specd.client.client import Client
from specd.client.events import Delta, Loading, Retrying
from specd.client.protocol.service import ServiceDescription
from specd.client.statistics import GenerationStatistics
from specd.client.stream import Stream
from specd.errors import InvalidRequestError, SpecdError
from specd.rpc.credentials import ClientCredentials
from specd.settings import DEFAULT_ADDRESS

_HELP = "/help lists the commands, /exit ends. Ctrl-C stops an answer."
_COMMANDS = {
    "/model [NAME]": "continue with another model, and load it if need be; without a name, list them",
    "/system [TEXT]": "change the system message, with - to none; without a text, show it",
    "/undo": "forget the last answer and its message, which can be edited",
    "/save FILE": "write the conversation to a new file: JSON for .json, otherwise Markdown",
    "/stats": "show statistics",
    "/reset": "start a new conversation",
    "/help": "show this list",
    "/exit": "end, as Ctrl-D does",
}
_KEYS = "Alt-Enter begins a line; a paste of several lines is one message. // begins a message with /."


@contextmanager
def _cancelled_by_ctrl_c(stream: Stream) -> Iterator[None]:
    """Let Ctrl-C cancel a stream while it is read.

    A KeyboardInterrupt within gRPC can leave one of its locks held, and no later call is answered then.
    """

    def cancel(number: int, frame: object) -> None:
        Thread(target=stream.cancel).start()  # this thread can hold a lock that it needs

    before = signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@with_request_options
def chat(
    options: RequestOptions,
    system: Annotated[str, typer.Option("--system", "-s", metavar="TEXT", help="System message.")] = "",
    history: Annotated[
        bool, typer.Option(help="Keep the typed lines for later conversations, in a file that only you can read.")
    ] = True,
    address: Address = DEFAULT_ADDRESS,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = "",
    token: Token = "",
    insecure: Insecure = False,
) -> None:
    """Talk with a chat model. The draft's tokens and looked-up ones are in colour."""
    credentials = ClientCredentials(tls_ca, tls_cert, tls_key, token, tls_name, insecure)
    request = options.checked()
    with reported_errors(address, credentials), Client(address, credentials=credentials) as client:
        conversation = TerminalConversation(
            RewindableChat(client, system, request),
            client,
            credentials,
            lambda error: words_for(error, address, credentials),
        )
        conversation.run(keeps_history=history)


class TerminalConversation:
    """A conversation at the terminal."""

    def __init__(
        self, talk: RewindableChat, client: Client, credentials: ClientCredentials, words: Callable[[SpecdError], str]
    ) -> None:
        self._talk = talk
        self._client = client
        self._credentials = credentials
        self._has_several = False  # models, each with its workers
        self._words = words
        self._turns: list[GenerationStatistics] = []
        self._begun = ""  # the text with which the next message begins
        self._console = Console(highlight=False, soft_wrap=True)
        self._aside = Console(stderr=True, style="dim", highlight=False, soft_wrap=True)
        self._commands: dict[str, Callable[[str], None]] = {
            "/model": self._choose_model,
            "/system": self._change_system,
            "/undo": self._undo,
            "/save": self._save,
            "/stats": self._show_statistics,
            "/reset": self._reset,
            "/help": self._show_help,
        }

    def run(self, *, keeps_history: bool = False) -> None:
        """Talk until /exit or the end of the input.

        Raises SpecdError if the first answer fails, and at once for a model without a chat template.
        """
        self._has_several = bool(statuses_of(self._client))
        service = self._described(self._talk.model if self._has_several else "")
        words = {**dict.fromkeys((*self._commands, "/exit")), "/model": names_of_models(self._client)}
        reader = line_reader(self._console, words, keeps_history=keeps_history)
        self._console.print(f"[bold]{service.target.name}[/]. {_HELP}")
        self._console.print(LEGEND)
        while (line := self._read(reader)) is not None:
            if line.startswith("/") and not line.startswith("//"):
                name, *rest = line.split(maxsplit=1)
                self._commands.get(name, self._refuse)(rest[0] if name in self._commands and rest else name)
            elif line:
                self._answer(line.removeprefix("/"))
        self._talk.close()

    def _described(self, model: str) -> ServiceDescription:
        """Wait for a model. Raises SpecdError, also for one without a chat template, and KeyboardInterrupt."""
        service = load_model(self._client, model, self._credentials, self._aside)
        if not service.chat_template:
            raise InvalidRequestError(
                "NO_CHAT_TEMPLATE",
                f"{service.target.public_name} cannot chat, because it has no chat template: complete a text with "
                f"specd generate 'TEXT'",
            )
        return service

    def _read(self, reader: LineReader) -> str | None:
        """Return the user's message; None at the end of the input."""
        begun, self._begun = self._begun, ""
        try:
            line = reader.read(begun).strip()
        except (EOFError, KeyboardInterrupt):
            self._console.print()
            return None
        return None if line == "/exit" else line

    def _answer(self, said: str) -> None:
        """Stream an answer. One that fails, or that Ctrl-C stops, does not become part of the conversation."""
        is_first = not self._talk.num_turns
        with self._talk.ask(said) as stream, _cancelled_by_ctrl_c(stream):
            try:
                self._show(stream)
            except SpecdError as error:
                self._console.print()
                if is_first or not sys.stdin.isatty():  # the next answer would fail too, or a script has to see it
                    raise
                self._aside.print(self._words(error), style="red", markup=False)
            else:
                try:
                    self._turns.append(stream.completion().statistics)
                except RuntimeError:  # it was cancelled before its end
                    self._aside.print("stopped: the conversation does not keep this answer")
                else:
                    self._talk.keep()

    def _show(self, stream: Stream) -> None:
        with LoadingLine(self._aside) as line:
            for event in stream:
                if isinstance(event, Loading):
                    line.show(self._talk.model, event)
                    continue
                line.clear()
                if isinstance(event, Delta):
                    print_tokens(self._console, event.tokens)
                elif isinstance(event, Retrying):
                    print_retrying(self._aside, event)
        self._console.print()

    def _show_statistics(self, _: str) -> None:
        if not self._turns:
            self._console.print("no answer yet")
            return
        last = self._turns[-1]
        generated = sum(turn.generated_tokens for turn in self._turns)
        proposed = sum(turn.proposed_tokens for turn in self._turns)
        accepted = sum(turn.accepted_tokens for turn in self._turns)
        rate = f"{accepted / proposed:.1%}" if proposed else "none"
        table = Table("", "last answer", "conversation", box=None, pad_edge=False, header_style="bold")
        table.add_row("answers", "1", str(len(self._turns)))
        table.add_row("prompt tokens", str(last.prompt_tokens), "")
        table.add_row("reused prompt tokens", str(last.target_reused_tokens), "")
        table.add_row("generated tokens", str(last.generated_tokens), str(generated))
        table.add_row("acceptance rate", f"{last.acceptance_rate:.1%}" if last.proposed_tokens else "none", rate)
        table.add_row("tokens/s", f"{last.tokens_per_second:.1f}", "")
        table.add_row("speed-up", f"{last.speedup:.2f}" if last.speedup else "not known", "")
        self._console.print(table)
        self._console.print(summary(last), style="dim")

    def _choose_model(self, name: str) -> None:
        names = names_of_models(self._client)
        if name == "/model":
            self._list_models(names)
        elif name in names:
            if self._has_several and not self._load(name):
                return
            self._talk.set_model(name)
            self._console.print(f"{name} continues the conversation", markup=False)
        else:
            known = ", ".join(names) or "no model that it names"
            self._console.print(f"there is no model {name!r} here: the coordinator serves {known}", markup=False)

    def _list_models(self, names: Sequence[str]) -> None:
        states = {status.name: state_of(status) for status in statuses_of(self._client)}
        current = self._talk.model or (names[0] if len(names) == 1 or states else "")
        width = max(map(len, names), default=0)
        for each in names:
            line = f"{'*' if each == current else ' '} {each:{width}}  {states.get(each, '')}"
            self._console.print(line.rstrip(), markup=False)

    def _load(self, name: str) -> bool:
        """Wait for a model, and return whether it can chat. Without it, the conversation keeps its model."""
        try:
            self._described(name)
        except KeyboardInterrupt:
            self._aside.print(f"{name} is not waited for, and still loads", markup=False)
            return False
        except SpecdError as error:
            self._aside.print(self._words(error), style="red", markup=False)
            return False
        return True

    def _change_system(self, text: str) -> None:
        if text == "/system":
            self._console.print(self._talk.system or "no system message", markup=False)
            return
        self._talk.set_system("" if text == "-" else text)
        self._console.print("the conversation has another system message now" if text != "-" else "no system message")

    def _undo(self, _: str) -> None:
        said = self._talk.undo()
        if said is None:
            self._console.print("no answer yet")
            return
        del self._turns[-1]
        self._begun = said
        self._console.print("forgot the last answer, and its message:")
        self._console.print(said, markup=False)

    def _save(self, name: str) -> None:
        if name == "/save":
            self._console.print("/save needs the name of a file")
            return
        path = Path(name).expanduser()
        try:
            self._talk.save(path)
        except FileExistsError:
            self._console.print(f"{path} is there already: name a new file", markup=False)
        except OSError as error:
            self._console.print(f"cannot write {path}: {error.strerror}", markup=False)
        else:
            self._console.print(f"saved {len(self._talk.messages)} messages to {path}", markup=False)

    def _reset(self, _: str) -> None:
        self._talk.clear()
        self._turns.clear()
        self._console.print("a new conversation")

    def _show_help(self, _: str) -> None:
        table = Table(box=None, pad_edge=False, show_header=False)
        for command, meaning in _COMMANDS.items():
            table.add_row(escape(command), meaning)
        self._console.print(table)
        self._console.print(_KEYS)

    def _refuse(self, name: str) -> None:
        self._console.print(f"there is no command {name}. {_HELP}", markup=False)
