"""The commands `specd models list`, `show`, `pull` and `rm`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Column, Table
from rich.text import Text

from specd.cli.models.details import ModelDetails, details_of
from specd.cli.models.places import State, all_places, hub_cache, place_named, printable
from specd.cli.models.pull import pull as pull_repository
from specd.cli.models.remove import removal_of, remove
from specd.cli.models.summary import ModelSummary, summary_of
from specd.cli.models.template import Tools
from specd.launch import check_servers_are_installed, complain, new_app
from specd.startup_error import StartupError

app = new_app("models")

Directories = Annotated[
    list[Path] | None,
    typer.Option("--dir", metavar="DIR", help="Also look for models in this directory; can be repeated."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="A name in 'specd models list', or a model's directory.")]
_TOOLS = {Tools.READ: "chat, tools", Tools.TEXT: "chat, tools as text", Tools.NONE: "chat"}
_CELLS = 1000  # wider than any table: without a terminal, no line is cut


@app.callback(no_args_is_help=True)
def models() -> None:
    """List, show, download and remove models on this machine."""
    check_servers_are_installed()


@app.command("list")
def list_models(directories: Directories = None, as_json: Json = False) -> None:
    """List the models in the hub's cache, in directories, and those that come with specd. It downloads nothing."""
    summaries = [summary_of(place) for place in all_places(hub_cache(), directories or ())]
    if as_json:
        typer.echo(json.dumps([each.as_json() for each in summaries], indent=2))
        return
    console = _console()
    columns = ("size", "precision", "family", "context", "caches", "head", "chat", "licence", "served")
    # Other columns wrap first: names are arguments of the other commands.
    others = (Column(each, overflow="fold") for each in columns)
    table = Table(Column("name", no_wrap=True, overflow="fold"), *others, box=None, pad_edge=False)
    for each in summaries:
        table.add_row(*map(Text, _cells(each)))
    console.print(table)
    for each in summaries:
        if not each.served:
            console.print(Text(f"{each.name} is not served: {each.reason}"), soft_wrap=True)


@app.command()
def show(name: Name, directories: Directories = None, as_json: Json = False) -> None:
    """Show everything about a model: files, tokenizer, fingerprint, memory, and the models that fit as its draft."""
    places = all_places(hub_cache(), directories or ())
    place = place_named(name, places)
    details = details_of(summary_of(place), map(summary_of, places))
    if as_json:
        typer.echo(json.dumps(details.as_json(), indent=2))
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for label, value in _lines(details):
        table.add_row(label, Text(value))
    _console().print(table)


@app.command()
def pull(
    name: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Hugging Face repository.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit. (default: main)")] = None,
) -> None:
    """Download a repository's safetensors, config, tokenizer, templates and card into the hub's cache, and check them.

    Run it again after an interruption: files that are complete stay.
    """
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(20), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(printable(name), total=None)
        try:
            directory = pull_repository(
                name, revision, lambda done, total: bar.update(task, completed=done, total=total)
            )
        except StartupError as error:
            bar.stop()
            complain(str(error))
            raise typer.Exit(1) from error
    summary = next((each for each in _summaries_at(directory)), None)
    typer.echo(f"{name} is in {directory}")
    if summary is not None and not summary.served:
        typer.echo(f"specd cannot serve it: {summary.reason}")


@app.command()
def rm(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A repository in 'specd models list'.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove a repository from the hub's cache, with all of its revisions."""
    place = place_named(name, all_places(hub_cache(), ()))
    removal = removal_of(place)
    shown, size = printable(place.name), f"{removal.expected_freed_size:,} bytes"
    if not yes and not typer.confirm(f"Remove {shown} ({size}) from {place.root.parent}?"):
        typer.echo("nothing is removed")
        raise typer.Exit(1)
    remove(place, removal)
    typer.echo(f"removed {shown}: {size} are free")


def _summaries_at(directory: Path) -> list[ModelSummary]:
    places = [each for each in all_places(hub_cache(), ()) if each.directory is not None]
    return [summary_of(each) for each in places if each.directory == directory.resolve()]


def _console() -> Console:
    """Return a console for tables: as wide as the terminal, and elsewhere as wide as its lines."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _CELLS)


def _cells(summary: ModelSummary) -> tuple[str, ...]:
    state = "" if summary.state is State.COMPLETE else summary.state.value
    served = ("as a head" if summary.is_head else "yes") if summary.served else state or "no"
    return (
        summary.name,
        _bytes(summary.place.size_bytes),
        summary.precision or "-",
        summary.family or "-",
        f"{summary.context_length:,}" if summary.context_length else "-",
        ", ".join(summary.caches or ()) or "-",
        ", ".join(summary.heads) or "-",
        _TOOLS[summary.tools] if summary.chat else "-",
        summary.licence or "-",
        served,
    )


def _lines(details: ModelDetails) -> list[tuple[str, str]]:
    """Return labels and texts for people, without the facts that are not known."""
    summary = details.summary
    size, precision, family, context, caches, heads, chat, licence, _ = _cells(summary)[1:]
    served = "yes" if summary.served else f"no: {summary.reason}"
    weights = (
        details.weight_bytes
        and f"{_bytes(details.weight_bytes)} on a GPU, {_bytes(details.weight_bytes_cpu or 0)} on a CPU"
    )
    per_token, on_cpu = details.cache_bytes_per_token, details.cache_bytes_per_token_cpu
    caches_take = per_token and f"{_bytes(1000 * per_token)} on a GPU, {_bytes(1000 * (on_cpu or 0))} on a CPU"
    lines = [
        ("name", summary.name),
        ("directory", printable(summary.place.directory or summary.place.root)),
        ("revision", printable(summary.place.revision)),
        ("files there", summary.state.value),
        ("served", f"{served}, as a head" if summary.is_head and summary.served else served),
        ("size", size),
        ("precision", precision),
        ("family", family),
        ("context", context),
        ("caches", caches),
        ("head", heads),
        ("chat", chat),
        ("licence", licence),
        ("tokenizer", details.tokenizer or ""),
        ("fingerprint", details.fingerprint or ""),
        ("weights in memory", weights or ""),
        ("caches, 1,000 tokens", caches_take or ""),
        ("drafts that fit", ", ".join(details.drafts)),
        *((f"file {name}", _bytes(size)) for name, size in details.files.items()),
    ]
    return [(label, value) for label, value in lines if value not in {"", "-"}]


def _bytes(number: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= factor:
            return f"{number / factor:,.1f} {unit}"
    return f"{number} B"
