"""The events that the log leaves out."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from specd.logs import RateLimit, configure_logging
from specd.settings import LogSettings


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_first_of_each_kind_in_a_window_pass_and_the_others_are_counted() -> None:
    clock = Clock()
    limit = RateLimit(clock)
    assert [limit.left_out("a") for _ in range(25)] == [0] * 10 + [None] * 15
    assert limit.left_out("b") == 0
    clock.now = 9.9
    assert limit.left_out("a") is None
    clock.now = 10.0
    assert [limit.left_out("a") for _ in range(11)] == [16] + [0] * 9 + [None]
    clock.now = 20.0
    assert limit.left_out("a") == 1
    clock.now = 30.0
    assert limit.left_out("a") == 0


@pytest.fixture(autouse=True)
def logging_is_set_up() -> Iterator[None]:
    """Log as a process does, as long as the test runs."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    configure_logging(LogSettings(log_level="debug", log_format="json"), process="test")
    try:
        yield
    finally:
        structlog.reset_defaults()
        root.handlers[:] = handlers
        root.setLevel(level)


def events_of(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_errors_are_limited_and_other_events_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    logger = structlog.get_logger()
    for i in range(30):
        logger.debug("step", reason="none")
        logger.info("finished", i=i)
        logger.info("refused", reason="A")
        logger.info("refused", reason="B")
        logger.warning("lost")
        logging.getLogger("library").error("failed on %d", i)
    counts = Counter((event["event"].split(" on")[0], event.get("reason")) for event in events_of(capsys))
    unlimited = {("step", "none"): 30, ("finished", None): 30}
    assert counts == {**unlimited, ("failed", None): 10, ("refused", "A"): 10, ("refused", "B"): 10, ("lost", None): 10}


def test_long_values_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    structlog.get_logger().info("refused", error="x" * 10_000, number=3)
    logging.getLogger("library").error("y" * 10_000)
    first, second = events_of(capsys)
    assert len(first["error"]) < 600
    assert first["number"] == 3
    assert len(second["event"]) < 600
