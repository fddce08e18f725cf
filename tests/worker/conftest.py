"""The parts of a worker, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from specd.worker.cpu.openblas import load_blas

if TYPE_CHECKING:
    from specd.worker.engine.engine import Engine
    from tests.worker.fake_model import FakeModel

# Before any test imports MLX. One thread, because threads that share a product wait for each other, and for other
# processes on this machine.
load_blas(num_threads=1)


@pytest.fixture
def small_last_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make even short requests take several steps."""
    from specd.worker.session import session_cache

    monkeypatch.setattr(session_cache, "MAX_PENDING", 2)


@pytest.fixture(scope="module")
def small_sizes() -> Iterator[None]:
    """Make buffers grow, prefills take steps and entries be moved or copied with a few tokens."""
    from mlx_lm.models.cache import KVCache

    from specd.worker.session import prefix_cache, session_cache
    from tests.worker.prefixes import BLOCK, MAX_LOST

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCache, "step", BLOCK)
        patch.setattr(prefix_cache, "_MAX_LOST", MAX_LOST)
        patch.setattr(session_cache, "MAX_PENDING", 2)
        yield


@pytest.fixture
def fake_model() -> FakeModel:
    from tests.worker.fake_model import FakeModel

    return FakeModel()


@pytest.fixture
def engine(fake_model: FakeModel) -> Iterator[Engine]:
    """An engine that runs the fake model."""
    from specd.worker.engine.engine import Engine

    running = Engine(lambda: None, compute=fake_model.forward)
    yield running
    running.stop()
