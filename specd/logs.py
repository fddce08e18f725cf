"""Logging: structlog events, for people on a terminal and as JSON elsewhere."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import time
from collections.abc import Callable, Hashable
from typing import TextIO, cast

import structlog

from specd.settings import LogSettings

# Without local variables, which hold prompts.
_PRETTY_TRACEBACKS = structlog.dev.RichTracebackFormatter(show_locals=False)
_TRACEBACKS = structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False))


class _StandardError(io.TextIOBase):
    """Standard error that ignores the loss of its reader, because logging must not break a session or a stop."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()
        return len(text)


# A client can cause an error with each message. Log at most _LINES errors of a kind in _SECONDS.
_LINES = 10
_SECONDS = 10.0
_MOST_CHARACTERS = 500  # per value, which can quote a request


class RateLimit:
    """Lets the first errors of each kind in a window of time pass, and counts the others."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._windows: dict[Hashable, tuple[float, int]] = {}

    def left_out(self, kind: Hashable) -> int | None:
        """Return how many errors of this kind were left out since the last line, or None to leave this one out too."""
        began_at, count = self._windows.get(kind, (-_SECONDS, 0))
        if self._now() - began_at >= _SECONDS:
            self._windows[kind] = self._now(), 1
            return max(count - _LINES, 0)
        self._windows[kind] = began_at, count + 1
        return None if count >= _LINES else 0

    def __call__(self, logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        """Limit structlog events that have a reason, or are warnings or worse."""
        if method == "debug" or (method == "info" and "reason" not in event):
            return event
        left_out = self.left_out((event["event"], event.get("reason")))
        if left_out is None:
            raise structlog.DropEvent
        return {**event, "left_out": left_out} if left_out else event

    def filter(self, record: logging.LogRecord) -> bool:
        """Limit records of `logging` by the line of code that logs them."""
        return self.left_out((record.pathname, record.lineno)) is not None


def _shorten(logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return {
        name: f"{value[:_MOST_CHARACTERS]} …" if isinstance(value, str) and len(value) > _MOST_CHARACTERS else value
        for name, value in event.items()
    }


def configure_logging(settings: LogSettings, *, process: str) -> None:
    """Configure structlog for the process, and `logging`, which libraries use, to go through it."""
    pretty = settings.log_format == "pretty" or (settings.log_format == "auto" and sys.stderr.isatty())
    stderr = cast(TextIO, _StandardError())
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]

    def name_process(logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return {"process": process, **event}  # context variables do not reach other threads

    rate_limit = RateLimit()
    shared: list[structlog.typing.Processor] = [
        name_process,
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S.%f" if pretty else "iso", utc=not pretty),
        _shorten,
    ]
    renderer: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=_PRETTY_TRACEBACKS)]
        if pretty
        else [_TRACEBACKS, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[rate_limit, *shared, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(stderr),  # one write a line: processes can share a file
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stderr)
    handler.addFilter(rate_limit.filter)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    logging.basicConfig(handlers=[handler], level=max(level, logging.WARNING), force=True)
