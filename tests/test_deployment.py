"""What is in deploy/: images, Compose projects, launchd agents.

The tests marked `containers` need a Docker engine, and start everything there for real.
"""

from __future__ import annotations

import asyncio
import json
import plistlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from specd import __version__
from specd.client import Client
from specd.settings import CoordinatorSettings, DraftWorkerSettings, TargetWorkerSettings, UpSettings
from specd.v1 import generation_pb2
from tests.compose import BUILD_SECONDS, ROOT, Project, docker, wait_until, why_not
from tests.processes import complaint, run_specd, start_specd

DEPLOY = ROOT / "deploy"
README = (ROOT / "README.md").read_text()
PROMPT = "def fibonacci(n):"
BIN = Path(sys.executable).parent
OURS = ("coordinator", "draft-worker", "target-worker")
WORKERS = ("draft-worker", "target-worker")


# -- The files


def services_of(file: str) -> dict[str, dict[str, Any]]:
    """Return the services of a compose file, with what they extend."""
    return {name: service_of(file, name) for name in read(file)["services"]}


def service_of(file: str, name: str) -> dict[str, Any]:
    service: dict[str, Any] = read(file)["services"][name]
    base = service.get("extends")
    return {**service_of(base.get("file", file), base["service"]), **service} if base else service


