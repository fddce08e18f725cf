"""The command `specd generate`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from google.protobuf.json_format import MessageToJson
from rich.console import Console

from specd.cli.completion import print_retrying, print_tokens, summary
from specd.cli.connection import Address, Insecure, TlsCa, TlsCert, TlsKey, TlsName, Token, reported_errors
from specd.cli.loading import LoadingLine
from specd.cli.options import RequestOptions, with_request_options
from specd.client.client import Client
from specd.client.events import Delta, Loading, Retrying
from specd.client.stream import Stream
from specd.errors import InvalidRequestError, StartupError
from specd.grammar import Grammar
from specd.rpc.credentials import ClientCredentials
from specd.settings import DEFAULT_ADDRESS


@with_request_options
def generate(
    prompt: Annotated[
        str, typer.Argument(help="Text to continue, or for T5 the source to answer; - reads standard input.")
    ],
    options: RequestOptions,
    answer_start: Annotated[
        str, typer.Option(metavar="TEXT", help="Beginning of the answer, for a model with an encoder.")
    ] = "",
    prediction: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="File with the expected text, such as code that is edited."),
    ] = None,
    schema: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="File with a JSON schema that the text must keep."),
    ] = None,
    regex: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Regular expression that must match the whole text.")
    ] = None,
    lark: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="File with a Lark grammar that the text must keep."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Treat the prompt as a chat message.")] = False,
    refuse_unloaded: Annotated[
        bool,
        typer.Option("--refuse-unloaded", help="Fail at once if the model is not loaded, which then begins to load."),
    ] = False,
    session: Annotated[str, typer.Option(metavar="ID", help="Continue this session.", show_default=False)] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON message per line.")] = False,
    address: Address = DEFAULT_ADDRESS,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = "",
    token: Token = "",
    insecure: Insecure = False,
) -> None:
    """Stream a completion from a running coordinator."""
    credentials = ClientCredentials(tls_ca, tls_cert, tls_key, token, tls_name, insecure)
    text = _read_prompt(prompt)
    request = options.checked()
    request |= {
        "prediction": _read(prediction, "prediction") if prediction is not None else None,
        "answer_start": answer_start or None,
        "grammar": _grammar(schema, regex, lark),
        "refuse_unloaded": refuse_unloaded,
    }
    with reported_errors(address, credentials), Client(address, credentials=credentials) as client:
        turns = client.session(session) if session else client
        stream = turns.chat(text, **request) if chat else turns.generate(text, **request)
        if as_json:
            for message in stream.messages():
                print(MessageToJson(message, indent=None, preserving_proto_field_name=True), flush=True)  # noqa: T201
        else:
            _show(stream, options.model, is_sampled=options.temperature > 0)


def _show(stream: Stream, model: str, *, is_sampled: bool) -> None:
    """Stream a completion to standard output, and a line of its statistics to standard error."""
    console = Console(highlight=False, soft_wrap=True)
    aside = Console(stderr=True, style="dim", highlight=False, soft_wrap=True)
    with LoadingLine(aside) as line:
        for event in stream:
            if isinstance(event, Loading):
                line.show(model, event)
                continue
            line.clear()
            if isinstance(event, Delta):
                print_tokens(console, event.tokens)
            elif isinstance(event, Retrying):
                print_retrying(aside, event)
    console.print()
    seed = [f"seed {stream.seed}"] if is_sampled else []
    aside.print(" · ".join([summary(stream.completion().statistics), *seed, f"session {stream.session_id}"]))


def _read_prompt(argument: str) -> str:
    data = sys.stdin.buffer.read() if argument == "-" else os.fsencode(argument)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise StartupError(f"the prompt is not UTF-8 text: {error}") from error


def _grammar(schema: Path | None, regex: str | None, lark: Path | None) -> Grammar | None:
    """Return the grammar of the text. Raises StartupError for one that no coordinator would take."""
    grammars = []
    if schema is not None:
        grammars.append(Grammar.json_schema(_read(schema, "schema")))
        try:
            json.loads(grammars[0].text)
        except (ValueError, RecursionError) as error:
            raise StartupError(f"the schema {schema} is not JSON: {error}") from error
    if regex is not None:
        grammars.append(Grammar.regex(regex))
    if lark is not None:
        grammars.append(Grammar.lark(_read(lark, "grammar")))
    if len(grammars) > 1:
        raise StartupError("a text has one form: leave out all but one of --schema, --regex and --lark")
    for grammar in grammars:
        try:
            grammar.check()
        except InvalidRequestError as error:
            raise StartupError(str(error)) from error
    return grammars[0] if grammars else None


def _read(path: Path, name: str) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"cannot read the {name} {path}: {error}") from error
