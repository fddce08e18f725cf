"""Reports of a call's errors to the caller, the log and the metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import structlog
from prometheus_client import Counter

from specd.errors import InternalError, SpecdError, to_status

log = structlog.get_logger()


@asynccontextmanager
async def reporting_errors(
    context: grpc.aio.ServicerContext[Any, Any],
    errors: Counter,
    before_status: Callable[[], Awaitable[None]] | None = None,
) -> AsyncIterator[None]:
    """End the call with the status of an error raised inside, and count it by code and reason.

    `before_status` waits until the status can be sent. Any error but a SpecdError is a bug: the log gets
    the traceback, the caller INTERNAL.
    """
    try:
        yield
    except SpecdError as error:
        errors.labels(error.code.name, error.reason).inc()
        session = {"session_id": error.session_id} if error.session_id else {}
        log.info("request ended with an error", reason=error.reason, error=error.for_log, **session)
        if before_status is not None:
            await before_status()
        await context.abort_with_status(to_status(error))
    except Exception:
        log.exception("request failed")
        unexpected = InternalError("INTERNAL", "the server failed on this request; its log has the cause")
        errors.labels(unexpected.code.name, unexpected.reason).inc()
        if before_status is not None:
            await before_status()
        await context.abort_with_status(to_status(unexpected))
