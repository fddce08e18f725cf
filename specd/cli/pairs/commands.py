"""The command `specd pair`."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from specd.cli.models.places import all_places, hub_cache, place_named, printable
from specd.cli.pairs.candidates import Candidates
from specd.cli.pairs.choice import DraftChoice, RankedDraft
from specd.cli.pairs.chooser import DraftChooser
from specd.cli.pairs.memory import PairMemory, in_gigabytes, memory_of
from specd.cli.pairs.siblings import siblings_of
from specd.launch import check_servers_are_installed, start_logging
from specd.pair_worth import TargetTrial
from specd.startup_error import StartupError

_CELLS = 1000  # wider than any table: without a terminal, no line is cut


def pair(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="A name in 'specd models list', or a model's directory.")
    ],
    directories: Annotated[
        list[Path] | None,
        typer.Option("--dir", metavar="DIR", help="Also look for models in this directory; can be repeated."),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure again, also what is remembered.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show which models here can draft for a target, and how fast each pair is.

    At first it measures each pair for some seconds, with the target's own texts. 'specd up' uses the results.
    """
    check_servers_are_installed()
    os.environ.setdefault("SPECD_LOG_LEVEL", "warning")
    start_logging("pair")
    places = all_places(hub_cache(), directories or ())
    place = place_named(target, places)
    if place.directory is None:
        raise StartupError(f"{printable(place.name)} cannot be used: {place.problem}")
    name, memory = printable(place.name), memory_of(printable(place.name), place.directory)
    pair_memory = PairMemory.on_this_machine(memory)
    if pair_memory.problem:
        raise StartupError(f"the target does not fit: {pair_memory.problem}")
    chooser = DraftChooser(str(place.directory), directories or ())
    candidates = chooser.find()
    error = Console(stderr=True, highlight=False)
    with error.status(f"measuring {name}") if error.is_terminal else contextlib.nullcontext() as status:

        def tell(model: str) -> None:
            if status is not None:
                status.update(f"measuring {name}: {model}")

        choice = chooser.choose(candidates.fitting, tell, always=bool(candidates.fitting), again=again)
    found = _Report(name, choice, candidates, chooser.target_trial, memory.weights)
    siblings = siblings_of(name, (printable(each.name) for each in places))
    if as_json:
        typer.echo(json.dumps({**found.as_json(), "to_download": siblings}, indent=2))
        return
    found.show(Console(highlight=False, width=None if sys.stdout.isatty() else _CELLS), siblings)


class _Report:
    """The candidates of a target, for people and for programs."""

    def __init__(
        self, target: str, choice: DraftChoice, candidates: Candidates, trial: TargetTrial | None, weights: int
    ) -> None:
        self._target, self._choice, self._candidates = target, choice, candidates
        self._trial, self._weights = trial, weights

    def as_json(self) -> dict[str, Any]:
        """Return all as values of JSON; bytes are those of the weights."""
        chosen = self._choice.chosen
        return {
            "target": self._target,
            "device": self._trial.device if self._trial else None,
            "weight_bytes": self._weights,
            "tokens_per_second": self._trial.tokens_per_second if self._trial else None,
            "draft": chosen.candidate.name if chosen else None,
            "setting": self._choice.setting,
            "candidates": [self._as_json(each) for each in self._choice.ranked],
            "unfit": [{"name": each.name, "reason": each.reason} for each in self._candidates.unfit],
        }

    def _as_json(self, draft: RankedDraft) -> dict[str, Any]:
        worth = draft.worth
        return {
            "name": draft.candidate.name,
            "directory": draft.candidate.directory or None,
            "chosen": draft is self._choice.chosen,
            "acceptance": worth and worth.acceptance,
            "num_draft_tokens": worth and worth.k,
            "tokens_per_second": worth and worth.tokens_per_second,
            "speedup": worth and worth.speedup,
            "weight_bytes": draft.candidate.weights,
            "failure": draft.failure or None,
        }

    def show(self, console: Console, siblings: list[str]) -> None:
        """Print a table, and the reasons behind it."""
        columns = ("acceptance", "k", "tokens/s", "of the target alone", "memory", "")
        table = Table(Column("draft", no_wrap=True, overflow="fold"), *columns, box=None, pad_edge=False)
        for each in self._choice.ranked:
            table.add_row(*map(Text, self._cells(each)))
        alone = f"{self._trial.tokens_per_second:.1f} or more" if self._trial else "-"
        mark = "" if self._choice.chosen else "chosen"
        table.add_row("look-up alone", "by the text", "", alone, "1.00 or more", "none", mark)
        console.print(table)
        lines = [f"{each.candidate.name} has no result: {each.failure}" for each in self._choice.ranked if each.failure]
        lines += [f"{each.name} does not fit: {each.reason}" for each in self._candidates.unfit]
        lines += [f"to download: specd models pull {each}" for each in siblings]
        where = f" on {self._trial.device}" if self._trial else ""
        lines.append(f"{self._target} alone: {in_gigabytes(self._weights)} of weights{where}")
        for line in lines:
            console.print(Text(line), soft_wrap=True)

    def _cells(self, draft: RankedDraft) -> tuple[str, ...]:
        worth, mark = draft.worth, "chosen" if draft is self._choice.chosen else ""
        memory = "in the target" if draft.candidate.is_own_head else in_gigabytes(draft.candidate.weights)
        if worth is None:
            return (draft.candidate.name, "-", "-", "-", "-", memory, mark)
        numbers = (f"{worth.acceptance:.0%}", str(worth.k), f"{worth.tokens_per_second:.1f}", f"{worth.speedup:.2f}")
        return (draft.candidate.name, *numbers, memory, mark)
