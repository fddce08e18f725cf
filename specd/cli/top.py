"""The command `specd top`."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import PurePath
from typing import Annotated

import typer
from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from specd.addresses import check_address, check_host_and_port
from specd.cli.completion import SOURCE_STYLES
from specd.cli.connection import TlsCa, TlsCert, TlsKey
from specd.cli.scrape import MetricsReader, Scrape, Span
from specd.coordinator_settings import CoordinatorSettings
from specd.launch import complain
from specd.startup_error import StartupError

_DEFAULT_ADDRESS = CoordinatorSettings.model_fields["metrics_listen"].default
_WIDTH = 80  # of a frame with all columns; without bars, and then without those since the start, it is narrower
_NOW_SECONDS = 10.0  # the period of the column "now": several rounds of a slow model
_KEPT_SECONDS = 60.0
_BAR_WIDTH = 14
_STAGES = ("draft", "verify", "queue", "wire", "coordinator")
_NONE = "-"
_SOURCES_SHOWN = 2  # those that have proposed most, so that a frame fits into 24 lines


def _metrics_address(address: str) -> str:
    try:
        return check_host_and_port(address, least_port=1) if address else ""
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _coordinator() -> str:
    address = os.environ.get("SPECD_ADDRESS", "")
    try:
        return check_address(address, least_port=1) if address else ""
    except ValueError as error:
        raise StartupError(f"SPECD_ADDRESS: {error}") from error


def top(
    address: Annotated[
        str,
        typer.Argument(
            metavar="[HOST:PORT]",
            callback=_metrics_address,
            help="Address of the coordinator's metrics. (default: port 9464 on the host in SPECD_ADDRESS)",
            show_default=False,
        ),
    ] = "",
    interval: Annotated[float, typer.Option(min=0.1, max=60.0, help="Seconds between two frames.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame, of one interval, and exit.")] = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Watch a coordinator: sessions, tokens/s, acceptance, where a round's time goes. q or Ctrl-C ends it."""
    address = address or metrics_address(_coordinator())
    reader = MetricsReader(address, tls_ca, tls_cert, tls_key)
    console = Console(highlight=False)
    view = View(address)
    try:
        view.add(reader.read())
        if once:
            time.sleep(interval)
            view.add(reader.read())
            console.print(view.frame(console.width))
            return
    except ConnectionError as error:
        complain(f"{error}; check that a coordinator runs and serves metrics there")
        raise typer.Exit(1) from error
    if not console.is_terminal:
        complain("specd top needs a terminal for its frames: add --once to print one")
        raise typer.Exit(2)
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(view.frame(console.width), console=console, screen=True, auto_refresh=False) as live,
        _keys() as next_key,
    ):
        while next_key(interval) not in {"q", "Q"}:
            try:
                view.add(reader.read())
            except ConnectionError as error:
                view.fault = str(error)
            live.update(view.frame(console.width), refresh=True)


