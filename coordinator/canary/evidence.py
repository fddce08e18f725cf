"""The evidence about a draft: lengths, accepted tokens and seconds of its proposals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

from coordinator.planner.acceptance import PassRates, mean_seconds

_EXPECTED_ACCEPTANCE = 0.7  # before any proposal; a few tokens outweigh it


@dataclass
class Evidence:
    """Counts of proposals, and their seconds, as measured and as the draft worker calibrated them.

    A proposal that ended early counts in `accepted` as if its next token had been rejected: the tokens behind it
    are missing either way. `proposed` counts the lengths of proposals.
    """

    accepted: PassRates = field(default_factory=partial(PassRates, _EXPECTED_ACCEPTANCE, decay=0.0))
    proposed: PassRates = field(default_factory=partial(PassRates, 1.0, decay=0.0))
    seconds: float = 0.0
    expected_seconds: float = 0.0

    def add(self, limit: int, num_proposed: int, num_accepted: int) -> None:
        """Count a proposal that could have had `limit` tokens."""
        self.accepted.add(limit, num_accepted)
        self.proposed.add(limit, num_proposed)

    def __add__(self, other: Evidence) -> Evidence:
        return Evidence(
            self.accepted + other.accepted,
            self.proposed + other.proposed,
            self.seconds + other.seconds,
            self.expected_seconds + other.expected_seconds,
        )

    def __sub__(self, other: Evidence) -> Evidence:
        return Evidence(
            self.accepted - other.accepted,
            self.proposed - other.proposed,
            self.seconds - other.seconds,
            self.expected_seconds - other.expected_seconds,
        )

    def tokens_per_second(self, verify: Sequence[float], propose: Sequence[float]) -> float:
        """Return the speed at the best number of draft tokens.

        A verify of k draft tokens takes `verify[k]` seconds, and a proposal was calibrated to take `propose[k]`. The
        measured proposals show how much more it takes, with messages and queues. Without any proposal, the planner has
        found that none pays.
        """
        if not self.accepted.tried[0]:
            return 1 / verify[0]
        excess = self.seconds / self.expected_seconds if self.expected_seconds > 0 else 1.0
        costs = [v + excess * p for v, p in zip(verify, propose, strict=True)]
        most = len(costs) - 1
        tokens = accumulate(self.accepted.survival(most), initial=1.0)
        seconds = mean_seconds(costs, self.proposed.survival(most))
        return max(each / time for each, time in zip(tokens, seconds, strict=True))
