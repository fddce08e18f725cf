"""The channel to one worker, which is opened again with each new certificate.

A channel of gRPC for Python cannot change its certificate. So a new channel serves new sessions, as soon as the worker
accepts the certificate, and each older one stays until its sessions have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import structlog

from specd.errors import StartupError
from specd.identity.certificates import Certificates
from specd.identity.roles import Role
from specd.rpc.channel import open_channel
from specd.rpc.credentials import PLAIN, ClientCredentials
from specd.v1 import model_pb2, model_pb2_grpc

log = structlog.get_logger()

DESCRIBE_SECONDS = 10.0
RENEW_SECONDS = 5.0
_LONGEST_SESSION_SECONDS = 24 * 3600.0  # the most time that a channel with an older certificate stays open


class WorkerConnection:
    """A channel to a worker, and older ones with the streams that began on them."""

    def __init__(self, worker: str, address: str, certificates: Certificates | None = None) -> None:
        """Connect to the "draft" or "target" worker.

        Certificates with an authority turn on TLS, and then only a process with the worker's role is accepted.
        """
        self.worker = worker
        self.address = address
        self.credentials = _credentials(worker, address, certificates)
        self._certificates = certificates
        self.channel, self._generation = self._open()
        self._retired: dict[grpc.aio.Channel, asyncio.Future[None]] = {}  # with the task that closes each channel

    async def close(self) -> None:
        """Close all channels and their streams."""
        for channel in (self.channel, *self._retired):
            await channel.close()

    async def renew(self, on_change: Callable[[], None]) -> None:
        """Connect again when the worker accepts a new certificate, and call `on_change`. Streams keep their channel."""
        warned_of = 0  # the generation of certificates for which the log has a warning
        while self._certificates is not None and self.credentials.ca is not None:
            await asyncio.sleep(RENEW_SECONDS)
            self._certificates.refresh()
            if self._certificates.generation == self._generation:
                continue
            try:
                channel, generation = self._open()
            except StartupError as error:  # a file is being replaced
                if warned_of != (warned_of := self._certificates.generation):
                    log.warning("cannot use a new certificate yet", worker=self.worker, error=str(error))
                continue
            try:
                await describe(channel)
            except grpc.aio.AioRpcError as error:  # the worker may not know the new authority yet
                if warned_of != (warned_of := generation):
                    log.warning("the worker refuses the new certificate", worker=self.worker, error=error.details())
                await channel.close()
                continue
            old, self.channel, self._generation = self.channel, channel, generation
            on_change()
            self._retired[old] = asyncio.ensure_future(self._retire(old))

    def _open(self) -> tuple[grpc.aio.Channel, int]:
        generation = self._certificates.generation if self._certificates is not None else 0
        return open_channel(self.address, self.credentials), generation

    async def _retire(self, channel: grpc.aio.Channel) -> None:
        """Close a channel when its streams have ended."""
        await channel.close(_LONGEST_SESSION_SECONDS)
        del self._retired[channel]


async def describe(
    channel: grpc.aio.Channel, *, wait_for_whole_fingerprint: bool = False
) -> model_pb2.DescribeResponse:
    """Return a worker's description of its model, and optionally wait until it has digested the weights."""
    request = model_pb2.DescribeRequest(wait_for_whole_fingerprint=wait_for_whole_fingerprint)
    timeout = None if wait_for_whole_fingerprint else DESCRIBE_SECONDS
    response: model_pb2.DescribeResponse = await model_pb2_grpc.ModelServiceStub(channel).Describe(
        request, timeout=timeout
    )
    return response


def _credentials(worker: str, address: str, certificates: Certificates | None) -> ClientCredentials:
    if certificates is None or not certificates.has_ca or address.startswith("unix:"):
        return PLAIN
    files = certificates.files
    return ClientCredentials(files.ca, files.cert, files.key, server_name=Role(f"{worker}-worker").dns_name)
