"""What the sessions of one client have taught the planner."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TypeVar

from coordinator.planner.acceptance import PooledAcceptance
from specd.sampling import Sampling
from specd.step_costs import MovingAverage

_MATCH_GAIN_WEIGHT = 0.02  # of one round in an average
# Drafting that does not pay is probed once the last probe cost less than this part of the time.
_PROBE_SHARE = 0.0025
# The least recently used go. A request chooses its temperature, and so its pool, of some kilobytes.
_MOST_POOLS = 128
_MOST_CLIENTS = 128

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Probes:
    """When to try again what does not pay."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._due_at = clock()

    @property
    def is_due(self) -> bool:
        """Whether it is time."""
        return self._clock() >= self._due_at

    def probed(self, cost_seconds: float) -> None:
        """Count a probe: the more it cost, the later is the next."""
        self._due_at = self._clock() + max(cost_seconds, 0.0) / _PROBE_SHARE


class ClientLearning:
    """Acceptance by kind of sampling, probes, and the worth of matches, as the sessions of one client show them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns seconds."""
        self.probes, self.match_probes = Probes(clock), Probes(clock)
        # What the matched tokens of one session add to the tokens per second of all, as a part of the target's alone.
        self.match_gain = MovingAverage(_MATCH_GAIN_WEIGHT)
        self._pools: OrderedDict[Hashable, PooledAcceptance] = OrderedDict()

    def pool(self, sampling: Sampling, evidence: Hashable = None) -> PooledAcceptance:
        """Return what sessions like this one share: of the draft model's tokens, or of matches with `evidence`.

        Acceptance depends on the temperature more than on the text.
        """
        kind = (sampling.acceptance, round(sampling.temperature, 1), evidence)
        return _latest(self._pools, kind, PooledAcceptance, _MOST_POOLS)


class Learning:
    """What is learnt, by client: what one teaches must neither mislead the others nor tell them anything.

    vLLM shared its estimator, and one client's requests set everyone's draft length (vllm-project/vllm#57533).
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._clients: OrderedDict[str, ClientLearning] = OrderedDict()

    def of(self, client: str) -> ClientLearning:
        """Return what a client's sessions share, which they keep while they run."""
        return _latest(self._clients, client, lambda: ClientLearning(self._clock), _MOST_CLIENTS)


def _latest(values: OrderedDict[Key, Value], key: Key, make: Callable[[], Value], most: int) -> Value:
    """Return the value of a key, a new one if there is none; more than `most` lose the least recently used."""
    value = values[key] = values.pop(key, None) or make()
    if len(values) > most:
        values.popitem(last=False)
    return value
