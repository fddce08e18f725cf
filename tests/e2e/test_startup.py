"""Problems at start-up: each process reports them in a line, or reports its wait and continues by itself."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from specd.errors import error_info
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from specd.v1 import generation_pb2
from specd.v1.generation_pb2 import SessionStatistics
from tests.e2e.processes import complaint, processes_mentioning, run_specd, start_specd
from tests.raw_client import RawClient
from tests.thorough import examples
from tests.worker.models import save_foreign_draft

WORKERS = ["draft-worker", "target-worker"]


def refused_start(*arguments: str) -> str:
    """Run a command that must not start; return what it says about it."""
    done = run_specd(*arguments)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    return complaint(done.stderr)


# -- Models


def test_a_worker_refuses_a_model_in_one_line(tmp_path: Path) -> None:
    """tests/worker/test_unservable_models.py has the refused models."""
    (tmp_path / "model").write_text("weights")
    model = str(tmp_path / "model")
    message = refused_start("draft-worker", "--model", model, "--listen", f"unix:{tmp_path}/s", "--metrics-listen", "")
    assert f"{model} is a file: name the directory" in message


@pytest.mark.parametrize("worker", examples(WORKERS, 1))
def test_a_repository_that_cannot_be_had(worker: str) -> None:
    message = refused_start(worker, "--model", "nobody/nothing", "--listen", "127.0.0.1:0", "--metrics-listen", "")
    assert "nobody/nothing is not a local directory" in message
    assert "Hugging Face" in message


# -- Addresses


@pytest.fixture
def port_in_use() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


COMMANDS = ["draft-worker", "coordinator", "target-worker"]


@pytest.mark.parametrize("command", examples(COMMANDS, 2))
def test_a_port_in_use(command: str, port_in_use: int) -> None:
    address = f"127.0.0.1:{port_in_use}"
    message = refused_start(command, "--listen", address, "--metrics-listen", "")
    assert f"cannot listen at {address}" in message
    assert "choose another" in message


@pytest.mark.parametrize("command", examples(COMMANDS, 2))
def test_a_metrics_port_in_use(command: str, port_in_use: int) -> None:
    address = f"127.0.0.1:{port_in_use}"
    message = refused_start(command, "--listen", "127.0.0.1:0", "--metrics-listen", address)
    assert f"cannot serve metrics at {address}" in message
    assert "set --metrics-listen to another address" in message


async def test_a_unix_socket_in_use(stack: Stack, client: RawClient) -> None:
    address = stack.target.facts["address"]
    message = refused_start("draft-worker", "--listen", address, "--metrics-listen", "")
    assert f"cannot listen at {address}: it is in use" in message
    assert [response async for response in client.generate("import", max_tokens=1)]  # it still has its socket


async def test_a_unix_socket_left_behind_by_a_dead_process_is_used_again(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(tmp_path / "socket"))
    async with start_specd("draft-worker", "--listen", f"unix:{tmp_path}/socket", "--metrics-listen", "") as worker:
        await worker.next_event("ready")


BAD_ADDRESSES = ["nonsense", "127.0.0.1", ":50051", "127.0.0.1:-1", "127.0.0.1:²", "unix:", ""]


@pytest.mark.parametrize("address", examples(BAD_ADDRESSES, 2))
def test_a_malformed_address(address: str) -> None:
    message = refused_start("coordinator", "--listen", address)
    assert f"--listen: {address!r} is not an address: write HOST:PORT or unix:PATH" in message


@pytest.mark.parametrize("option", examples(["metrics-listen", "draft", "target"], 1))
def test_the_malformed_address_is_named_by_its_setting(option: str) -> None:
    message = refused_start("coordinator", f"--{option}", "nonsense")
    assert f"--{option}: 'nonsense'" in message


@pytest.mark.parametrize(
    ("path", "named"),
    [
        pytest.param("{directory}/missing/socket", "there is no directory {directory}/missing", id="no directory"),
        pytest.param("{directory}/" + 100 * "x", "the path is longer than", id="too long"),
        pytest.param("{directory}/file", "cannot listen at unix:{directory}/file", id="a file"),
    ],
)
def test_a_socket_path_that_cannot_be(path: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    message = refused_start("coordinator", "--listen", f"unix:{path.format(directory=tmp_path)}")
    assert named.format(directory=tmp_path) in message
    assert (tmp_path / "file").read_text() == "precious"


# -- Draft and target that do not fit


@pytest.fixture(scope="module")
def draft_of_another_family(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The embedded draft with two entries of its vocabulary swapped."""
    return save_foreign_draft(tmp_path_factory.mktemp("models") / "other-family")


