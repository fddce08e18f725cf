"""Options of commands that connect to a running process, and their messages for connection errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from specd.addresses import check_address
from specd.client.protocol.errors import CallError
from specd.errors import SpecdError
from specd.launch import complain
from specd.rpc.credentials import ClientCredentials
from specd.rpc.diagnosis import why_unreachable


def peer_address(address: str) -> str:
    """Return the address of a process to call. Raises BadParameter for any other text."""
    try:
        return check_address(address, least_port=1)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _file(flag: str, help_text: str) -> Any:
    variable = f"SPECD_{flag.removeprefix('--').replace('-', '_').upper()}"
    return typer.Option(flag, envvar=variable, exists=True, dir_okay=False, show_default=False, help=help_text)


Address = Annotated[
    str,
    typer.Option(
        envvar="SPECD_ADDRESS",
        metavar="ADDRESS",
        callback=peer_address,
        help="Address of the coordinator: HOST:PORT or unix:PATH.",
    ),
]
TlsCa = Annotated[Path | None, _file("--tls-ca", "Authority of the server's certificate, PEM. Turns on TLS.")]
TlsCert = Annotated[Path | None, _file("--tls-cert", "Your own certificate, PEM.")]
TlsKey = Annotated[Path | None, _file("--tls-key", "The key of your certificate, PEM.")]
TlsName = Annotated[
    str, typer.Option(metavar="NAME", help="Name in the server's certificate. (default: the host of the address)")
]
Token = Annotated[
    str,
    typer.Option(envvar="SPECD_TOKEN", help="Your token; the variable keeps it out of the list of processes."),
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Send the token in plaintext to other machines too.")]


@contextlib.contextmanager
def reported_errors(address: str, credentials: ClientCredentials) -> Iterator[None]:
    """Report the error of a call to a coordinator in one line, and exit with 1."""
    try:
        yield
    except SpecdError as error:
        complain(words_for(error, address, credentials))
        raise typer.Exit(1) from error


def words_for(error: SpecdError, address: str, credentials: ClientCredentials) -> str:
    """Return the message that a command prints for the error of a call."""
    if error.reason == "UNAVAILABLE":  # gRPC's own word, and not specd's
        why = why_unreachable(address, credentials)
        return why or f"no coordinator answers at {address}: start one with 'specd up'"
    status = error.status if isinstance(error, CallError) else error.code
    return f"{status.name}: {error}"
