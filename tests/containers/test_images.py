"""The images and Compose projects of deploy/, on a real Docker engine."""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from openai import AsyncOpenAI

from specd.rpc.credentials import PLAIN, ClientCredentials
from specd.settings import DraftWorkerSettings, TargetWorkerSettings
from specd.v1 import generation_pb2
from tests.containers.compose import BUILD_SECONDS, ROOT, Project, docker, wait_until, why_not
from tests.e2e.processes import start_specd
from tests.raw_client import RawClient
from tests.unit.test_compose_files import port, services_of

DEPLOY = ROOT / "deploy"
SERVING = (ROOT / "docs" / "serving.md").read_text()
PROMPT = "def fibonacci(n):"
BIN = Path(sys.executable).parent
OURS = ("coordinator", "draft-worker", "target-worker", "gateway")
WORKERS = ("draft-worker", "target-worker")


@pytest.mark.parametrize("lock", sorted((DEPLOY / "locks").glob("*.lock")), ids=lambda path: path.stem)
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_locked_package_has_a_wheel_for_the_machine(lock: Path, machine: str, tmp_path: Path) -> None:
    options = ("--dry-run", "--no-deps", "--only-binary", ":all:", "--require-hashes", "--target", str(tmp_path))
    platform = ("--python-platform", f"{machine}-manylinux_2_36", "--python-version", "3.11")
    command = (BIN / "uv", "pip", "install", *options, *platform, "-r", lock)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Would install" in done.stderr


# -- Everything in containers, except Grafana


def documented(file: str, **variables: str) -> Project:
    """Return a project for a file that docs/serving.md starts in this way; skip the test where none can be started."""
    assert f"\ndocker compose -f {file} up\n" in SERVING
    if reason := why_not():
        pytest.skip(reason)
    return Project(file, **variables)


@pytest.fixture(scope="module")
def project() -> Iterator[Project]:
    """`docker compose -f deploy/compose.yaml up`."""
    project = documented("deploy/compose.yaml")
    try:
        project.up("gateway", "prometheus")
        yield project
    finally:
        project.down()


async def statistics_of(
    address: str, credentials: ClientCredentials = PLAIN, *, begun: asyncio.Event | None = None, **fields: Any
) -> Any:
    """Return the statistics of a completion; `begun` is set once there are tokens of it."""
    stop = generation_pb2.StopConditions(ignore_eos=True)
    response = generation_pb2.GenerateResponse()
    async with asyncio.timeout(60), RawClient(address, credentials) as client:
        async for response in client.generate(PROMPT, stop=stop, **fields):  # noqa: B007
            if begun is not None:
                begun.set()
    return response.statistics


async def test_a_client_outside_gets_a_completion(project: Project) -> None:
    statistics = await statistics_of(project.address, max_tokens=32, num_draft_tokens=4)
    assert statistics.generated_tokens == 32
    assert statistics.accepted_tokens > 0
    assert statistics.rounds_without_draft == 0


@pytest.mark.parametrize("service", [*OURS, "prometheus"])
def test_a_container_can_do_little(project: Project, service: str) -> None:
    status = dict(re.findall(r"^(\w+):\t(.*)$", project.execute(service, "cat", "/proc/self/status"), re.MULTILINE))
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    mounts = [line.split() for line in project.execute(service, "cat", "/proc/self/mounts").splitlines()]
    assert [options.split(",")[0] for _, directory, _, options, *_ in mounts if directory == "/"] == ["ro"]


@pytest.mark.parametrize("service", OURS)
def test_our_containers_are_nobody_and_write_nowhere_but_in_volumes(project: Project, service: str) -> None:
    code = """
import os, pathlib
def writable(directory):
    try:
        (pathlib.Path(directory) / "probe").touch()
        return True
    except OSError:
        return False
directories = ("/", "/tmp", "/opt/specd", "/home/specd", "/home/specd/.cache")
print(os.getuid(), os.getgid(), [directory for directory in directories if writable(directory)])
"""
    written = ["/home/specd/.cache"] if service in WORKERS else []
    assert project.python(service, code) == f"10001 10001 {written}"
    main_process = project.execute(service, "cat", "/proc/1/task/1/children").strip()
    assert f"specd\0{service}" in project.execute(service, "cat", f"/proc/{main_process}/cmdline")


def test_images_have_only_what_they_need(project: Project) -> None:
    code = """
import importlib.util, shutil
modules = ("mlx", "mlx_lm", "lief", "transformers", "pip", "hatchling", "pytest")
tools = ("gcc", "cc", "g++", "make", "git")
print([name for name in modules if importlib.util.find_spec(name)], [name for name in tools if shutil.which(name)])
"""
    assert project.python("coordinator", code) == "['mlx_lm', 'transformers'] []"  # mlx-lm for the gateway, without MLX
    assert project.python("target-worker", code) == "['mlx', 'mlx_lm', 'lief', 'transformers'] []"