def assert_names_the_difference(message: str, draft: str) -> None:
    assert f"the draft {draft}" in message
    assert f"the target {EMBEDDED_TARGET}" in message
    assert "different tokenizers" in message
    assert "token 'return'" in message or "token 'import'" in message


async def test_the_coordinator_refuses_a_draft_with_another_tokenizer(
    stack: Stack, draft_of_another_family: str, tmp_path: Path
) -> None:
    address = f"unix:{tmp_path}/draft"
    worker = ["draft-worker", "--model", draft_of_another_family, "--listen", address, "--metrics-listen", ""]
    async with start_specd(*worker) as draft:
        await draft.next_event("ready")
        target = stack.target.facts["address"]
        message = refused_start(
            *("coordinator", "--target", target, "--draft", address, "--listen", f"unix:{tmp_path}/coordinator"),
            *("--metrics-listen", ""),
        )
    assert_names_the_difference(message, draft_of_another_family)


def test_up_refuses_a_draft_with_another_tokenizer_and_leaves_nothing(
    draft_of_another_family: str, tmp_path: Path
) -> None:
    done = run_specd(
        *("up", "--draft", draft_of_another_family, "--listen", "127.0.0.1:0", "--no-metrics"),
        TMPDIR=str(tmp_path),  # where the workers' sockets are
    )
    assert done.returncode == 2
    assert_names_the_difference(complaint(done.stderr), draft_of_another_family)
    assert processes_mentioning(str(tmp_path)) == {}
    assert list(tmp_path.glob("specd-*")) == []


@pytest.mark.parametrize("role", ["draft", "target"])
async def test_the_coordinator_refuses_a_worker_of_the_other_kind(stack: Stack, tmp_path: Path, role: str) -> None:
    assert stack.draft is not None
    addresses = {"target": stack.target.facts["address"], "draft": stack.draft.facts["address"]}
    addresses[role] = addresses["draft" if role == "target" else "target"]
    message = refused_start(
        *("coordinator", "--target", addresses["target"], "--draft", addresses["draft"]),
        *("--listen", f"unix:{tmp_path}/coordinator", "--metrics-listen", ""),
    )
    assert f"at {addresses[role]} is not a {role} worker" in message


# -- Workers that come late


async def health_of(client: RawClient) -> int:
    response = await cast(Any, health_pb2_grpc.HealthStub(client.channel)).Check(health_pb2.HealthCheckRequest())
    return int(response.status)


async def statistics_of_a_completion(client: RawClient) -> SessionStatistics:
    responses = [response async for response in client.generate("def add(a, b):", max_tokens=12, num_draft_tokens=4)]
    assert responses[-1].statistics.generated_tokens == 12
    return responses[-1].statistics


def retry_delay(error: grpc.aio.AioRpcError) -> float:
    retry = error_details_pb2.RetryInfo()
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None
    assert any(detail.Unpack(retry) for detail in status.details)
    return retry.retry_delay.ToTimedelta().total_seconds()


async def test_the_coordinator_waits_for_its_target(tmp_path: Path) -> None:
    target, own = f"unix:{tmp_path}/target", f"unix:{tmp_path}/coordinator"
    options = ["--target", target, "--draft", "", "--listen", own, "--metrics-listen", ""]
    async with start_specd("coordinator", *options) as coordinator, RawClient(own) as client:
        await coordinator.next_event("waiting for a worker", worker="target", address=target)
        assert await health_of(client) == health_pb2.HealthCheckResponse.NOT_SERVING
        for call in (statistics_of_a_completion, RawClient.model_info):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call(client)
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
            assert error_info(raised.value).reason == "STARTING"
            assert "the target worker" in (raised.value.details() or "")
            assert retry_delay(raised.value) > 0

        # The coordinator watches the worker as long as it runs, and the worker must not wait for that to end.
        worker = ["target-worker", "--listen", target, "--metrics-listen", "", "--shutdown-grace-seconds", "3600"]
        async with start_specd(*worker) as running_worker:
            await coordinator.next_event("ready")
            assert await health_of(client) == health_pb2.HealthCheckResponse.SERVING
            await statistics_of_a_completion(client)
            assert (await client.model_info()).draft_fault == "DRAFT_NOT_CONFIGURED"

            assert await running_worker.stop(signal.SIGTERM) == 0
            assert "Traceback" not in "".join(running_worker.lines)
            await coordinator.next_event("lost a worker")
            assert await health_of(client) == health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("number", examples([signal.SIGTERM, signal.SIGINT], 1))
