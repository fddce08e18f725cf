"""Processes of other versions of specd, on real ones: another protocol is refused, in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from specd.client import Client
from specd.client.protocol import wire
from specd.errors import error_info
from specd.protocol import PROTOCOL, PROTOCOL_METADATA, ProtocolMismatchError
from specd.supervisor import Stack
from specd.v1.generation_pb2 import GenerateRequest, GetModelInfoRequest
from specd.v1.generation_pb2_grpc import GenerationServiceStub
from specd.v1.model_pb2 import DescribeRequest, DescribeResponse
from specd.v1.model_pb2_grpc import ModelServiceStub
from specd.version import __version__
from tests.e2e.processes import RunningSpecd, draft_of, eventually, run_specd
from tests.security.rogue import Rogue, coordinator_of

OTHER = PROTOCOL + 1


def of_protocol(protocol: int, version: str) -> Callable[[DescribeResponse], object]:
    def describe(response: DescribeResponse) -> None:
        response.protocol, response.version = protocol, version

    return describe


async def come_back(worker: Rogue, coordinator: RunningSpecd, describe: Callable[[DescribeResponse], object]) -> None:
    """Let a worker go away, and come back with another description."""
    before = len(coordinator.lines)
    worker.describe = describe
    await worker.set_serving(False)
    await eventually(lambda: any("lost a worker" in line for line in coordinator.lines[before:]))
    await worker.set_serving(True)


@pytest.mark.parametrize(
    ("protocol", "version", "shown"),
    [
        (OTHER, "9.9.9", f"specd 9.9.9 and speaks protocol {OTHER}"),
        (0, "", "specd of an older version and speaks a protocol without a number"),
    ],
)
async def test_a_coordinator_refuses_a_worker_of_another_protocol(
    stack: Stack, tmp_path: Path, protocol: int, version: str, shown: str
) -> None:
    address = f"unix:{tmp_path / 'target'}"
    async with (
        Rogue("target", stack.target, address) as worker,
        coordinator_of(address, draft_of(stack).facts["address"]) as (coordinator, client, _),
    ):
        first = [response async for response in client.generate("def", max_tokens=4)]
        await come_back(worker, coordinator, of_protocol(protocol, version))
        words = f"the target worker at {address} is {shown}, and this process is specd {__version__}"
        await eventually(lambda: any(words in line for line in coordinator.lines))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            [response async for response in client.generate("def", max_tokens=4)]
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "TARGET_REFUSED" in (raised.value.details() or "")

        await come_back(worker, coordinator, of_protocol(PROTOCOL, "9.9.9"))  # another version of the same protocol
        await eventually(lambda: any('"version": "9.9.9"' in line for line in coordinator.lines))
        again = [response async for response in client.generate("def", max_tokens=4)]
        assert "".join(response.text for response in again) == "".join(response.text for response in first)


async def test_every_process_refuses_a_caller_of_another_protocol(stack: Stack) -> None:
    calls = {
        stack.address: lambda channel, **options: GenerationServiceStub(channel).GetModelInfo(
            GetModelInfoRequest(), **options
        ),
        stack.target.facts["address"]: lambda channel, **options: ModelServiceStub(channel).Describe(
            DescribeRequest(), **options
        ),
    }
    for address, call in calls.items():
        async with grpc.aio.insecure_channel(address) as channel:
            for metadata in ([], [(PROTOCOL_METADATA, str(PROTOCOL))]):
                answer = await call(channel, metadata=metadata)
                assert (answer.version, answer.protocol) == (__version__, PROTOCOL)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call(channel, metadata=[(PROTOCOL_METADATA, str(OTHER))])
        assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert error_info(raised.value).reason == "PROTOCOL_MISMATCH"
        assert f"the caller speaks protocol {OTHER}, and this process is specd {__version__}" in (
            raised.value.details() or ""
        )


async def test_a_stream_is_refused_too(stack: Stack) -> None:
    async with grpc.aio.insecure_channel(stack.address) as channel:
        stream = GenerationServiceStub(channel).Generate(
            GenerateRequest(text="def"), metadata=[(PROTOCOL_METADATA, str(OTHER))]
        )
        with pytest.raises(grpc.aio.AioRpcError, match="the caller speaks protocol"):
            [response async for response in stream]


def test_a_client_of_another_protocol_gets_the_words(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PROTOCOL", OTHER)
    with Client(stack.address) as client, pytest.raises(ProtocolMismatchError, match=f"speaks protocol {OTHER}, and"):
        client.generate("def", max_tokens=4).completion()


def test_every_process_logs_its_version(stack: Stack) -> None:
    assert run_specd("--version").stdout == f"specd {__version__}\n"
    with Client(stack.address) as client:
        assert client.describe().version == __version__
    done = run_specd("demo", SPECD_LOG_LEVEL="info", SPECD_LOG_FORMAT="json")
    entries = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    ready = {entry["process"]: entry["version"] for entry in entries if entry["event"] == "ready"}
    assert ready == dict.fromkeys(("draft-worker", "target-worker", "coordinator"), __version__)
