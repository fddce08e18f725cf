"""The targets that serve the same model, and the choice of one of them for each session."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator.replicas.replica import Replica, Slowness
from coordinator.sessions.capacity import Capacity
from coordinator.sessions.place import Place
from coordinator.workers.remote_worker import RemoteWorker, WorkerLife
from coordinator.workers.verifier import TargetStream
from coordinator.workers.workers import Workers
from specd.step_costs import MovingAverage

_WEIGHT = 0.05  # of a session in the average number of generated tokens
_FIRST_GENERATED_TOKENS = 128.0


class Replicas:
    """A Replica for each target worker, and the sessions that each has got."""

    def __init__(
        self,
        workers: Workers[TargetStream],
        new_replica: Callable[[RemoteWorker[TargetStream]], Replica],
        on_remove: Callable[[Replica], None],
    ) -> None:
        """`new_replica` makes the replica of a worker that comes; `on_remove` is called with that of one that goes."""
        self.workers = workers
        self._new_replica, self._on_remove = new_replica, on_remove
        self._replicas: dict[RemoteWorker[TargetStream], Replica] = {}
        # It also has replicas of removed workers, while sessions have memory there.
        self._by_capacity: dict[Capacity, Replica] = {}
        self._generated_tokens = MovingAverage(_WEIGHT)
        self._generated_tokens.add(_FIRST_GENERATED_TOKENS)
        workers.on_members = self._follow
        self._follow()

    @property
    def all(self) -> list[Replica]:
        """The replicas of all workers, in their order. Safe on any thread."""
        return list(self._replicas.values())

    def _follow(self) -> None:
        """Make the replicas of workers that have come, and forget those of workers that have gone."""
        before = self._replicas
        self._replicas = {each: before.get(each) or self._new_replica(each) for each in self.workers.members}
        for worker in before.keys() - self._replicas.keys():
            self._on_remove(before[worker])
        held = [replica for replica in self._by_capacity.values() if replica.capacity.reserved_bytes]
        self._by_capacity = {replica.capacity: replica for replica in (*held, *self._replicas.values())}

    @property
    def usable(self) -> list[Replica]:
        """The replicas that may get sessions: those that are ready, or all while none is."""
        replicas = self.all
        return [replica for replica in replicas if replica.worker.model is not None] or replicas

    def capacities(self) -> list[Capacity]:
        """Return the capacities of the usable replicas."""
        return [replica.capacity for replica in self.usable]

    def of(self, capacity: Capacity) -> Replica:
        """Return the replica with this capacity."""
        return self._by_capacity[capacity]

    def choose(self, place: Place, capacities: Sequence[Capacity]) -> Capacity:
        """Return the capacity of the replica where a session probably ends first, which expects its prompt."""
        prompt, num_generated = place.prompt, min(self._generated_tokens.value, place.prompt.max_tokens)
        measured = [each.slowness for each in self.all if each.slowness is not None] or [Slowness()]
        # A target that was slow for a while gets a session again when it has had none: others would keep all of them.
        usual = Slowness(min(each.prefill for each in measured), min(each.decoding for each in measured))
        best = min(
            (self.of(capacity) for capacity in capacities),
            key=lambda each: (each.expected_seconds(prompt, num_generated, usual), each.capacity.num_running),
        )
        best.take(place)
        return best.capacity

    def count_generated(self, num_tokens: int) -> None:
        """Learn from a session that has ended."""
        self._generated_tokens.add(num_tokens)

    def that_continue(self, life: WorkerLife | None) -> list[Replica]:
        """Return the replicas that are ready and can continue a session after tokens of a target's life."""
        return [
            replica
            for replica in self.all
            if replica.worker.model is not None and (life is None or replica.worker.life.equals(life))
        ]

    def recall_learnt(self) -> None:
        """Let the planners of targets that have come begin with the kept knowledge of their pair."""
        for replica in self.usable:
            replica.recall_learnt()

    async def keep_learnt(self) -> None:
        """Keep the knowledge of the planners for the next start: in each file, that of the most rounds."""
        memories = (memory for replica in self.all for memory in replica.planner_memories)
        most = {memory.file(): memory for memory in sorted(memories, key=lambda each: each.num_rounds)}
        for memory in most.values():
            await memory.keep()
