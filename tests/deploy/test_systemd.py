"""systemd reads the units, and the processes start with their command lines and variables."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from specd.cli.health import health_of
from specd.coordinator_settings import CoordinatorSettings
from specd.gateway_settings import GatewaySettings
from specd.settings import DraftWorkerSettings, TargetWorkerSettings
from tests.deploy.chart import ROOT
from tests.e2e.processes import start_specd

UNITS = ROOT / "deploy" / "systemd"
COMMON = UNITS / "specd-.service.d" / "common.conf"
BIN = Path(sys.executable).parent
SERVICES = {
    "specd-up": "specd-up",
    "specd-coordinator": "specd-coordinator",
    "specd-gateway": "specd-gateway",
    "specd-worker@target": "specd-worker@",
    "specd-worker@draft": "specd-worker@",
}


def read(*paths: Path) -> configparser.RawConfigParser:
    """Return what unit files set together; of a setting that is there twice, the last one."""
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(paths)
    return parser


def command_of(service: str) -> list[str]:
    """Return the command of a service, without its program."""
    line = read(UNITS / f"{SERVICES[service]}.service")["Service"]["ExecStart"]
    program, *arguments = shlex.split(line.replace("%i", service.partition("@")[2]))
    assert program == "/opt/specd/bin/specd"
    return arguments


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The units, with the program of this machine."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze")
    directory = tmp_path_factory.mktemp("units")
    shutil.copytree(UNITS, directory, dirs_exist_ok=True)
    for path in directory.glob("*.service"):
        path.write_text(path.read_text().replace("/opt/specd/bin", str(BIN)))
    return directory


def analyze(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"SYSTEMD_UNIT_PATH": f"{directory}:", "PATH": "/usr/bin:/bin"}
    command = ["systemd-analyze", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("service", SERVICES)
def test_systemd_finds_nothing_wrong(service: str, installed: Path) -> None:
    done = analyze(installed, "verify", f"{installed}/{service}.service")
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_systemd_reads_what_the_units_have_in_common(installed: Path, tmp_path: Path) -> None:
    """So the test above would see a mistake there."""
    shutil.copytree(installed, tmp_path, dirs_exist_ok=True)
    broken = tmp_path / "specd-.service.d" / "common.conf"
    broken.write_text(broken.read_text().replace("ProtectSystem=strict", "ProtectSystem=mostly"))
    done = analyze(tmp_path, "verify", f"{tmp_path}/specd-worker@draft.service")
    assert "mostly" in done.stderr


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_can_do_little(service: str, installed: Path) -> None:
    """By systemd's score, which is 10 for a service without restrictions."""
    done = analyze(
        installed, "security", "--offline=true", "--threshold=20", f"{installed}/{SERVICES[service]}.service"
    )
    assert done.returncode == 0, done.stdout[-300:]


def test_a_stop_has_the_time_for_a_drain() -> None:
    processes = (CoordinatorSettings, GatewaySettings, TargetWorkerSettings, DraftWorkerSettings)
    graces = [process.model_fields["shutdown_grace_seconds"].default for process in processes]
    common = read(COMMON)["Service"]
    assert float(common["TimeoutStopSec"]) > max(graces) + 5
    assert common["KillMode"] == "mixed"  # SIGTERM for the process alone, which ends its own children
    assert float(read(COMMON, UNITS / "specd-up.service")["Service"]["TimeoutStopSec"]) > sum(graces) + 20


def test_directories_are_those_of_the_variables() -> None:
    common = read(COMMON)["Service"]
    assert shlex.split(common["Environment"]) == ["XDG_CACHE_HOME=%C", "HF_HOME=%C/specd/huggingface"]
    assert common["CacheDirectory"] == common["StateDirectory"] == "specd"
    (user,) = re.findall(r"^u (\S+) ", (UNITS / "specd.sysusers").read_text(), re.MULTILINE)
    assert common["User"] == user


async def test_the_processes_start_with_the_commands_of_the_units(tmp_path: Path) -> None:
    """Under the addresses of their settings, which another specd of this machine may have."""
    sockets = {name: f"unix:{tmp_path}/{name}" for name in ("target-worker", "draft-worker", "coordinator")}
    settings = tmp_path / "specd.toml"
    lines = [f'[{name}]\nlisten = "{socket}"\nmetrics_listen = "none"\n' for name, socket in sockets.items()]
    targets = f'target = "{sockets["target-worker"]}"\ndraft = "{sockets["draft-worker"]}"\n'
    gateway = f'[gateway]\nlisten = "127.0.0.1:0"\ncoordinator = "{sockets["coordinator"]}"\n'
    settings.write_text("".join([*lines, targets, gateway]))
    # The unit's working directory has the settings. Here they are named, and the cache is the one of this machine.
    services = ("specd-worker@target", "specd-worker@draft", "specd-coordinator", "specd-gateway")
    async with AsyncExitStack() as stack:
        running = [
            await stack.enter_async_context(start_specd(*command_of(service), SPECD_CONFIG=str(settings)))
            for service in services
        ]
        for process in running:
            await process.next_event("ready")
        assert await health_of(sockets["coordinator"], "", 10.0) == "SERVING"
        for process in reversed(running):
            assert await process.stop(signal.SIGTERM) == 0
