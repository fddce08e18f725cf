"""How many sessions of several clients may run at a time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection


def affordable_sessions(wanted: Collection[int], places: int, seconds_per_token: Callable[[int], float]) -> int:
    """Return how many sessions of several clients may run together, of at most `places`.

    `wanted` is how many each client would run. Sessions that run together have a token in
    `seconds_per_token(number of sessions)` each.

    Nobody is to be slower than with an equal part of the machine, the sharing incentive of Ghodsi et al. (NSDI 2011):
    of n clients, the one with the fewest sessions has its tokens in at most n times what they take alone. On a GPU a
    batch takes little longer than one session, and this limits nobody. On a CPU it does.
    """
    fewest = min(*wanted, max(places // len(wanted), 1))
    fair = min(fewest * len(wanted), places)
    allowed = len(wanted) * seconds_per_token(fewest)
    more = range(fair + 1, places + 1)
    return fair + bisect_left(more, True, key=lambda number: seconds_per_token(number) > allowed)