def test_the_coordinator_renders_chats_without_what_only_workers_need(project: Project) -> None:
    code = """
from specd.text.chat import Chat, ChatTemplate
print(ChatTemplate("{{ messages[0].content }}").render(Chat(messages=({"role": "user", "content": "hello"},))))
"""
    assert project.python("coordinator", code) == "hello"


def test_a_worker_in_a_container_has_a_fast_blas(project: Project) -> None:
    (build,) = project.query('specd_build_info{process="target-worker"}')
    assert "OpenBLAS" in build["metric"]["device"]


async def test_openais_api_is_there(project: Project) -> None:
    client = AsyncOpenAI(base_url=f"http://127.0.0.1:{project.http_port}/v1", api_key="none", timeout=60)
    async with client:
        completion = await client.completions.create(model="", prompt=PROMPT, max_tokens=8, temperature=0)
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 8


def test_the_gateway_reads_tool_calls_without_mlx(project: Project) -> None:
    code = """
import json, sys
from gateway.reply.tool_parsers import load_parser
(call,) = load_parser("json_tools").parse('{"name": "f", "arguments": {"x": 1}}', [])
print(call.name, json.loads(call.arguments), "mlx" in sys.modules)
"""
    assert project.python("gateway", code) == "f {'x': 1} False"