def read(file: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((DEPLOY / file).read_text())
    return content


def port(address: str) -> str:
    return address.rpartition(":")[2]


def test_compose_files_fit_the_schema() -> None:
    files = sorted(map(str, DEPLOY.glob("*.yaml")))
    assert len(files) == 4
    command = [BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("file", ["compose.yaml", "compose.native.yaml"])
def test_every_service_is_hardened(file: str) -> None:
    longest = max(s.model_fields["shutdown_grace_seconds"].default for s in (CoordinatorSettings, TargetWorkerSettings))
    for name, service in services_of(file).items():
        assert service["init"] is True, name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["restart"] == ("no" if name == "download" else "unless-stopped"), name
        assert int(service["stop_grace_period"].removesuffix("s")) > longest, name
        assert re.fullmatch(r"[a-z/-]+:v?\d+\.\d+\.\d+", service["image"]), name
        assert not service["image"].startswith("specd-") or service["image"].endswith(f":{__version__}"), name


@pytest.mark.parametrize("file", ["compose.yaml", "compose.native.yaml"])
def test_only_clients_and_dashboards_get_in_and_from_this_machine_only(file: str) -> None:
    published = {name: service["ports"] for name, service in services_of(file).items() if "ports" in service}
    assert published == {
        "coordinator": ["127.0.0.1:${SPECD_PORT}:50051"],
        "grafana": ["127.0.0.1:${SPECD_GRAFANA_PORT}:3000"],
    }


def test_the_settings_that_are_there_to_be_edited_are_those_of_the_readme() -> None:
    lines = [line for line in (DEPLOY / ".env").read_text().splitlines() if line and not line.startswith("#")]
    values = dict(line.split("=") for line in lines)
    assert (values.pop("SPECD_TARGET"), values.pop("SPECD_DRAFT")) == ("", "")  # the included pair
    assert values.pop("SPECD_PORT") == port(UpSettings.model_fields["listen"].default)
    assert f"<http://127.0.0.1:{values.pop('SPECD_GRAFANA_PORT')}>" in README
    assert values == {"COMPOSE_PROJECT_NAME": "specd"}
    used = {name for file in DEPLOY.glob("*.yaml") for name in re.findall(r"\$\{(\w+)", file.read_text())}
    assert used == {"SPECD_TARGET", "SPECD_DRAFT", "SPECD_PORT", "SPECD_GRAFANA_PORT"}


def test_workers_are_in_a_network_without_a_way_out() -> None:
    for worker in WORKERS:
        assert services_of("compose.yaml")[worker]["networks"] == ["workers"]
    assert read("compose.yaml")["networks"]["workers"] == {"internal": True}


def test_addresses_have_the_ports_that_processes_listen_on() -> None:
    """Also outside of containers, where the native variant expects the workers."""
    draft, target, coordinator = (
        {name: port(s.model_fields[name].default) for name in ("listen", "metrics_listen")}
        for s in (DraftWorkerSettings, TargetWorkerSettings, CoordinatorSettings)
    )
    assert services_of("compose.yaml")["coordinator"]["environment"] == {
        "SPECD_COORDINATOR_DRAFT": f"draft-worker:{draft['listen']}",
        "SPECD_COORDINATOR_TARGET": f"target-worker:{target['listen']}",
    }
    listening = dict(re.findall(r"SPECD_(\w+_LISTEN)=0\.0\.0\.0:(\d+)", (DEPLOY / "Dockerfile").read_text()))
    assert listening == {
        f"{process}_{name.upper()}": number
        for process, ports in (("DRAFT_WORKER", draft), ("TARGET_WORKER", target), ("COORDINATOR", coordinator))
        for name, number in ports.items()
    }


def test_cuda_workers_have_a_gpu_and_the_image_for_it() -> None:
    services = services_of("compose.cuda.yaml")
    for worker in WORKERS:
        (device,) = services[worker]["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    images = {name: service["image"] for name, service in services.items()}
    assert images == dict.fromkeys((*WORKERS, "download"), f"specd-worker-cuda:{__version__}")


def locked(path: Path) -> dict[str, set[str]]:
    """Return the versions of each package in a lock; there can be one for each version of Python."""
    versions: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)==([\w.]+)", path.read_text(), re.MULTILINE):
        versions.setdefault(name, set()).add(version)
    return versions


def test_images_have_what_pyproject_asks_for_in_the_versions_that_are_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tested = locked(ROOT / "requirements.lock")
    locks = {name: locked(DEPLOY / "locks" / f"{name}.lock") for name in ("coordinator", "worker", "worker-cuda")}

    for requirement in map(Requirement, project["dependencies"]):
        (version,) = locks["worker"][requirement.name]
        assert requirement.specifier.contains(version)
    assert locks["worker"].items() <= tested.items()

    for_workers = {"mlx", "mlx-cpu", "mlx-metal", "mlx-lm", "sentencepiece", "scipy-openblas32", "lief", "hf-xet"}
    for_tracing = {name: v for name, v in locks["coordinator"].items() if name.startswith("opentelemetry-")}
    assert for_tracing
    assert for_tracing.items() <= tested.items()
    common = {name: v for name, v in locks["worker"].items() if name not in for_workers}
    assert locks["coordinator"] == {**common, **for_tracing}

    assert "mlx-cpu" not in locks["worker-cuda"]
    assert locks["worker-cuda"]["mlx-cuda-13"] == locks["worker-cuda"]["mlx"] == tested["mlx"]
    missing = {name for name in locks["worker"] if name not in locks["worker-cuda"]}
    assert missing == {"mlx-cpu"}


# -- launchd


@pytest.mark.parametrize("worker", WORKERS)
def test_launchd_starts_a_worker_as_the_readme_installs_it(worker: str, tmp_path: Path) -> None:
    (line,) = re.findall(r"^ *(sed .*\.plist) > \S+$", README, re.MULTILINE)
    script = f"worker={worker}; {line}"
    environment = {"HOME": str(tmp_path), "PATH": f"{BIN}:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-euc", script], cwd=ROOT, env=environment, capture_output=True, timeout=60, check=True
    )
    agent = plistlib.loads(done.stdout)
    assert agent.pop("ProgramArguments")[:2] == [str(BIN / "specd"), worker]
    assert agent == {
        "Label": f"specd.{worker}",
        "KeepAlive": True,
        "ProcessType": "Interactive",
        "StandardErrorPath": f"{tmp_path}/Library/Logs/specd.{worker}.log",
    }


@pytest.mark.parametrize("worker", WORKERS)
def test_the_command_line_takes_what_launchd_gives_it(worker: str, tmp_path: Path) -> None:
    agent = plistlib.loads((DEPLOY / "launchd" / f"specd.{worker}.plist").read_bytes())
    _, *arguments = agent["ProgramArguments"]
    assert arguments[-1] in README
    elsewhere = ("--listen", f"unix:{tmp_path}/worker", "--metrics-listen", "none")
    # It comes as far as the download, which tests have no way to.
    done = run_specd(*arguments, *elsewhere, HF_HOME=str(tmp_path), OPENBLAS_NUM_THREADS="1")
    assert done.returncode == 2
    assert f"{arguments[-1]}, and the Hugging Face repository cannot be had" in complaint(done.stderr)


# -- Images


@pytest.mark.containers
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


def documented(file: str) -> Project:
    """Return a project for a file that the README starts in this way; skip the test where none can be started."""
    assert f"\ndocker compose -f {file} up\n" in README
    if reason := why_not():
        pytest.skip(reason)
    return Project(file)


@pytest.fixture(scope="module")
def project() -> Iterator[Project]:
    """`docker compose -f deploy/compose.yaml up`."""
    project = documented("deploy/compose.yaml")
    try:
        project.up("coordinator", "prometheus")
        yield project
    finally:
        project.down()


async def statistics_of(address: str, *, begun: asyncio.Event | None = None, **fields: Any) -> Any:
    """Return the statistics of a completion; `begun` is set once there are tokens of it."""
    stop = generation_pb2.StopConditions(ignore_eos=True)
    response = generation_pb2.GenerateResponse()
    async with asyncio.timeout(60), Client(address) as client:
        async for response in client.generate(PROMPT, stop=stop, **fields):  # noqa: B007
            if begun is not None:
                begun.set()
    return response.statistics


@pytest.mark.containers
async def test_a_client_outside_gets_a_completion(project: Project) -> None:
    statistics = await statistics_of(project.address, max_tokens=32, num_draft_tokens=4)
    assert statistics.generated_tokens == 32
    assert statistics.accepted_tokens > 0
    assert statistics.rounds_without_draft == 0


@pytest.mark.containers
@pytest.mark.parametrize("service", [*OURS, "prometheus"])
def test_a_container_can_do_little(project: Project, service: str) -> None:
    status = dict(re.findall(r"^(\w+):\t(.*)$", project.execute(service, "cat", "/proc/self/status"), re.MULTILINE))
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    mounts = [line.split() for line in project.execute(service, "cat", "/proc/self/mounts").splitlines()]
    assert [options.split(",")[0] for _, directory, _, options, *_ in mounts if directory == "/"] == ["ro"]


@pytest.mark.containers
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


@pytest.mark.containers
def test_images_have_only_what_they_need(project: Project) -> None:
    code = """
import importlib.util, shutil
modules = ("mlx", "mlx_lm", "lief", "transformers", "pip", "hatchling", "pytest")
tools = ("gcc", "cc", "g++", "make", "git")
print([name for name in modules if importlib.util.find_spec(name)], [name for name in tools if shutil.which(name)])
"""
    assert project.python("coordinator", code) == "['transformers'] []"
    assert project.python("target-worker", code) == "['mlx', 'mlx_lm', 'lief', 'transformers'] []"


@pytest.mark.containers
def test_the_coordinator_renders_chats_without_what_only_workers_need(project: Project) -> None:
    code = """
from coordinator.chat import Chat, ChatTemplate
print(ChatTemplate("{{ messages[0].content }}").render(Chat(messages=({"role": "user", "content": "hello"},))))
"""
    assert project.python("coordinator", code) == "hello"


@pytest.mark.containers
def test_a_worker_in_a_container_has_a_fast_blas(project: Project) -> None:
    (build,) = project.query('specd_build_info{process="target-worker"}')
    assert "OpenBLAS" in build["metric"]["device"]


@pytest.mark.containers
def test_only_the_client_port_is_published(project: Project) -> None:
    def published(service: str) -> dict[str, Any]:
        ports = json.loads(docker("inspect", "--format", "{{json .NetworkSettings.Ports}}", project.container(service)))
        return {name: hosts for name, hosts in ports.items() if hosts}

    assert published("coordinator") == {"50051/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(project.port)}]}
    for service in (*WORKERS, "prometheus"):
        assert published(service) == {}


@pytest.mark.containers
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


def scraped(project: Project) -> dict[str, str]:
    """Return what Prometheus scrapes besides itself, and whether it can."""
    return {sample["metric"]["instance"]: sample["value"][1] for sample in project.query('up{job!="prometheus"}')}


@pytest.mark.containers
def test_prometheus_scrapes_every_process(project: Project) -> None:
    wait_until(lambda: scraped(project) == ALL_UP)
    assert {sample["metric"]["process"] for sample in project.query("specd_build_info")} == set(OURS)


@pytest.mark.containers
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


@pytest.mark.containers
def test_models_are_downloaded_by_a_container_of_its_own(project: Project) -> None:
    help_text = project.compose("run", "--rm", "download", "--help")
    assert "hf download" in help_text


@pytest.mark.containers
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


# -- Workers outside of containers


@pytest.mark.containers
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
            return tuple(f"--{name.replace('_', '-')}={host}:{port(address)}" for name, address in options.items())

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
