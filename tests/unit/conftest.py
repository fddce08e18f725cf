"""Tests of this floor have no MLX, and start no process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib.font_manager  # noqa: F401 - lists the fonts with a process, the first time on a machine
import pytest

_FLOOR = Path(__file__).parent
_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"}
_is_watched = False


class _NoMLX(MetaPathFinder, Loader):
    """Finds MLX, as transformers asks whether it is installed, and does not load it."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        is_refused = _is_watched and name.partition(".")[0] in {"mlx", "mlx_lm"}
        return ModuleSpec(name, self) if is_refused else None

    def create_module(self, spec: ModuleSpec) -> None:
        raise ImportError(f"tests/unit has no MLX: what imports {spec.name} belongs in tests/worker")

    def exec_module(self, module: ModuleType) -> None:
        """Never comes to this."""


def _refuse_processes(event: str, _: tuple[Any, ...]) -> None:
    if _is_watched and event in _STARTS:
        raise RuntimeError(f"tests/unit starts no process: what calls {event} belongs in tests/e2e")


sys.meta_path.insert(0, _NoMLX())
sys.addaudithook(_refuse_processes)


@contextlib.contextmanager
def _watched(path: Path) -> Iterator[None]:
    global _is_watched  # noqa: PLW0603
    _is_watched = path.is_relative_to(_FLOOR)
    try:
        yield
    finally:
        _is_watched = False


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Watch what test modules import."""
    with _watched(collector.path):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Watch what tests and fixtures import and start."""
    with _watched(item.path):
        return (yield)
