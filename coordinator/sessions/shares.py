"""How many sessions of several clients may run at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import takewhile


def affordable_sessions(wanted: Collection[int], places: int, seconds_per_token: Callable[[int], float]) -> int:
    """Return how many sessions of several clients may run together, of at most `places`.

    `wanted` is how many each client would run; one that would run none is no party. `seconds_per_token` is what a token
    takes, of each of so many sessions that run together.

    Nobody is to be slower than with an equal part of the machine, the sharing incentive of Ghodsi et al. (NSDI 2011):
    of n clients, the one with the fewest sessions has its tokens in at most n times what they take alone. On a GPU a
    batch takes little longer than one session, and this limits nobody. On a CPU it does.
    """
    wanted = [number for number in wanted if number]
    if not wanted:
        return places
    fewest = min(*wanted, max(places // len(wanted), 1))
    longest = len(wanted) * seconds_per_token(fewest)
    fair = min(fewest * len(wanted), places)
    more = takewhile(lambda number: seconds_per_token(number) <= longest, range(fair + 1, places + 1))
    return fair + len([*more])
