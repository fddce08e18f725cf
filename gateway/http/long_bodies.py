"""Work that grows with the body of a request, on a thread if the body is long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_LONG_BYTES = 1 << 14
# Threads share the interpreter with the event loop, so fewer threads give it its turn sooner.
_threads = ThreadPoolExecutor(2, thread_name_prefix="long-body")
_is_long: ContextVar[bool] = ContextVar("is_long", default=False)


def note_length(num_bytes: int) -> None:
    """Record the length of the body of this task's request."""
    _is_long.set(num_bytes >= _LONG_BYTES)


async def beside_loop(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of a function, called on a thread if the body of this task's request is long."""
    if not _is_long.get():
        return function(*args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_threads, partial(function, *args, **kwargs))
