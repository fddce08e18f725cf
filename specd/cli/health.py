"""What the health service of a process says."""

from __future__ import annotations

from grpc_health.v1 import health_pb2, health_pb2_grpc

from specd.channel import open_channel


async def health_of(address: str, service: str, timeout_seconds: float) -> str:
    """Return the status of a service, or, with "", of the whole process: SERVING, NOT_SERVING and so on.

    Raises grpc.aio.AioRpcError.
    """
    async with open_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        health = health_pb2_grpc.HealthStub(channel)
        response = await health.Check(request, timeout=timeout_seconds)  # type: ignore[attr-defined]
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))
