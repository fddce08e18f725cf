"""The meeting of the ranks of a target: rank 0 admits followers, and a follower asks to join."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from importlib.metadata import version
from pathlib import Path
from queue import Empty, SimpleQueue

import structlog

from specd.errors import StartupError
from specd.identity.certificates import Certificates
from specd.identity.peer import peer_of
from specd.identity.roles import Role
from specd.listening import check_socket_path, listen
from specd.rank_settings import RankSettings
from specd.rpc.credentials import client_context
from specd.v1.ranks_pb2 import Join, RankMessage, Welcome
from specd.version import __version__
from specd.worker.ranks.connection import LostRankError, RankConnection
from specd.worker.ranks.data_plane import free_port
from specd.worker.ranks.watch import Watch

log = structlog.get_logger()

_REMIND_SECONDS = 10.0
_RETRY_SECONDS = 0.2
# A caller that has not shown in this time who it is loses its place for one that does.
_HANDSHAKE_SECONDS = 10.0
_MOST_STRANGERS = 32


def join_request(fingerprint: str, device: str, *, rank: int, data_host: str) -> Join:
    """Return what a follower shows, and what rank 0 compares with its own."""
    versions = ", ".join((f"specd {__version__}", *(f"{name} {version(name)}" for name in ("mlx", "mlx-lm"))))
    return Join(
        versions=versions,
        fingerprint=fingerprint,
        device=device,
        rank=rank,
        data_host=data_host,
        data_port=free_port(data_host or "127.0.0.1"),
    )


def admit(
    settings: RankSettings, own: Join, certificates: Certificates | None, watch: Watch, terms: Welcome
) -> tuple[list[RankConnection], list[str]]:
    """Wait for all followers, without limit, and welcome them.

    Followers must hold the model of `own`. Returns their connections by rank, from 1, and the addresses for collectives
    of all ranks. `terms` are the fields of a welcome that are the same for all. Raises StartupError if the address is
    in use.
    """
    ranks = range(1, settings.ranks)
    members: dict[int, tuple[RankConnection, Join]] = {}
    with _Door(settings.ranks_listen, certificates) as door:
        log.info("waiting for followers", address=settings.ranks_listen, number=len(ranks))
        remind_at = time.monotonic() + _REMIND_SECONDS
        while len(members) < len(ranks):
            come = door.next_caller(_RETRY_SECONDS)
            for rank, (connection, _) in [*members.items()]:
                if connection.lost:
                    log.warning("a follower has left", rank=rank, why=connection.lost)
                    watch.discard(connection)
                    del members[rank]
            if come is not None:
                connection, join = come
                free = [rank for rank in ranks if rank not in members]
                if refusal := _refusal(own, join, [*ranks], free):
                    log.error("refused a follower", follower=connection.peer, why=refusal)
                    _refuse(connection, refusal)
                    continue
                rank = join.rank or free[0]
                members[rank] = connection, join
                connection.is_welcome = True
                watch.add(connection)
                log.info("a follower is here", rank=rank, follower=connection.peer)
            if time.monotonic() > remind_at:
                remind_at += _REMIND_SECONDS
                missing = [rank for rank in ranks if rank not in members]
                here = {rank: connection.peer for rank, (connection, _) in members.items()}
                log.warning("waiting for followers", address=settings.ranks_listen, here=here, missing_ranks=missing)
    # The address by which the last follower reaches this process.
    host = settings.rank_host or members[len(ranks)][0].own_host
    hosts = {0: host, **{rank: join.data_host or it.peer_host for rank, (it, join) in members.items()}}
    ports = {0: free_port(host), **{rank: join.data_port for rank, (_, join) in members.items()}}
    addresses = [_joined(hosts[rank], ports[rank]) for rank in range(settings.ranks)]
    for rank, (connection, _) in members.items():
        welcome = Welcome(rank=rank, data_addresses=addresses)
        welcome.MergeFrom(terms)
        connection.send(RankMessage(welcome=welcome))
    return [members[rank][0] for rank in ranks], addresses


def join(address: str, own: Join, certificates: Certificates | None, watch: Watch) -> tuple[RankConnection, Welcome]:
    """Wait for rank 0, without limit, and return the connection to it, and its welcome.

    Raises StartupError if rank 0 refuses this process.
    """
    remind_at = time.monotonic() + _REMIND_SECONDS
    why = "it has not answered yet"
    while True:
        try:
            connection = _connect(address, certificates)
        except ssl.SSLCertVerificationError as error:
            raise StartupError(f"rank 0 at {address} shows a certificate that cannot be used here: {error}") from error
        except OSError as error:
            why = error.strerror or str(error)
        else:
            watch.add(connection)
            try:
                welcome = _ask(connection, own)
            except LostRankError as error:
                watch.discard(connection)
                connection.close()
                why = str(error)
            else:
                if welcome.refusal:
                    watch.discard(connection)
                    connection.close()
                    raise StartupError(f"rank 0 at {address} refuses this follower: {welcome.refusal}")
                return connection, welcome
        if time.monotonic() > remind_at:
            remind_at += _REMIND_SECONDS
            log.warning("waiting for rank 0", address=address, why=why)
        time.sleep(_RETRY_SECONDS)


def _ask(connection: RankConnection, own: Join) -> Welcome:
    """Ask to join, and return the answer, which comes when all followers are there. Raises LostRankError."""
    connection.is_welcome = True
    connection.send(RankMessage(join=own))
    log.info("waiting for rank 0 to begin")
    return connection.receive().welcome


def _refusal(own: Join, join: Join, ranks: list[int], free: list[int]) -> str:
    if join.versions != own.versions:
        return f"it runs {join.versions}, and rank 0 runs {own.versions}: install the same versions"
    if join.fingerprint != own.fingerprint:
        return (
            f"it holds another model (fingerprint {join.fingerprint}) than rank 0 ({own.fingerprint}): give both the "
            "same --model"
        )
    if join.device != own.device:
        return f"it computes on the {join.device}, and rank 0 on the {own.device}"
    if join.rank and join.rank not in free:
        why = "taken" if join.rank in ranks else f"not one of ranks {ranks[0]} to {ranks[-1]}"
        return f"it asks to be rank {join.rank}, which is {why}"
    return ""


def _refuse(connection: RankConnection, refusal: str) -> None:
    with contextlib.suppress(LostRankError):
        connection.send(RankMessage(welcome=Welcome(refusal=refusal)))
    connection.close()


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _connect(address: str, certificates: Certificates | None) -> RankConnection:
    """Connect to rank 0. Raises OSError."""
    with contextlib.ExitStack() as unless_it_fails:
        if address.startswith("unix:"):
            sock = unless_it_fails.enter_context(socket.socket(socket.AF_UNIX))
            sock.connect(address.removeprefix("unix:"))
        else:
            host, _, port = address.rpartition(":")
            sock = socket.create_connection((host.strip("[]"), int(port)), timeout=_HANDSHAKE_SECONDS)
            unless_it_fails.enter_context(sock)
            _set_up(sock)
            if certificates is not None and (ca := certificates.files.ca) is not None:
                context = client_context(ca, certificates.files.cert, certificates.files.key)
                sock = context.wrap_socket(sock, server_hostname=Role.TARGET_WORKER.dns_name)
        unless_it_fails.pop_all()
        return RankConnection(sock, "rank 0")


def _set_up(sock: socket.socket) -> None:
    """Send small messages at once, and notice a lost host."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


