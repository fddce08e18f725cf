"""The discovery of workers: a link to each of the given addresses, and to all addresses of the given names."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import structlog

from coordinator.workers.link import WorkerLink
from coordinator.workers.workers import Workers
from specd.addresses import NAME_PREFIX

Stream = TypeVar("Stream")

log = structlog.get_logger()

_LOOK_UP_SECONDS = 5.0
_MOST_WORKERS = 256  # of a name, which somebody else may answer for


class Discovery(Generic[Stream]):
    """Adds workers to `workers` as their addresses come, and removes those that are away when their address is gone."""

    def __init__(
        self, addresses: tuple[str, ...], workers: Workers[Stream], link: Callable[[str], WorkerLink[Any]]
    ) -> None:
        """`addresses` are HOST:PORT, unix:PATH, or dns:HOST:PORT for a name that is looked up again every 5 s."""
        self._workers = workers
        self._link = link
        self._links: dict[str, WorkerLink[Any]] = {}
        self._names = [address for address in addresses if address.startswith(NAME_PREFIX)]
        self._fixed = [address for address in addresses if not address.startswith(NAME_PREFIX)]
        self._found: dict[str, set[str]] = {}  # by name
        self._follow()
        self._looking = asyncio.ensure_future(self._look_up_again())

    async def close(self) -> None:
        """Stop, and close all links."""
        self._looking.cancel()
        await asyncio.gather(self._looking, return_exceptions=True)
        await asyncio.gather(*(link.close() for link in self._links.values()))

    async def _look_up_again(self) -> None:
        while self._names:
            await asyncio.gather(*map(self._look_up, self._names))
            await self._forget(self._follow())
            await asyncio.sleep(_LOOK_UP_SECONDS)

    async def _look_up(self, name: str) -> None:
        host, _, port = name.removeprefix(NAME_PREFIX).lstrip("/").rpartition(":")
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # what was found before stays
            log.info("cannot look up the workers of a name", name=name, error=str(error))
            return
        hosts = sorted(str(address[0]) for *_, address in found)[:_MOST_WORKERS]
        self._found[name] = {f"[{each}]:{port}" if ":" in each else f"{each}:{port}" for each in hosts}

    def _follow(self) -> list[str]:
        """Add the workers at new addresses; return the addresses that are gone."""
        wanted = [*self._fixed, *(address for found in self._found.values() for address in sorted(found))]
        for address in wanted:
            if address not in self._links:
                self._links[address] = link = self._link(address)
                self._workers.add(link)
        return [address for address in self._links if address not in wanted]

    async def _forget(self, gone: list[str]) -> None:
        for address in gone:
            link = self._links[address]
            if link.model is None and self._workers.remove(link):
                del self._links[address]
                await link.close()