def metrics_address(coordinator: str) -> str:
    """Return the default metrics address of a coordinator at an address; "" is the coordinator's default address."""
    if not coordinator or coordinator.startswith("unix:"):
        return str(_DEFAULT_ADDRESS)
    return f"{coordinator.rpartition(':')[0]}:{_DEFAULT_ADDRESS.rpartition(':')[2]}"


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits for a time, or until a key is pressed, which it returns."""
    keyboard = [sys.stdin] if sys.stdin.isatty() else []

    def next_key(seconds: float) -> str:
        pressed, _, _ = select.select(keyboard, [], [], seconds)
        # A terminal that is gone is always ready, and has no keys.
        return (os.read(sys.stdin.fileno(), 1).decode(errors="replace") or "q") if pressed else ""

    before = termios.tcgetattr(sys.stdin) if keyboard else None
    if before is not None:
        # Keys come one by one, and are not shown. Those that were pressed before are kept.
        tty.setcbreak(sys.stdin, termios.TCSADRAIN)
    try:
        yield next_key
    finally:
        if before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


class View:
    """The last minute of a coordinator, and a frame that shows it."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._scrapes: deque[Scrape] = deque()
        self.fault = ""  # why the last scrape failed

    def add(self, scrape: Scrape) -> None:
        """Add a scrape. The first one after a restart of the coordinator discards the earlier ones."""
        self.fault = ""
        started = "process_start_time_seconds"
        if self._scrapes and scrape.value(started) != self._scrapes[-1].value(started):
            self._scrapes.clear()
        self._scrapes.append(scrape)
        while scrape.at - self._scrapes[0].at > _KEPT_SECONDS:
            self._scrapes.popleft()

    def frame(self, width: int = _WIDTH) -> RenderableType:
        """Return the picture, `width` columns wide; at least one scrape must have been added."""
        last = self._scrapes[-1]
        now = Span(next(s for s in self._scrapes if last.at - s.at <= _NOW_SECONDS), last)
        rates = [Span(*pair).increase("specd_generated_tokens_total") / Span(*pair).seconds for pair in self._pairs()]
        fault = Text(self.fault, style="bold red", no_wrap=True, overflow="ellipsis")
        return Group(self._title(last), fault, _table(now, Span(Scrape(), last), rates, width))

    def _pairs(self) -> list[tuple[Scrape, Scrape]]:
        return list(pairwise(self._scrapes))[-_BAR_WIDTH:]

    def _title(self, last: Scrape) -> Text:
        if last.models:
            title = Text.assemble(
                ("specd top", "bold"), f"  {len(last.models)} models", no_wrap=True, overflow="ellipsis"
            )
            for name in last.models:
                if _state_of(last, name) == "ready" and not last.of_model(name).value("specd_target_available"):
                    title.append(f"  the target of {name} is away", style="bold red")
            return title.append(f"  {self._address}", style="dim")
        models = last.labels("specd_model_info")
        target, draft = (PurePath(models.get(role, "")).name for role in ("target", "draft"))
        name = f"  {target or 'no model yet'}"
        title = Text.assemble(("specd top", "bold"), name, no_wrap=True, overflow="ellipsis")
        title.append(f" with draft {draft}" if draft else " without a draft")
        if not last.value("specd_target_available"):
            title.append("  target is away", style="bold red")
        if draft and not last.value("specd_draft_available"):
            title.append("  draft is away", style="bold yellow")
        return title.append(f"  {self._address}", style="dim")


def _table(now: Span, ever: Span, rates: list[float], width: int) -> Table:
    has_bars, has_since = width >= _WIDTH, width >= _WIDTH - _BAR_WIDTH
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("")
    table.add_column("")
    table.add_column(f"last {now.seconds:.0f} s" if now.seconds else "now", justify="right", min_width=16)
    if has_bars:
        table.add_column("", width=_BAR_WIDTH)
    if has_since:
        table.add_column("since start", justify="right")
    last = now.end

    def row(group: str, name: str, value: str, bar: RenderableType = "", since: str = "") -> None:
        cells: list[RenderableType] = [Text(group, style="bold"), name, value]
        table.add_row(*cells, *([bar] if has_bars else []), *([Text(since, style="dim")] if has_since else []))

    def shares(group: str, name: str, part: float | None, since: float | None, colour: str) -> None:
        row(group, name, _percent(part), _bar(part, colour), _percent(since))

    for name in last.models:
        words = f"{last.of_model(name).value('specd_active_sessions'):.0f} running"
        state = _state_of(last, name)
        row("models" if name == next(iter(last.models)) else "", name, state if state != "ready" else words)

    for name, words, part in _sessions(last):
        row("sessions" if name == "running" else "", name, words, _bar(part, "white"))

    rate = now.increase("specd_generated_tokens_total") / now.seconds if now.seconds else None
    row("speed", "tokens/s", _number(rate, ".1f"), _sparkline(rates))
    speedup, always = (s.ratio("specd_target_only_seconds_total", "specd_round_seconds_total") for s in (now, ever))
    row("", "times the target alone", _number(speedup, ".2f"), "", _number(always, ".2f"))
    first, firsts = (s.mean("specd_time_to_first_token_seconds") for s in (now, ever))
    row("", "first token", _milliseconds(first), "", _milliseconds(firsts))

    accepted, proposed = "specd_accepted_tokens_by_source_total", "specd_proposed_tokens_by_source_total"
    by_use = sorted(SOURCE_STYLES, key=lambda source: -ever.increase(proposed, source=source.value))
    for source in by_use[:_SOURCES_SHOWN]:
        rate, always = (s.ratio(accepted, proposed, source=source.value) for s in (now, ever))
        shares("acceptance" if source is by_use[0] else "", source.label, rate, always, SOURCE_STYLES[source])

    k, ks = (s.mean("specd_round_draft_tokens") for s in (now, ever))
    row("k", "proposed a round", _number(k, ".2f"), "", _number(ks, ".2f"))
    length, lengths = (s.ratio("specd_generated_tokens_total", "specd_rounds_total") for s in (now, ever))
    row("", "gained a round", _number(length, ".2f"), "", _number(lengths, ".2f"))
    shares("", "rounds with a proposal", _drafting(now), _drafting(ever), "white")

    stages = [now.mean("specd_round_stage_seconds", stage=stage) for stage in _STAGES]
    whole = sum(filter(None, stages))
    for stage, seconds in zip(_STAGES, stages, strict=True):
        since = ever.mean("specd_round_stage_seconds", stage=stage)
        part = None if seconds is None or not whole else seconds / whole
        group = "a round" if stage == _STAGES[0] else ""
        row(group, stage, _milliseconds(seconds), _bar(part, "magenta"), _milliseconds(since))

    for group, worker in (("prefix cache", "target"), ("", "draft")):
        shares(group, f"prompt found by {worker}", _reused(now, worker), _reused(ever, worker), "blue")
    kept, kept_tokens = last.value("specd_kept_sessions"), last.value("specd_kept_session_tokens")
    row("", "sessions kept", f"{kept:.0f}", f"{kept_tokens:,.0f} tokens")
    return table


