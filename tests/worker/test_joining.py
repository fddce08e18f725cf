"""The meeting of ranks: who may follow, what strangers get, and connections that break, with real sockets."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import pytest
from structlog.testing import capture_logs

from specd.errors import StartupError
from specd.identity.authority import Authority, standard_leaves
from specd.identity.certificates import CertificateFiles, Certificates
from specd.identity.roles import Role
from specd.rank_settings import RankSettings
from specd.v1.ranks_pb2 import Beat, Join, RankMessage, StepPlan, Welcome
from specd.worker.ranks.connection import LostRankError, RankConnection
from specd.worker.ranks.data_plane import check_backend, free_port
from specd.worker.ranks.gathering import other_weights
from specd.worker.ranks.joining import _ask, _connect, admit, join, join_request
from specd.worker.ranks.watch import Watch

TERMS = Welcome(backend="ring", kv_bits=16, deadline_seconds=5.0)
PATIENCE_SECONDS = 20
Result = TypeVar("Result")
Admitted = tuple[list[RankConnection], list[str]]
Joined = tuple[RankConnection, Welcome]


@pytest.fixture
def watch() -> Iterator[Watch]:
    watch = Watch(1e9, pytest.fail)
    yield watch
    watch.close()


class Threads:
    """Threads that do not keep a test that has failed from its end."""

    def submit(self, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
        future: Future[Result] = Future()

        def run() -> None:
            try:
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future


@pytest.fixture
def threads() -> Threads:
    return Threads()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs") / "made"
    authority = Authority.create(directory)
    for leaf in standard_leaves([]):
        authority.issue(leaf, days=30, replace=False)
    return directory


def certificates_of(directory: Path, role: Role) -> Certificates:
    files = CertificateFiles(directory / f"{role}.crt", directory / f"{role}.key", directory / "ca.crt")
    return Certificates(files, role=role)


def shown(rank: int = 0, *, fingerprint: str = "f1", device: str = "cpu") -> Join:
    return join_request(fingerprint, device, rank=rank, data_host="")


class Gathered:
    """Rank 0, which waits for followers in a thread."""

    def __init__(
        self,
        address: str,
        watch: Watch,
        threads: Threads,
        number: int = 2,
        certificates: Certificates | None = None,
    ) -> None:
        self.address = address
        self._watch, self._threads = watch, threads
        settings = RankSettings.model_validate({"ranks": number, "ranks_listen": address})
        self.admitted: Future[Admitted] = threads.submit(admit, settings, shown(), certificates, watch, TERMS)

    def join(self, own: Join, certificates: Certificates | None = None) -> Future[Joined]:
        return self._threads.submit(join, self.address, own, certificates, self._watch)


def test_followers_get_the_ranks_that_they_ask_for(tmp_path: Path, watch: Watch, threads: Threads) -> None:
    gathered = Gathered(f"unix:{tmp_path}/ranks", watch, threads, number=4)
    joins = [gathered.join(shown(rank)) for rank in (2, 3)]
    time.sleep(0.3)
    joins.append(gathered.join(shown()))
    connections, addresses = gathered.admitted.result(PATIENCE_SECONDS)
    welcomes = [each.result(PATIENCE_SECONDS)[1] for each in joins]
    assert [welcome.rank for welcome in welcomes] == [2, 3, 1]
    assert {(*welcome.data_addresses,) for welcome in welcomes} == {tuple(addresses)}
    assert len(set(addresses)) == 4
    assert all(address.startswith("127.0.0.1:") for address in addresses)
    assert {(welcome.backend, welcome.kv_bits, welcome.deadline_seconds) for welcome in welcomes} == {("ring", 16, 5.0)}
    plan = RankMessage(plan=StepPlan(step=7))
    connections[1].send(plan)
    assert joins[0].result()[0].receive(PATIENCE_SECONDS) == plan
    assert not (tmp_path / "ranks").exists()


@pytest.mark.parametrize(
    ("own", "why"),
    [
        (shown(fingerprint="f2"), "another model (fingerprint f2) than rank 0 (f1): give both the same --model"),
        (shown(device="gpu"), "it computes on the gpu, and rank 0 on the cpu"),
        (Join(versions="specd 0.0", fingerprint="f1", device="cpu"), "it runs specd 0.0, and rank 0 runs specd"),
        (shown(3), "it asks to be rank 3, which is not one of ranks 1 to 1"),
    ],
)
def test_a_follower_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, watch: Watch, threads: Threads, own: Join, why: str
) -> None:
    gathered = Gathered(f"unix:{tmp_path}/ranks", watch, threads)
    with capture_logs() as logs, pytest.raises(StartupError) as raised:
        gathered.join(own).result(PATIENCE_SECONDS)
    assert why in str(raised.value)
    assert [why in str(event["why"]) for event in logs if event["event"] == "refused a follower"] == [True]
    good = gathered.join(shown())  # the place is still free
    gathered.admitted.result(PATIENCE_SECONDS)
    assert good.result(PATIENCE_SECONDS)[1].rank == 1


def test_a_rank_is_given_once(tmp_path: Path, watch: Watch, threads: Threads) -> None:
    gathered = Gathered(f"unix:{tmp_path}/ranks", watch, threads, number=3)
    first = gathered.join(shown(2))
    time.sleep(0.5)
    with pytest.raises(StartupError, match="it asks to be rank 2, which is taken"):
        gathered.join(shown(2)).result(PATIENCE_SECONDS)
    gathered.join(shown(1))
    gathered.admitted.result(PATIENCE_SECONDS)
    assert first.result(PATIENCE_SECONDS)[1].rank == 2


def test_a_follower_that_leaves_before_the_start_frees_its_rank(tmp_path: Path, watch: Watch, threads: Threads) -> None:
    gathered = Gathered(f"unix:{tmp_path}/ranks", watch, threads, number=3)
    time.sleep(0.3)
    with socket.socket(socket.AF_UNIX) as leaving:
        leaving.connect(str(tmp_path / "ranks"))
        early = RankConnection(leaving, "rank 0")
        early.send(RankMessage(join=shown(1)))
        time.sleep(0.5)
        early.close()
    joins = [gathered.join(shown(rank)) for rank in (1, 2)]
    gathered.admitted.result(PATIENCE_SECONDS)
    assert [each.result(PATIENCE_SECONDS)[1].rank for each in joins] == [1, 2]


def test_a_follower_waits_for_rank_0(tmp_path: Path, watch: Watch, threads: Threads) -> None:
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    waiting = threads.submit(join, address, shown(), None, watch)
    time.sleep(0.5)
    Gathered(address, watch, threads).admitted.result(PATIENCE_SECONDS)
    assert waiting.result(PATIENCE_SECONDS)[1].rank == 1


def test_strangers_do_not_keep_followers_out(watch: Watch, threads: Threads) -> None:
    """Silent ones, one that sends what is no message, and one that announces a huge one."""
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    gathered = Gathered(address, watch, threads)
    host, _, port = address.rpartition(":")
    time.sleep(0.3)
    strangers = [socket.create_connection((host, int(port))) for _ in range(8)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
    strangers[1].sendall(struct.pack("!I", 2**31) + b"x" * 1000)
    strangers[2].sendall(struct.pack("!I", 4) + b"\xff\xff\xff\xff")
    plan = RankMessage(plan=StepPlan(step=1)).SerializeToString()
    strangers[3].sendall(struct.pack("!I", len(plan)) + plan)
    follower = gathered.join(shown())
    gathered.admitted.result(PATIENCE_SECONDS)
    assert follower.result(PATIENCE_SECONDS)[1].rank == 1
    for stranger in strangers[:4]:
        stranger.settimeout(PATIENCE_SECONDS)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    for stranger in strangers:
        stranger.close()


def test_followers_show_the_certificate_of_a_target_worker(made: Path, watch: Watch, threads: Threads) -> None:
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    target = certificates_of(made, Role.TARGET_WORKER)
    gathered = Gathered(address, watch, threads, certificates=target)
    time.sleep(0.3)
    with capture_logs() as logs:
        for role in (Role.CLIENT, Role.COORDINATOR, Role.DRAFT_WORKER):
            other = _connect(address, certificates_of(made, role))
            with pytest.raises(LostRankError):
                _ask(other, shown())
            other.close()
        plaintext = socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])))
        plaintext.sendall(b"\x00\x00\x00\x02xx")
        time.sleep(0.3)
    refused = [event for event in logs if event["event"] == "a caller is no follower"]
    assert sum("the certificate of a target-worker" in event["why"] for event in refused) >= 3
    assert not gathered.admitted.done()
    stranger = Authority.create(made.parent / "other")
    for leaf in standard_leaves([]):
        stranger.issue(leaf, days=30, replace=False)
    with pytest.raises(StartupError, match="shows a certificate that cannot be used here"):
        gathered.join(shown(), certificates_of(stranger.directory, Role.TARGET_WORKER)).result(PATIENCE_SECONDS)
    good = gathered.join(shown(), target)
    connections, _ = gathered.admitted.result(PATIENCE_SECONDS)
    connection = good.result(PATIENCE_SECONDS)[0]
    for i in range(200):  # both ways at the same time
        connections[0].send(RankMessage(plan=StepPlan(step=i)))
        connection.send(RankMessage(beat=Beat(available_bytes=i + 1)))
    assert [connection.receive(PATIENCE_SECONDS).plan.step for _ in range(200)] == [*range(200)]
    plaintext.close()


def test_the_end_of_a_connection_is_seen_at_once() -> None:
    ours, theirs = socket.socketpair()
    connection, lost = RankConnection(ours, "the follower"), threading.Event()
    connection.when_lost(lambda why: lost.set())
    theirs.close()
    assert lost.wait(PATIENCE_SECONDS)
    with pytest.raises(LostRankError, match="the follower has closed the connection"):
        connection.receive()
    with pytest.raises(LostRankError):
        for _ in range(2):
            connection.send(RankMessage(plan=StepPlan(step=1)))


def test_a_silent_rank_and_a_long_step_end_the_process() -> None:
    ends: list[str] = []
    ended = threading.Event()

    def end(why: str) -> None:
        ends.append(why)
        ended.set()

    ours, theirs = socket.socketpair()
    connection, other = RankConnection(ours, "the follower"), RankConnection(theirs, "rank 0")
    watch = Watch(2.5, end)
    watch.add(connection)
    other_watch = Watch(1e9, pytest.fail)
    other_watch.add(other)
    assert not ended.wait(4)  # its beats come
    other_watch.close()
    assert ended.wait(PATIENCE_SECONDS)
    assert "the follower is silent for 2.5" in ends[0] or "the follower is silent for 2.6" in ends[0]
    watch.close()

    ends.clear()
    ended.clear()
    watch = Watch(1e9, end)
    with watch.within(5.0, "step 1"):
        time.sleep(0.2)
    assert not ends
    with watch.within(0.2, "step 2"):
        assert ended.wait(PATIENCE_SECONDS)
    assert ends[0] == "step 2 takes too long"
    watch.close()


def test_a_rank_that_never_connects_ends_the_process() -> None:
    code = (
        "from specd.worker.ranks.data_plane import free_port, join_collectives as join; "
        "join(0, [f'127.0.0.1:{free_port(str())}' for _ in range(2)], 'ring', 1.0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "Timeout (0:00:01)!" in done.stderr


def test_other_weights_are_seen_once_both_are_known() -> None:
    ours, theirs = socket.socketpair()
    connection, known = RankConnection(ours, "the follower"), Future[str]()
    assert other_weights(known, connection) == ""
    connection.beat = Beat(whole_fingerprint="b")
    assert other_weights(known, connection) == ""
    known.set_result("a")
    assert "the follower holds other weights than rank 0" in other_weights(known, connection)
    connection.beat = Beat(whole_fingerprint="a")
    assert other_weights(known, connection) == ""
    connection.close()
    theirs.close()


def test_a_backend_that_mlx_lacks_is_refused() -> None:
    check_backend("ring")
    with pytest.raises(StartupError, match="--ranks-backend is nccl, which this MLX does not have: choose ring"):
        check_backend("nccl")
