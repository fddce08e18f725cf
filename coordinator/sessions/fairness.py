"""Fairness between clients: the turn to run, and the clients that yield."""

from __future__ import annotations

from collections.abc import Callable, Collection, ValuesView
from itertools import islice, takewhile

from coordinator.sessions.capacities import Capacities
from coordinator.sessions.place import ClientPlaces, Place


def affordable_sessions(wanted: Collection[int], places: int, seconds_per_token: Callable[[int], float]) -> int:
    """Return the number of sessions, at most `places`, that several clients may run together.

    `wanted` is the number of sessions that each client would run; clients with 0 do not count. `seconds_per_token`
    maps the number of sessions that run together to the time of a token in each of them.

    No client may be slower than with an equal share of the machine, the sharing incentive of Ghodsi et al. (NSDI
    2011): with n clients, the tokens of the client with the fewest sessions take at most n times their time alone. On a
    GPU a batch takes little longer than one session, and this limits no client. On a CPU, each session of a batch is
    slower, so fewer sessions run than there are places.
    """
    wanted = [number for number in wanted if number]
    if not wanted:
        return places
    fewest = min(*wanted, max(places // len(wanted), 1))
    longest = len(wanted) * seconds_per_token(fewest)
    fair = min(fewest * len(wanted), places)
    more = takewhile(lambda number: seconds_per_token(number) <= longest, range(fair + 1, places + 1))
    return fair + len([*more])


class Fairness:
    """Decides which client has the next turn; the Admission acts on it.

    The client with the smallest dominant share, of places or memory, goes next (dominant resource fairness, Ghodsi et
    al., NSDI 2011), and between equal shares the client that has waited longest since its last turn. No client
    overtakes the next one, so that small requests do not keep a large one waiting for ever.
    """

    def __init__(self, clients: ValuesView[ClientPlaces], capacities: Capacities) -> None:
        self._clients = clients
        self._capacities = capacities

    def next(self) -> Place | None:
        """Return the place with the next turn, out of its queue, if there is room for one more session."""
        runnable, num_running = self._runnable(), self._num_running
        if not runnable or num_running > self._capacities.max_sessions:
            return None
        if num_running < self._affordable(runnable):
            return self._taken(runnable[0])
        if all(client.num_running <= 1 for client in self._clients):
            return None
        client = next((client for client in runnable if not client.num_running), None)
        return self._taken(client) if client is not None else None

    def _taken(self, client: ClientPlaces) -> Place:
        if client.paused:
            return client.paused.popleft()
        if (moving := self._next_moving(client)) is not None:
            client.moving.remove(moving)
            return moving
        return client.queue.popleft()

    def _next_moving(self, client: ClientPlaces) -> Place | None:
        waiting = (place for place in client.moving if place.turn is not None and not place.turn.cancelled())
        return next((place for place in waiting if self._capacities.fits(place)), None)

    def yields(self, client: ClientPlaces) -> bool:
        """Return whether a client runs more than its share, so that one of its sessions yields after a round."""
        runnable, others = self._runnable(), [other for other in self._clients if other is not client]
        if self._num_running > self._affordable(runnable):
            return client.num_running >= max(other.num_running for other in others)
        rest = (client.num_running - 1) / self._capacities.max_sessions
        return any(self._share(other) < rest for other in runnable if other is not client)

    @property
    def _num_running(self) -> int:
        return sum(client.num_running for client in self._clients)

    def _runnable(self) -> list[ClientPlaces]:
        """Return the clients that wait only for a place, and not for memory, in the order of their turns."""
        waiting = [client for client in self._clients if client.paused or client.moving or client.queue]
        runnable, is_blocked = [], False
        for client in sorted(waiting, key=lambda each: (self._share(each), each.turn)):
            client.drop_cancelled()
            if client.paused or self._next_moving(client) is not None:
                runnable.append(client)  # a session that continues has its memory, for which others may wait
            elif client.queue and not is_blocked and self._capacities.fits(client.queue[0]):
                runnable.append(client)
            elif client.queue:
                is_blocked = True
        return runnable

    def _affordable(self, runnable: list[ClientPlaces]) -> int:
        """Return the number of sessions that may run while these clients wait for a place."""
        can_run = set(runnable)
        clients = [client for client in self._clients if client.num_running or client in can_run]
        places = self._capacities.max_sessions
        if len(clients) < 2:
            return places
        wanted = [
            client.num_running
            + len(client.paused)
            + len(client.moving)
            + self._capacities.num_that_fit(islice(client.queue, places))
            for client in clients
        ]
        return affordable_sessions(wanted, places, self._capacities.seconds_per_token())

    def _share(self, client: ClientPlaces) -> float:
        """Return a client's dominant share, of places or memory. A session that continues needs no memory."""
        places = client.num_running / self._capacities.max_sessions
        return places if client.paused else max(places, self._capacities.share(client))
