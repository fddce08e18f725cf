"""The first passes of a process, before anybody waits for one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import mlx.core as mx
import structlog
from mlx_lm.models.cache import make_prompt_cache

from specd.worker.batch import BareCache
from specd.worker.calibration import measure
from specd.worker.engine import Steps
from specd.worker.model import LoadedModel
from specd.worker.sampler import NonFiniteLogitsError

log = structlog.get_logger()

# A GPU plans each width anew, and has kernels for tiles of these sizes: CUDA compiles those for quantised weights from
# source when they are first asked for, each for half a minute and more.
_TILES_ON_GPU = (16, 32, 64, 128, 256)


def warm_up(model: LoadedModel, widths: Sequence[int], rehearse: Callable[[LoadedModel], Steps[None]]) -> Steps[None]:
    """Compute what the process will compute, once: jobs of the worker's own, and on a GPU passes of these widths."""
    started_at = time.perf_counter()
    passes: Sequence[int] = ()
    if mx.default_device().type != mx.cpu:
        passes = (*widths, *_TILES_ON_GPU)
        log.info("warming up: if kernels are to be compiled this takes minutes, once on a machine")
    cache = BareCache(model.network, make_prompt_cache(model.network), model.batches)
    for width in passes:
        if width <= model.info.context_length:
            yield from measure([cache], width)
    # A model that gives NaN says so to who asks it.
    with contextlib.suppress(NonFiniteLogitsError):
        yield from rehearse(model)
    mx.clear_cache()
    log.info("warmed up", seconds=round(time.perf_counter() - started_at, 2))
