"""The outcome of the requests of one phase, by the clients and by the counters."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.chaos.requests import Answer
from specd.child import Child
from tests.e2e.faults import scrape

_COUNTED = ("generated_tokens", "rounds", "proposed_tokens", "accepted_tokens", "target_replays")


async def counted(coordinator: Child) -> Counter[str]:
    """Return the counters that sessions' statistics have too."""
    values = await scrape(coordinator)
    return Counter({name: int(values[f"specd_{name}_total"]) for name in _COUNTED})


@dataclass
class Tally:
    """Right and wrong texts, the faults during them, and the sums of the sessions' statistics."""

    right: int = 0
    wrong: int = 0
    replayed: int = 0
    resumed: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    sums: Counter[str] = field(default_factory=Counter)
    gaps: list[float] = field(default_factory=list)
    moved: asyncio.Event = field(default_factory=asyncio.Event)  # set by each message

    def add(self, answer: Answer, expected: list[int]) -> None:
        """Count an answer."""
        self.right += answer.token_ids == expected
        self.wrong += answer.token_ids != expected
        self.replayed += any(each.target_replays for each in answer.statistics)
        self.resumed += answer.num_resumptions > 0
        self.gaps.append(answer.longest_gap)
        for each in answer.statistics:
            self.sums.update({name: getattr(each, name) for name in _COUNTED})

    def record(self) -> dict[str, Any]:
        """Return it for a report."""
        return {
            "faults": dict(self.faults),
            "right": self.right,
            "wrong": self.wrong,
            "replayed": self.replayed,
            "resumed": self.resumed,
            "failed": dict(self.failed),
            "longest_gap_seconds": max(self.gaps, default=0.0),
            "p99_of_longest_gaps_seconds": float(np.percentile(self.gaps, 99)) if self.gaps else 0.0,
        }