class _Door:
    """The address at which followers come in, as a context manager. It closes when all are there."""

    def __init__(self, address: str, certificates: Certificates | None) -> None:
        self._path = address.removeprefix("unix:") if address.startswith("unix:") else ""
        self._certificates = certificates if not self._path else None
        self._callers: SimpleQueue[tuple[RankConnection, Join]] = SimpleQueue()
        self._places = threading.Semaphore(_MOST_STRANGERS)
        if self._path:
            check_socket_path(address)
            Path(self._path).unlink(missing_ok=True)
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(self._path)
            self._listener.listen()
        else:
            self._listener = listen(address, purpose="listen for followers")
        self._listener.settimeout(_RETRY_SECONDS)
        self._is_open = True
        threading.Thread(target=self._accept, name="followers", daemon=True).start()

    def __enter__(self) -> _Door:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_open = False
        self._listener.close()
        if self._path:
            Path(self._path).unlink(missing_ok=True)

    def next_caller(self, timeout: float) -> tuple[RankConnection, Join] | None:
        """Return the next caller that has shown what it holds, or None after `timeout` seconds."""
        try:
            return self._callers.get(timeout=timeout)
        except Empty:
            return None

    def _accept(self) -> None:
        while self._is_open:
            try:
                sock, address = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # it is closed
                return
            if not self._places.acquire(blocking=False):
                sock.close()
                continue
            name = f"{address[0]}:{address[1]}" if address else "a follower"
            threading.Thread(target=self._greet, args=(sock, name), name="a follower", daemon=True).start()

    def _greet(self, sock: socket.socket, name: str) -> None:
        try:
            sock.settimeout(_HANDSHAKE_SECONDS)
            if not self._path:
                _set_up(sock)
            connection = RankConnection(self._secured(sock), name)
            try:
                message = connection.receive(_HANDSHAKE_SECONDS)
                if message.WhichOneof("kind") != "join":
                    raise LostRankError("its first message is no Join")
            except (LostRankError, TimeoutError):
                connection.close()
                raise
            self._callers.put((connection, message.join))
        except (OSError, LostRankError) as error:  # ssl.SSLError and TimeoutError are among them
            log.warning("a caller is no follower", caller=name, why=str(error))
            sock.close()
        finally:
            self._places.release()

    def _secured(self, sock: socket.socket) -> socket.socket:
        """Return the connection with TLS, if this process has certificates. Raises OSError for another role."""
        if self._certificates is None:
            return sock
        self._certificates.refresh()
        secured = self._certificates.ssl_context().wrap_socket(sock, server_side=True)
        if self._certificates.has_ca:
            shown = ssl.DER_cert_to_PEM_cert(secured.getpeercert(binary_form=True) or b"").encode()
            if Role.TARGET_WORKER not in peer_of(shown).roles:
                secured.close()
                raise OSError(f"a follower shows the certificate of a {Role.TARGET_WORKER}, and this has another role")
        return secured
