"""What the draft worker holds of a session while its stream lasts."""

from __future__ import annotations

from dataclasses import dataclass, field

from draft_worker.path import Path
from specd.worker.session import WorkerSession


@dataclass
class DraftSession(WorkerSession):
    """The session's KV cache, how its tokens are chosen, and the path that the draft is on."""

    path: Path = field(default_factory=Path)