async def test_a_signal_ends_the_wait_for_a_worker(tmp_path: Path, number: signal.Signals) -> None:
    options = ["--target", f"unix:{tmp_path}/target", "--listen", f"unix:{tmp_path}/own", "--metrics-listen", ""]
    async with start_specd("coordinator", *options) as coordinator:
        await coordinator.next_event("waiting for a worker")
        assert await coordinator.stop(number) == 0
        assert "Traceback" not in "".join(coordinator.lines)


async def test_without_a_draft_the_coordinator_serves_until_it_comes(stack: Stack, tmp_path: Path) -> None:
    draft, own = f"unix:{tmp_path}/draft", f"unix:{tmp_path}/coordinator"
    options = ["--target", stack.target.facts["address"], "--draft", draft, "--draft-startup-seconds", "0.2"]
    options += ["--listen", own, "--metrics-listen", ""]
    async with start_specd("coordinator", *options) as coordinator, RawClient(own) as client:
        await coordinator.next_event("ready")
        assert await health_of(client) == health_pb2.HealthCheckResponse.SERVING
        info = await client.model_info()
        assert info.draft_fault == "DRAFT_UNAVAILABLE"
        assert not info.HasField("draft")
        statistics = await statistics_of_a_completion(client)
        assert statistics.proposed_tokens == 0
        assert statistics.rounds_without_draft > 0
        assert statistics.draft_fault == "DRAFT_UNAVAILABLE"

        async with start_specd("draft-worker", "--listen", draft, "--metrics-listen", ""):
            await coordinator.next_event("connected", worker="draft")
            info = await client.model_info()
            assert info.draft_fault == ""
            assert info.draft.name == Path(EMBEDDED_DRAFT).name
            statistics = await statistics_of_a_completion(client)
            assert statistics.proposed_tokens > 0
            assert statistics.rounds_without_draft == 0


async def test_a_stop_waits_for_generations_and_then_hands_them_back(
    stack: Stack, client: RawClient, tmp_path: Path
) -> None:
    own = f"unix:{tmp_path}/coordinator"
    options = ["--target", stack.target.facts["address"], "--draft", "", "--shutdown-grace-seconds", "3"]
    options += ["--listen", own, "--metrics-listen", ""]
    async with start_specd("coordinator", *options) as coordinator, RawClient(own) as own_client:
        await coordinator.next_event("ready")
        short, long = (
            aiter(own_client.generate(PROMPT_IDS, max_tokens=count, stop=WHATEVER_COMES)) for count in (6, 1900)
        )
        responses = [await anext(call) for call in (short, long)]
        os.kill(coordinator.pid, signal.SIGTERM)

        assert [response async for response in short][-1].finish_reason == generation_pb2.FINISH_REASON_LENGTH
        token_ids = [token.id for token in responses[1].tokens]
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for response in long:
                token_ids += [token.id for token in response.tokens]
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert error_info(raised.value).reason == "STOPPING"
        assert retry_delay(raised.value) > 0
        assert await coordinator.exit_code() == 0
        assert "Traceback" not in "".join(coordinator.lines)

    # The received tokens are right, and a continuation elsewhere gives the text of one generation.
    whole = await tokens_of(client, PROMPT_IDS, len(token_ids) + 10)
    assert token_ids + await tokens_of(client, PROMPT_IDS + token_ids, 10) == whole


PROMPT_IDS = list(range(300, 320))
WHATEVER_COMES = generation_pb2.StopConditions(ignore_eos=True)


async def tokens_of(client: RawClient, prompt: list[int], max_tokens: int) -> list[int]:
    responses = client.generate(prompt, max_tokens=max_tokens, stop=WHATEVER_COMES)
    return [token.id async for response in responses for token in response.tokens]
