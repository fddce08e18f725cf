"""The first jobs of a target worker, before anybody waits for one."""

from __future__ import annotations

from specd.sampling import Sampling
from specd.worker.chunk_size import ChunkSize
from specd.worker.engine import Steps
from specd.worker.model import LoadedModel
from specd.worker.sampler import Sampler
from specd.worker.session_cache import SessionCache
from target_worker.verification import verify


def rehearse(model: LoadedModel) -> Steps[None]:
    """Verify a proposal, greedily and with a temperature."""
    proposal = [0] * min(7, model.info.context_length - 1)
    prompt = [0] * min(64, model.info.context_length - len(proposal))
    for temperature in (0.0, 1.0):
        cache = SessionCache(model)
        sampler = Sampler(Sampling(temperature=temperature), model.info.vocabulary_size)
        yield from verify(cache, sampler, 0, prompt, proposal, chunk=ChunkSize(1.0))
        cache.free()
