"""The commands `specd token new`, `list` and `revoke`."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer
from filelock import FileLock
from rich.console import Console
from rich.table import Table

from specd.identity.tokens import Token, new_token, read_tokens, write_tokens
from specd.launch import new_app
from specd.startup_error import StartupError

app = new_app("token")

Tokens = Annotated[
    Path,
    typer.Option(envvar="SPECD_COORDINATOR_TOKENS", dir_okay=False, help="The coordinator's file of tokens."),
]
_DEFAULT = Path("tokens.jsonl")


@app.callback(no_args_is_help=True)
def token() -> None:
    """Make, list and revoke clients' tokens; a running coordinator reads the changes."""


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Name of the client. Tokens with the same name belong to one client.")],
    sessions: Annotated[int | None, typer.Option(min=1, help="Most sessions at once.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Most tokens a minute, prompts included.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens that a request may generate.")] = None,
    expires: Annotated[
        str, typer.Option(metavar="WHEN", help="Days, such as 90d, or a time, such as 2027-01-31T12:00Z.")
    ] = "",
    tokens: Tokens = _DEFAULT,
) -> None:
    """Make a token, print it, and add its digest to the file. The token cannot be printed again."""
    text, made = new_token(
        name,
        sessions=sessions,
        tokens_per_minute=tokens_per_minute,
        max_tokens=max_tokens,
        expires=_moment(expires) if expires else None,
    )
    with _locked(tokens):
        before = read_tokens(tokens) if tokens.exists() else []
        write_tokens(tokens, [*before, made])
    typer.echo(text)
    typer.echo(f"token of {name}, id {made.id}; its digest is in {tokens}. It is shown this once.", err=True)
    if others := [each.id for each in before if each.name == name]:
        typer.echo(
            f"{name} has {'another token' if len(others) == 1 else f'{len(others)} other tokens'}, id "
            f"{', '.join(others)}. All belong to one client; 'specd token revoke ID' revokes one.",
            err=True,
        )


@app.command("list")
def show(tokens: Tokens = _DEFAULT) -> None:
    """List the tokens: names, limits, when they expire."""
    table = Table("name", "id", "sessions", "tokens/min", "max_tokens", "expires", box=None, pad_edge=False)
    now = datetime.now(UTC).timestamp()
    for each in read_tokens(tokens):
        limits = (each.sessions, each.tokens_per_minute, each.max_tokens)
        expires = f"{each.expires:%Y-%m-%d %H:%M} UTC" if each.expires else "-"
        table.add_row(
            each.name,
            each.id,
            *(str(limit) if limit else "-" for limit in limits),
            f"{expires} (expired)" if each.is_expired(now) else expires,
        )
    Console(highlight=False, soft_wrap=True).print(table)


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME_OR_ID", help="Client, or the id of one of its tokens.")],
    tokens: Tokens = _DEFAULT,
) -> None:
    """Remove a client's tokens from the file. Their next call is refused; running generations continue."""
    with _locked(tokens):
        before = read_tokens(tokens)
        kept = [each for each in before if not _is_meant(each, name)]
        if len(kept) == len(before):
            raise StartupError(f"{tokens} has no token of {name!r}: 'specd token list' shows its tokens")
        write_tokens(tokens, kept)
    typer.echo(f"revoked {len(before) - len(kept)} of {len(before)} tokens in {tokens}")


def _is_meant(each: Token, name: str) -> bool:
    return name in (each.name, each.id)


def _locked(tokens: Path) -> AbstractContextManager[object]:
    if not tokens.parent.is_dir():
        raise StartupError(f"cannot write the token file {tokens}: there is no directory {tokens.parent}")
    return FileLock(tokens.with_name(f".{tokens.name}.lock"))


def _moment(text: str) -> datetime:
    if match := re.fullmatch(r"(\d{1,5})d", text):
        return datetime.now(UTC).replace(microsecond=0) + timedelta(days=int(match[1]))
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise StartupError(f"--expires is {text!r}: write days, such as 90d, or 2027-01-31T12:00Z") from error
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
