"""The command `specd health`."""

from __future__ import annotations

import asyncio
from typing import Annotated

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specd.cli.connection import TlsCa, TlsCert, TlsKey, TlsName, peer_address
from specd.launch import complain
from specd.rpc.channel import open_channel
from specd.rpc.credentials import PLAIN, ClientCredentials
from specd.rpc.diagnosis import why_unreachable
from specd.settings import DEFAULT_ADDRESS


def health(
    address: Annotated[
        str,
        typer.Argument(
            envvar="SPECD_ADDRESS", callback=peer_address, help="Address of the process: HOST:PORT or unix:PATH."
        ),
    ] = DEFAULT_ADDRESS,
    service: Annotated[
        str, typer.Option(metavar="NAME", help="Check this service, such as specd.v1.DraftService.", show_default=False)
    ] = "",
    timeout_seconds: Annotated[float, typer.Option(min=0.01, help="Time to wait for an answer.")] = 3.0,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = "",
) -> None:
    """Print the health of a process; exit with 1 unless it is SERVING. It needs no token."""
    credentials = ClientCredentials(tls_ca, tls_cert, tls_key, server_name=tls_name)
    try:
        status = asyncio.run(health_of(address, service, timeout_seconds, credentials))
    except grpc.aio.AioRpcError as error:
        complain(_why_unknown(error, address, service, timeout_seconds, credentials))
        raise typer.Exit(1) from error
    typer.echo(f"{address} {status}")
    if status != "SERVING":
        raise typer.Exit(1)


def _why_unknown(
    error: grpc.aio.AioRpcError, address: str, service: str, timeout_seconds: float, credentials: ClientCredentials
) -> str:
    match error.code():
        case grpc.StatusCode.UNAVAILABLE:
            why = why_unreachable(address, credentials)
            return (
                why or f"no process of specd answers at {address}: start one, such as 'specd up', or give its address"
            )
        case grpc.StatusCode.NOT_FOUND:
            return f"the process at {address} has no service {service!r}: leave out --service, or name one that it has"
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"the process at {address} has not answered within {timeout_seconds:g} s: is it a process of specd?"
    return f"the process at {address} does not report its health: {error.code().name}: {error.details()}"


async def health_of(address: str, service: str, timeout_seconds: float, credentials: ClientCredentials = PLAIN) -> str:
    """Return the health status of a service, or of the process for "": SERVING, NOT_SERVING, …

    Raises grpc.aio.AioRpcError.
    """
    async with open_channel(address, credentials) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        health = health_pb2_grpc.HealthStub(channel)
        response = await health.Check(request, timeout=timeout_seconds)  # type: ignore[attr-defined]
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))
