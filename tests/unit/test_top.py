"""What `specd top` makes of scrapes."""

from __future__ import annotations

from rich.console import Console

from specd.cli.scrape import Scrape
from specd.cli.top import View


def scrape(at: float, tokens: float, *, started: float = 1.0) -> Scrape:
    values = {"specd_generated_tokens_total": tokens, "process_start_time_seconds": started}
    return Scrape(at, {(name, frozenset()): value for name, value in values.items()})


def rate_in(view: View) -> str:
    """Return the tokens/s that a frame shows."""
    console = Console(width=80)
    with console.capture() as capture:
        console.print(view.frame())
    return capture.get().split("tokens/s")[1].split()[0]


def test_now_is_the_last_ten_seconds() -> None:
    view = View("127.0.0.1:9464")
    view.add(scrape(0.0, 0))
    assert rate_in(view) == "-"
    view.add(scrape(2.0, 100))
    assert rate_in(view) == "50.0"
    for second in range(3, 20):
        view.add(scrape(float(second), 100))
    assert rate_in(view) == "0.0"


def test_a_restarted_coordinator_begins_anew() -> None:
    view = View("127.0.0.1:9464")
    view.add(scrape(0.0, 1000))
    view.add(scrape(2.0, 10, started=2.0))
    assert rate_in(view) == "-"
    view.add(scrape(4.0, 30, started=2.0))
    assert rate_in(view) == "10.0"
