"""The command `specd chat`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from specd.cli.completion import LEGEND, print_retrying, print_tokens, summary
from specd.cli.connection import Address, Insecure, TlsCa, TlsCert, TlsKey, TlsName, Token, reported_errors, words_for
from specd.cli.options import RequestOptions, with_request_options
from specd.client.client import Client
from specd.client.events import Delta, Retrying
from specd.client.options import GenerationOptions
from specd.client.session import ClientSession
from specd.client.statistics import GenerationStatistics
from specd.client.stream import Stream
from specd.errors import InvalidRequestError, SpecdError
from specd.rpc.credentials import ClientCredentials
from specd.settings import DEFAULT_ADDRESS

_HELP = "/stats shows statistics, /reset starts a new conversation, /exit ends. Ctrl-C stops an answer."


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
        TerminalConversation(client, system, request, lambda error: words_for(error, address, credentials)).run()


class TerminalConversation:
    """A conversation at the terminal."""

    def __init__(
        self, client: Client, system: str, options: GenerationOptions, words: Callable[[SpecdError], str]
    ) -> None:
        self._client = client
        self._system = system
        self._options = options
        self._words = words
        self._session = client.session()
        self._turns: list[GenerationStatistics] = []
        self._console = Console(highlight=False, soft_wrap=True)
        self._aside = Console(stderr=True, style="dim", highlight=False, soft_wrap=True)
        self._commands: dict[str, Callable[[], None]] = {"/stats": self._show_statistics, "/reset": self._reset}

    def run(self) -> None:
        """Talk until /exit or the end of the input.

        Raises SpecdError if the first answer fails, and at once for a model without a chat template.
        """
        service = self._client.describe()
        if not service.chat_template:
            raise InvalidRequestError(
                "NO_CHAT_TEMPLATE",
                f"{service.target.public_name} cannot chat, because it has no chat template: complete a text with "
                f"specd generate 'TEXT'",
            )
        self._console.print(f"[bold]{service.target.name}[/]. {_HELP}")
        self._console.print(LEGEND)
        while (line := self._read()) is not None:
            if line.startswith("/"):
                self._commands.get(line, self._show_help)()
            elif line:
                self._answer(line)
        self._delete(self._session)

    def _read(self) -> str | None:
        """Return the user's line; None at the end of the input."""
        try:
            line = self._console.input("[bold]>[/] ").strip()
        except (EOFError, KeyboardInterrupt):
            self._console.print()
            return None
        return None if line == "/exit" else line

    def _answer(self, said: str) -> None:
        """Stream an answer. One that fails, or that Ctrl-C stops, does not become part of the conversation."""
        user = {"role": "user", "content": said}
        is_first = not self._session.messages
        messages = [{"role": "system", "content": self._system}, user] if self._system and is_first else [user]
        with self._session.chat(messages, **self._options) as stream, _cancelled_by_ctrl_c(stream):
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

    def _show(self, stream: Stream) -> None:
        for event in stream:
            if isinstance(event, Delta):
                print_tokens(self._console, event.tokens)
            elif isinstance(event, Retrying):
                print_retrying(self._aside, event)
        self._console.print()

    def _show_statistics(self) -> None:
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

    def _reset(self) -> None:
        self._delete(self._session)
        self._session = self._client.session()
        self._turns.clear()
        self._console.print("a new conversation")

    def _show_help(self) -> None:
        self._console.print(_HELP)

    @staticmethod
    def _delete(session: ClientSession) -> None:
        with session:  # leaving the context deletes the session
            pass
