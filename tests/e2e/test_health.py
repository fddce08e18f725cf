"""Health and reflection of each process."""

from __future__ import annotations

from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from specd.child import Child
from specd.rpc.channel import open_channel
from specd.rpc.server import LIVENESS
from specd.supervisor import Stack
from tests.e2e.calls import responses_to

SERVICES = {
    "coordinator": {"specd.v1.GenerationService", "specd.v1.SessionService"},
    "draft-worker": {"specd.v1.DraftService", "specd.v1.ModelService", "specd.v1.MultiplexService"},
    "target-worker": {"specd.v1.TargetService", "specd.v1.ModelService", "specd.v1.MultiplexService"},
}


@pytest.fixture(params=SERVICES)
async def process(request: pytest.FixtureRequest, stack: Stack) -> Child:
    return next(child for child in stack.children if child.name == request.param)


async def test_health_answers_for_the_process_and_its_services(process: Child) -> None:
    async with open_channel(process.facts["address"]) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        for service in ("", LIVENESS, *SERVICES[process.name]):
            response = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert response.status == health_pb2.HealthCheckResponse.SERVING

        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await health.Check(health_pb2.HealthCheckRequest(service="specd.v1.NoSuchService"))
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_the_services_and_their_files(process: Child) -> None:
    async with open_channel(process.facts["address"]) as channel:
        reflection = cast(Any, reflection_pb2_grpc.ServerReflectionStub)(channel)
        questions = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            *(
                reflection_pb2.ServerReflectionRequest(file_containing_symbol=service)
                for service in SERVICES[process.name]
            ),
        ]
        listing, *files = await responses_to(reflection.ServerReflectionInfo(iter(questions)))

    assert {service.name for service in listing.list_services_response.service} == SERVICES[process.name] | {
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert all(file.file_descriptor_response.file_descriptor_proto for file in files)
