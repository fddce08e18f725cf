"""Workers at given addresses, and at all addresses of a name."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from coordinator.workers import discovery as discovery_module
from coordinator.workers.discovery import Discovery
from coordinator.workers.remote_worker import RemoteWorker
from coordinator.workers.workers import Workers
from specd.addresses import check_addresses
from tests.unit.fake_workers import MODEL


class Link(RemoteWorker[Any]):
    def __init__(self, address: str) -> None:
        super().__init__("TARGET_UNAVAILABLE", MODEL, address)
        self.is_closed = False

    async def close(self) -> None:
        self.is_closed = True


class Name:
    """A name with addresses that change; a look-up of none fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
        self.hosts = list(hosts)
        self.num_lookups = 0
        monkeypatch.setattr(discovery_module, "_LOOK_UP_SECONDS", 0.0)
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", self.look_up)

    async def look_up(self, host: str, port: str, *, type: int) -> list[Any]:
        assert (host, port, type) == ("targets.svc", "50053", socket.SOCK_STREAM)
        self.num_lookups += 1
        if not self.hosts:
            raise socket.gaierror("no such name")
        return [(socket.AF_INET, type, 6, "", (each, 50053)) for each in self.hosts]

    async def is_followed(self) -> None:
        """Wait until the addresses of now are used."""
        enough = self.num_lookups + 3
        async with asyncio.timeout(5):
            while self.num_lookups < enough:  # noqa: ASYNC110
                await asyncio.sleep(0)


@asynccontextmanager
async def discovered(*addresses: str) -> AsyncIterator[Workers[Any]]:
    workers = Workers[Any]()
    discovery = Discovery(addresses, workers, cast(Any, Link))
    try:
        yield workers
    finally:
        await discovery.close()
        assert all(cast(Link, worker).is_closed for worker in workers.members)


def addresses_of(workers: Workers[Any]) -> list[str]:
    return [worker.address for worker in workers.members]


async def test_workers_come_and_go_with_the_addresses_of_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    name = Name(monkeypatch, "10.0.0.1", "fd00::2")
    async with discovered("10.0.0.9:50053", "dns:targets.svc:50053") as workers:
        await name.is_followed()
        assert addresses_of(workers) == ["10.0.0.9:50053", "10.0.0.1:50053", "[fd00::2]:50053"]
        name.hosts = ["10.0.0.1", "10.0.0.3"]
        await name.is_followed()
        gone = workers.members[2]
        assert addresses_of(workers)[2:] == ["[fd00::2]:50053", "10.0.0.3:50053"], "it still serves"
        gone.model = None
        await name.is_followed()
        assert addresses_of(workers) == ["10.0.0.9:50053", "10.0.0.1:50053", "10.0.0.3:50053"]
        assert cast(Link, gone).is_closed
        name.hosts = []
        await name.is_followed()
        assert len(workers.members) == 3, "a name that cannot be looked up keeps its workers"


async def test_the_last_worker_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions wait for it, and there is always one to name in an error."""
    name = Name(monkeypatch, "10.0.0.1")
    async with discovered("dns:///targets.svc:50053") as workers:
        await name.is_followed()
        workers.members[0].model = None
        name.hosts = ["10.0.0.2"]
        await name.is_followed()
        assert addresses_of(workers) == ["10.0.0.2:50053"]
        workers.members[0].model = None
        name.hosts = ["10.0.0.2", "10.0.0.2"]
        await name.is_followed()
        assert addresses_of(workers) == ["10.0.0.2:50053"]


def test_lists_of_addresses() -> None:
    assert check_addresses(" a:1, unix:/b ,dns:c:2,dns:///d:3") == "a:1,unix:/b,dns:c:2,dns:///d:3"
    for wrong, words in {
        "": "'' is not an address: write HOST:PORT, unix:PATH or dns:HOST:PORT",
        "a:1,": "'' is not an address",
        "a:1,b": "'b' is not an address",
        "dns:": "is not an address",
        "dns:a": "is not an address",
        "a:1,a:1": "names an address twice",
    }.items():
        with pytest.raises(ValueError, match=words):
            check_addresses(wrong)
