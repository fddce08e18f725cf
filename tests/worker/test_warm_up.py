"""First computations of a process happen before it serves, within the context, and leave nothing behind."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm.models.cache import KVCache

import specd.worker.session.proposal
import target_worker.verification
from specd.user_cache import keep_compiled_kernels
from specd.worker import loading as module
from specd.worker.engine.forward import BareCache
from specd.worker.engine.jobs import Steps
from specd.worker.engine.shared_rows import Sharing
from specd.worker.engine.static_step import StaticStep
from specd.worker.loading import warm_up
from specd.worker.model.calibration import Workload, measure
from specd.worker.model.loader import LoadedModel
from tests.worker.driving import finish
from tests.worker.models import tiny_model
from tests.worker.whole_buffers import whole_buffers

REHEARSALS = [specd.worker.session.proposal.rehearse, target_worker.verification.rehearse]
Rehearsal = Callable[[LoadedModel], Steps[None]]


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tokens in the passes before the rehearsal."""
    widths: list[int] = []

    def counted(caches: Sequence[BareCache], workload: Workload, width: int) -> Steps[float]:
        widths.append(width)
        return (yield from measure(caches, workload, width))

    monkeypatch.setattr(module, "measure", counted)
    return widths


@pytest.mark.parametrize("context_length", [2, 3, 40, 63, 512])
@pytest.mark.parametrize("rehearse", REHEARSALS)
def test_nothing_goes_beyond_the_context(rehearse: Rehearsal, context_length: int, fed: list[int]) -> None:
    model = tiny_model()
    longest = 0

    class Watched(type(model.network)):  # type: ignore[misc]
        def __call__(self, inputs: mx.array, cache: list[KVCache]) -> mx.array:
            nonlocal longest
            logits: mx.array = super().__call__(inputs, cache=cache)
            longest = max(longest, cache[0].offset)
            return logits

    model.network.__class__ = Watched
    small = replace(model, info=replace(model.info, context_length=context_length))
    finish(warm_up(small, (1, 8, 33), rehearse))
    assert 0 < longest <= context_length


@pytest.mark.parametrize("rehearse", REHEARSALS)
def test_it_leaves_nothing(rehearse: Rehearsal) -> None:
    model = tiny_model()
    finish(warm_up(model, (1, 8), rehearse))  # the first pass leaves some memory for ever
    before = what_is_there()
    finish(warm_up(model, (1, 8), rehearse))
    num_caches, memory = what_is_there()
    assert num_caches <= before[0]
    assert memory <= before[1]


def test_sessions_that_share_passes_have_seen_every_width(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, run = [], StaticStep.run

    def recorded(static: StaticStep, token_ids: mx.array, *args: Any) -> Any:
        seen.append(token_ids.shape)
        return run(static, token_ids, *args)

    monkeypatch.setattr(StaticStep, "run", recorded)
    monkeypatch.setattr(StaticStep, "rehearse", lambda *_: None)
    model = tiny_model()
    with whole_buffers(model.network):
        static = StaticStep(model.network, 10**6, 1)
        sharing = replace(model, static=static, sharing=Sharing(static, 10**9))
        finish(warm_up(sharing, (), None))
        assert {shape for shape in seen if shape[0] > 1} == {(s, w) for s in (2, 4, 8, 16) for w in (1, 2, 4, 8)}
        before = what_is_there()[1]
        finish(warm_up(sharing, (), None))
        assert what_is_there()[1] <= before


def what_is_there() -> tuple[int, int]:
    mx.synchronize()
    gc.collect()
    caches = [thing for thing in gc.get_objects() if type(thing) is KVCache and thing.keys is not None]
    return len(caches), mx.get_active_memory()


@pytest.mark.parametrize("rehearse", REHEARSALS)
def test_a_model_that_gives_nan_starts(rehearse: Rehearsal) -> None:
    model = tiny_model()
    model.network.update(tree_map(lambda weights: mx.full(weights.shape, mx.nan), model.network.parameters()))
    finish(warm_up(model, (1, 8), rehearse))


def test_a_gpu_has_seen_every_width_and_every_tile(fed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    finish(warm_up(tiny_model(), (1, 8, 33), REHEARSALS[0]))
    assert fed == [], "the rehearsal touches every weight"
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    finish(warm_up(tiny_model(), (1, 8, 33), REHEARSALS[0]))
    assert fed == [1, 8, 33, 16, 32, 64, 128, 256]


def test_compiled_kernels_outlive_the_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", "/chosen/by/the/user")
    keep_compiled_kernels("sm_90")
    assert os.environ["MLX_PTX_CACHE_DIR"] == "/chosen/by/the/user"
    monkeypatch.delenv("MLX_PTX_CACHE_DIR")
    keep_compiled_kernels("sm_90")
    directory = Path(os.environ["MLX_PTX_CACHE_DIR"])
    assert directory.parent == tmp_path / "specd"
    assert directory.name.endswith("sm_90")


def test_without_a_cache_mlx_keeps_them_where_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    monkeypatch.delenv("MLX_PTX_CACHE_DIR", raising=False)
    keep_compiled_kernels("sm_90")
    assert "MLX_PTX_CACHE_DIR" not in os.environ
