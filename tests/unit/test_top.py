"""The frames of `specd top` from scrapes."""

from __future__ import annotations

import re

import pytest
from rich.console import Console

from specd.cli.scrape import Scrape
from specd.cli.top import View, metrics_address


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


@pytest.mark.parametrize(("width", "has_bars", "has_since"), [(80, True, True), (70, False, True), (60, False, False)])
def test_a_narrow_frame_has_fewer_columns_and_no_more_lines(width: int, has_bars: bool, has_since: bool) -> None:
    view = View("a-coordinator-with-a-long-name.example.org:9464")
    for second in range(3):
        view.add(scrape(float(second), 100.0 * second))
    view.fault = "the metrics cannot be read, " * 3
    console = Console(width=width)
    with console.capture() as capture:
        console.print(view.frame(console.width))
    lines = capture.get().splitlines()
    assert len(lines) == 24
    assert all(len(line) <= width for line in lines)
    assert ("▁" in capture.get() or "█" in capture.get()) == has_bars
    assert ("since start" in capture.get()) == has_since
    assert any("prompt found by draft" in line for line in lines)


@pytest.mark.parametrize(
    ("coordinator", "metrics"),
    [("", "127.0.0.1:9464"), ("unix:/run/specd", "127.0.0.1:9464"), ("gpu.example.org:50051", "gpu.example.org:9464")],
)
def test_metrics_are_on_the_host_of_the_coordinator(coordinator: str, metrics: str) -> None:
    assert metrics_address(coordinator) == metrics


def test_several_models_are_shown_and_summed() -> None:
    def of(model: str, **labels: str) -> frozenset[tuple[str, str]]:
        return frozenset({"model": model, **labels}.items())

    samples = {
        ("specd_generated_tokens_total", of("coder")): 20.0,
        ("specd_generated_tokens_total", of("small")): 10.0,
        ("specd_active_sessions", of("coder")): 2.0,
        ("specd_max_sessions", of("coder")): 8.0,
        ("specd_model_state", of("coder", state="ready")): 1.0,
        ("specd_model_state", of("small", state="ready")): 0.0,
        ("specd_model_state", of("small", state="loading")): 1.0,
        ("process_start_time_seconds", frozenset()): 1.0,
    }
    view = View("127.0.0.1:9464")
    view.add(Scrape.of(0.0, {}))
    view.add(Scrape.of(2.0, samples))
    console = Console(width=80)
    with console.capture() as capture:
        console.print(view.frame())
    shown = capture.get()
    assert "specd top  2 models  the target of coder is away  127.0.0.1:9464" in shown
    assert [" ".join(line.split()) for line in shown.splitlines()[3:5]] == [
        "models coder 2 running",
        "small loading",
    ]
    assert re.search(r"sessions +running +2 of 8 ", shown)
