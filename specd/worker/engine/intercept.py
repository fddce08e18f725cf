"""The interception of calls of a network's modules. Their class becomes a subclass: a network may check the class."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

from mlx.nn.layers.base import Module


def intercepted(plain: Any, intercept: Callable[..., Any]) -> Any:
    """Return a subclass of `plain`, with its name, in which `intercept(module, function, args, options)` answers."""

    class Intercepted(plain):  # type: ignore[misc]
        @wraps(plain.__call__)  # keeps the signature, which networks may inspect
        def __call__(self, *args: Any, **options: Any) -> Any:
            return intercept(self, plain.__call__, args, options)

    for name in ("__name__", "__qualname__", "__module__"):
        setattr(Intercepted, name, getattr(plain, name))
    return Intercepted


@contextmanager
def calling(modules: Sequence[Module], intercept: Callable[..., Any]) -> Iterator[None]:
    """Make `intercept(module, function, args, options)` answer calls of modules within the context."""
    kinds = [(module, type(module)) for module in modules]
    for module, kind in kinds:
        module.__class__ = intercepted(kind, intercept)
    try:
        yield
    finally:
        for module, kind in kinds:
            module.__class__ = kind
