"""What a worker holds of a session while its stream lasts."""

from __future__ import annotations

from dataclasses import dataclass

from specd.worker.sampler import Sampler
from specd.worker.session_cache import SessionCache


@dataclass
class WorkerSession:
    """The session's KV cache, and how its tokens are chosen."""

    cache: SessionCache
    sampler: Sampler
