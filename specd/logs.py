"""Logging: structlog events, for people on a terminal and as JSON elsewhere."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from typing import TextIO, cast

import structlog

from specd.settings import LogSettings

# Without local variables: those hold people's prompts.
_PRETTY_TRACEBACKS = structlog.dev.RichTracebackFormatter(show_locals=False)
_TRACEBACKS = structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False))


class _StandardError(io.TextIOBase):
    """Standard error, which can have lost its reader: a line that nobody gets must not break a session or a stop."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()
        return len(text)


def configure_logging(settings: LogSettings, *, process: str) -> None:
    """Set structlog up for the whole process; libraries that use `logging` go the same way."""
    pretty = settings.log_format == "pretty" or (settings.log_format == "auto" and sys.stderr.isatty())
    stderr = cast(TextIO, _StandardError())
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]

    def name_process(logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return {"process": process, **event}  # not a context variable: those do not reach other threads

    shared: list[structlog.typing.Processor] = [
        name_process,
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S.%f" if pretty else "iso", utc=not pretty),
    ]
    renderer: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=_PRETTY_TRACEBACKS)]
        if pretty
        else [_TRACEBACKS, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[*shared, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    logging.basicConfig(handlers=[handler], level=max(level, logging.WARNING), force=True)
