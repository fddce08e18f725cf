"""A window: some rounds for which a choice of k holds."""

from __future__ import annotations

from dataclasses import dataclass, field

WINDOW_ROUNDS = 4  # of each session, for which a choice of k holds
LEAST_GAIN = 1.02  # by which another k, or looked-up tokens, must promise more than the present k


@dataclass
class Window:
    """Some rounds of all sessions, in which those that may draft propose up to k tokens.

    A session's round is expected to emit `tokens` in `seconds`, with `length` draft tokens. The sums are measured.
    """

    k: int
    length: float
    tokens: float
    seconds: float
    num_active: int
    num_begun: int  # sessions, in all, when it began
    num_ended: int
    ends_at: int  # number of rounds of all sessions
    is_trial: bool
    num_rounds: int = 0
    num_drafted: int = 0
    measured_seconds: float = 0.0
    expected_seconds: float = 0.0  # of the rounds that were measured, by their numbers of draft tokens
    # Computed when they are first asked for: costs change only between windows.
    seconds_by_rows: list[float] = field(default_factory=list)  # of matched tokens in a shared round
    seconds_per_token: dict[int, float] = field(default_factory=dict)

    @property
    def num_replaced(self) -> int:
        """The number of draft tokens that a session's matched tokens replace, beside sessions that draft."""
        return round(self.length) if self.num_active > 1 else 0