def test_only_the_client_ports_are_published(project: Project) -> None:
    def published(service: str) -> dict[str, Any]:
        ports = json.loads(docker("inspect", "--format", "{{json .NetworkSettings.Ports}}", project.container(service)))
        return {name: hosts for name, hosts in ports.items() if hosts}

    assert published("coordinator") == {"50051/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(project.port)}]}
    assert published("gateway") == {"8080/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(project.http_port)}]}
    for service in (*WORKERS, "prometheus"):
        assert published(service) == {}


def test_workers_reach_nothing_outside(project: Project) -> None:
    def reaches_the_package_index(network: str) -> bool:
        image = services_of("compose.yaml")["target-worker"]["image"]
        download = ("download", "--quiet", "--no-deps", "--retries", "0", "--timeout", "10", "--dest", "/tmp", "six")
        command = ("docker", "run", "--rm", "--network", network, "--entrypoint", "pip", image, *download)
        return subprocess.run(command, capture_output=True, timeout=120, check=False).returncode == 0

    for worker in WORKERS:
        networks = docker("inspect", "--format", "{{json .NetworkSettings.Networks}}", project.container(worker))
        assert list(json.loads(networks)) == [f"{project.name}_workers"]
    assert not reaches_the_package_index(f"{project.name}_workers")
    assert reaches_the_package_index(f"{project.name}_outside")


ALL_UP = {"coordinator:9464": "1", "draft-worker:9465": "1", "target-worker:9466": "1"}
GATEWAY_UP = {"gateway:8080": "1"}


def scraped(project: Project) -> dict[str, str]:
    """Return the targets of Prometheus, without itself, and whether it reaches them."""
    return {sample["metric"]["instance"]: sample["value"][1] for sample in project.query('up{job!="prometheus"}')}


def test_prometheus_scrapes_every_process(project: Project) -> None:
    wait_until(lambda: scraped(project) == ALL_UP | GATEWAY_UP)
    assert {sample["metric"]["process"] for sample in project.query("specd_build_info")} == {
        *("coordinator", "gateway"),
        *WORKERS,
    }


async def test_a_killed_draft_worker_comes_back_and_drafts(project: Project) -> None:
    container = project.container("draft-worker")
    project.python("draft-worker", "import os; os.kill(int(open('/proc/1/task/1/children').read()), 9)")
    without = await statistics_of(project.address, max_tokens=8, num_draft_tokens=4)
    assert without.generated_tokens == 8
    assert without.rounds_without_draft > 0

    def restarts() -> int:
        return int(docker("inspect", "--format", "{{.RestartCount}}", container))

    await asyncio.to_thread(wait_until, lambda: restarts() == 1)
    async with asyncio.timeout(120):
        while (again := await statistics_of(project.address, max_tokens=8, num_draft_tokens=4)).rounds_without_draft:  # noqa: ASYNC110
            await asyncio.sleep(0.5)
    assert again.accepted_tokens > 0


def test_models_are_downloaded_by_a_container_of_its_own(project: Project) -> None:
    help_text = project.compose("run", "--rm", "download", "--help")
    assert "hf download" in help_text


async def test_a_stop_lets_sessions_finish_and_a_removal_leaves_nothing(project: Project) -> None:
    """The last test of this project."""
    before = await statistics_of(project.address, max_tokens=16, num_draft_tokens=0)
    three_seconds = int(3 * before.generated_tokens / before.decode_seconds)  # of the ten that the coordinator waits
    begun = asyncio.Event()
    running = asyncio.ensure_future(
        statistics_of(project.address, begun=begun, max_tokens=three_seconds, num_draft_tokens=0)
    )
    await asyncio.wait_for(begun.wait(), timeout=60)
    await asyncio.to_thread(project.compose, "stop")
    assert (await running).generated_tokens == three_seconds
    assert {service: project.state(service)["ExitCode"] for service in OURS} == dict.fromkeys(OURS, 0)
    assert project.left()
    project.down()
    assert project.left() == []


async def test_look_up_alone_serves_without_a_draft_worker() -> None:
    project = documented("deploy/compose.lookup.yaml")
    try:
        await asyncio.to_thread(project.up, "gateway", "prometheus")
        statistics = await statistics_of(project.address, max_tokens=64, num_draft_tokens=4)
        assert statistics.sources["lookup"].accepted == statistics.accepted_tokens > 0
        expected = {service: value for service, value in ALL_UP.items() if service != "draft-worker:9465"}
        await asyncio.to_thread(wait_until, lambda: scraped(project) == expected | GATEWAY_UP)
    finally:
        await asyncio.to_thread(project.down)
    assert project.left() == []


async def test_with_tls_clients_show_a_token_and_processes_their_certificates(tmp_path: Path) -> None:
    project = documented("deploy/compose.tls.yaml", SPECD_CERTS=str(tmp_path / "tls"))
    if os.geteuid() != 0:
        pytest.skip("only root can give files to the users of containers")
    (block,) = [each for each in re.findall(r"```sh\n(.*?)```", SERVING, re.DOTALL) if "compose.tls.yaml" in each]
    commands = block.replace(f"docker compose -f {project.file} up\n", "").replace("deploy/tls", "tls")
    image = services_of("compose.tls.yaml")["prometheus"]["image"]
    user = docker("run", "--rm", "--entrypoint", "id", image, "-u").strip()  # 65534, but for images that stand in
    commands = commands.replace("65534", user).replace("sudo ", "").replace("specd ", f"{sys.executable} -m specd ")
    made = await asyncio.to_thread(
        subprocess.run,
        ["bash", "-euc", commands],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    (token,) = re.findall(r"specd_[\w-]{20,}", made.stdout)
    trusting = ClientCredentials(tmp_path / "certs" / "ca.crt")
    try:
        await asyncio.to_thread(project.up, "coordinator", "gateway", "prometheus")
        statistics = await statistics_of(
            project.address, ClientCredentials(trusting.ca, token=token), max_tokens=32, num_draft_tokens=4
        )
        assert statistics.accepted_tokens > 0
        for given, code in ((trusting, grpc.StatusCode.UNAUTHENTICATED), (PLAIN, grpc.StatusCode.UNAVAILABLE)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await statistics_of(project.address, given, max_tokens=1)
            assert refused.value.code() is code
        url = f"https://localhost:{project.http_port}/v1/models"
        context = ssl.create_default_context(cafile=tmp_path / "certs" / "ca.crt")
        async with httpx2.AsyncClient(verify=context) as http:
            assert (await http.get(url)).status_code == 401
            assert (await http.get(url, headers={"authorization": f"Bearer {token}"})).status_code == 200
        await asyncio.to_thread(wait_until, lambda: scraped(project) == ALL_UP)
    finally:
        await asyncio.to_thread(project.down)
    assert project.left() == []


# -- Workers outside of containers


async def test_native_workers_serve_a_coordinator_in_a_container() -> None:
    project = documented("deploy/compose.native.yaml")
    try:
        await asyncio.to_thread(project.compose, "build", "coordinator", timeout_seconds=BUILD_SECONDS)
        lookup = ("python3", "-c", "import socket; print(socket.gethostbyname('host'))")
        image = services_of("compose.native.yaml")["coordinator"]["image"]
        run = ("run", "--rm", "--add-host", "host:host-gateway", "--entrypoint", lookup[0], image, *lookup[1:])
        host = docker(*run).strip()

        def listen(worker: type[DraftWorkerSettings | TargetWorkerSettings]) -> tuple[str, ...]:
            options = {name: worker.model_fields[name].default for name in ("listen", "metrics_listen")}
            return "--insecure", *(
                f"--{name.replace('_', '-')}={host}:{port(address)}" for name, address in options.items()
            )

        async with (
            start_specd("draft-worker", *listen(DraftWorkerSettings)) as draft,
            start_specd("target-worker", *listen(TargetWorkerSettings)) as target,
        ):
            await draft.next_event("ready")
            await target.next_event("ready")
            await asyncio.to_thread(project.up, "coordinator", "prometheus")
            statistics = await statistics_of(project.address, max_tokens=32, num_draft_tokens=4)
            assert statistics.accepted_tokens > 0
            await asyncio.to_thread(wait_until, lambda: scraped(project) == ALL_UP)
    finally:
        await asyncio.to_thread(project.down)
    assert project.left() == []
