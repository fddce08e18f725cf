"""The start of rank 0 of a target: its followers come, the ranks connect, and each reads its part."""

from __future__ import annotations

from concurrent.futures import Future

import mlx.core as mx

from specd.identity.certificates import Certificates
from specd.settings import TargetWorkerSettings
from specd.v1.ranks_pb2 import Meeting, RankMessage, Welcome
from specd.worker.model.directory import find
from specd.worker.model.fingerprint import quick_fingerprint
from specd.worker.model.sharding import Shard
from specd.worker.ranks.connection import RankConnection
from specd.worker.ranks.data_plane import check_backend, join_collectives
from specd.worker.ranks.joining import admit, join_request
from specd.worker.ranks.ranks import Ranks
from specd.worker.ranks.watch import Watch, end_process


class Gathering:
    """The followers of this process while it starts. Use it on the thread that computes."""

    def __init__(self, settings: TargetWorkerSettings, certificates: Certificates | None) -> None:
        """Wait for the followers of the model, without limit, and connect all ranks. Raises StartupError."""
        check_backend(settings.ranks_backend)
        own = join_request(
            quick_fingerprint(find(settings.model)),
            mx.default_device().type.name,
            rank=0,
            data_host=settings.rank_host,
        )
        terms = Welcome(
            backend=settings.ranks_backend,
            kv_bits=settings.kv_bits,
            kv_group_size=settings.kv_group_size,
            deadline_seconds=settings.rank_deadline_seconds,
            hang_seconds=settings.hang_seconds,
        )
        self._settings = settings
        self._watch = Watch(settings.hang_seconds)
        self._followers, addresses = admit(settings, own, certificates, self._watch, terms)
        for follower in self._followers:
            follower.when_lost(end_process)
        group = join_collectives(0, addresses, settings.ranks_backend)
        self.part = Shard(group, settings.ranks_backend, self.meet)

    def meet(self, facts: str) -> None:
        """Wait until all ranks are at the same place. What they compute until the next meeting has a limit of time."""
        self._watch.clear()
        for follower in self._followers:
            theirs = follower.receive().meeting.facts
            if theirs != facts:
                end_process(f"{follower.peer} and rank 0 have read different models: {theirs!r} and {facts!r}")
        for follower in self._followers:
            follower.send(RankMessage(meeting=Meeting(facts=facts)))
        self._watch.allow(self._settings.hang_seconds, "the first passes of the model")

    def ranks(self, whole_fingerprint: Future[str]) -> Ranks:
        """Return rank 0's side of the steps, once the model is read."""
        self._watch.clear()
        self._watch.silence_seconds = self._settings.rank_deadline_seconds
        self._watch.look_at = lambda follower: other_weights(whole_fingerprint, follower)
        return Ranks(
            self._followers,
            self._watch,
            deadline_seconds=self._settings.rank_deadline_seconds,
            hang_seconds=self._settings.hang_seconds,
            end=end_process,
        )


def other_weights(whole_fingerprint: Future[str], follower: RankConnection) -> str:
    """Return a fault if a follower's files are not those of this process, "" if they are, or are not known yet."""
    own = whole_fingerprint.result() if whole_fingerprint.done() else ""
    theirs = follower.beat.whole_fingerprint
    if own and theirs and own != theirs:
        return f"{follower.peer} holds other weights than rank 0, though they look the same at first sight"
    return ""