def _state_of(scrape: Scrape, model: str) -> str:
    """Return the state of a model; one that is not loaded on demand is always ready."""
    states = scrape.of_model(model).series("specd_model_state")
    return next((labels["state"] for labels, value in states if value), "ready")


def _sessions(scrape: Scrape) -> Iterator[tuple[str, str, float | None]]:
    """Yield the numbers of sessions: a name, the number in words, and its part of the limit if there is one."""

    def of(name: str, value: float, most: float, words: str) -> tuple[str, str, float | None]:
        return name, words, value / most if most else None

    def number(name: str, most_name: str, **labels: str) -> tuple[float, float, str]:
        value, most = scrape.value(name, **labels), scrape.value(most_name, **labels)
        return value, most, f"{value:.0f} of {most:.0f}"

    yield of("running", *number("specd_active_sessions", "specd_max_sessions"))
    targets = sorted(labels["target"] for labels, _ in scrape.series("specd_target_sessions"))
    for target in targets if len(targets) > 1 else ():
        value, most, words = number("specd_target_sessions", "specd_target_max_sessions", target=target)
        is_ready = scrape.value("specd_target_ready", target=target)
        yield of(f"at {target[-20:]}", value, most, words if is_ready else f"{words}, away")
    yield "sessions prefilling", f"{scrape.value('specd_sessions_by_state', state='prefilling'):.0f}", None
    yield "paused", f"{scrape.value('specd_paused_sessions'):.0f}", None
    yield of("queued requests", *number("specd_queued_requests", "specd_max_queued_requests"))
    reserved, capacity = scrape.value("specd_reserved_bytes"), scrape.value("specd_capacity_bytes")
    yield of("cache reserved", reserved, capacity, f"{reserved / 2**30:.2f} of {capacity / 2**30:.2f} GiB")


def _drafting(span: Span) -> float | None:
    """Return the part of rounds that had a proposal."""
    rounds = span.increase("specd_round_draft_tokens_count")
    return 1 - span.increase("specd_round_draft_tokens_bucket", le="0.0") / rounds if rounds else None


def _reused(span: Span, worker: str) -> float | None:
    """Return the part of prompt tokens that a worker had in its prefix cache."""
    prompts = span.increase("specd_prompt_tokens_total")
    return span.increase("specd_reused_prompt_tokens_total", worker=worker) / prompts if prompts else None


def _bar(part: float | None, colour: str) -> RenderableType:
    return "" if part is None else Bar(1.0, 0.0, min(part, 1.0), width=_BAR_WIDTH, color=colour)


def _sparkline(values: list[float]) -> str:
    most = max(values, default=0.0)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * value / most)] for value in values) if most else ""


def _percent(part: float | None) -> str:
    return _NONE if part is None else f"{part:.1%}"


def _milliseconds(seconds: float | None) -> str:
    return _NONE if seconds is None else f"{1000 * seconds:.1f} ms"


def _number(value: float | None, form: str) -> str:
    return _NONE if value is None else format(value, form)
