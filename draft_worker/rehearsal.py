"""The first jobs of a draft worker, before anybody waits for one."""

from __future__ import annotations

from draft_worker.proposal import propose
from draft_worker.session import DraftSession
from specd.sampling import Sampling
from specd.worker.chunk_size import ChunkSize
from specd.worker.engine import Steps
from specd.worker.model import LoadedModel
from specd.worker.sampler import Sampler
from specd.worker.session_cache import SessionCache


def rehearse(model: LoadedModel) -> Steps[None]:
    """Propose some tokens, greedily and with a temperature."""
    num_draft_tokens = min(4, model.info.context_length - 1)
    prompt = [0] * min(64, model.info.context_length - num_draft_tokens)
    for temperature in (0.0, 1.0):
        sampler = Sampler(Sampling(temperature=temperature), model.info.vocabulary_size)
        session = DraftSession(SessionCache(model), sampler)
        yield from propose(
            session, 0, prompt, num_draft_tokens, chunk=ChunkSize(1.0), min_confidences=[0.0] * num_draft_tokens
        )
        session.cache.free()
