"""The files of deploy/ for Docker Compose fit each other, the settings, and docs/serving.md."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from specd.coordinator_settings import CoordinatorSettings
from specd.gateway_settings import GatewaySettings
from specd.settings import DraftWorkerSettings, TargetWorkerSettings
from specd.up_settings import UpSettings
from specd.version import __version__

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SERVING = (ROOT / "docs" / "serving.md").read_text()
WORKERS = ("draft-worker", "target-worker")


def services_of(file: str) -> dict[str, dict[str, Any]]:
    """Return the services of a compose file, with the services that they extend."""
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


FILES = ["compose.yaml", "compose.native.yaml", "compose.lookup.yaml", "compose.tls.yaml"]


@pytest.mark.parametrize("file", FILES)
def test_every_service_is_hardened(file: str) -> None:
    processes = (CoordinatorSettings, TargetWorkerSettings, GatewaySettings)
    longest = max(process.model_fields["shutdown_grace_seconds"].default for process in processes)
    for name, service in services_of(file).items():
        assert service["init"] is True, name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["restart"] == ("no" if name == "download" else "unless-stopped"), name
        assert int(service["stop_grace_period"].removesuffix("s")) > longest, name
        assert re.fullmatch(r"[a-z/-]+:v?\d+\.\d+\.\d+", service["image"]), name
        assert not service["image"].startswith("specd-") or service["image"].endswith(f":{__version__}"), name


@pytest.mark.parametrize("file", FILES[:3])
def test_only_clients_and_dashboards_get_in_and_from_this_machine_only(file: str) -> None:
    published = {name: service["ports"] for name, service in services_of(file).items() if "ports" in service}
    gateway = {} if file == "compose.native.yaml" else {"gateway": ["127.0.0.1:${SPECD_HTTP_PORT}:8080"]}
    assert published == {
        **gateway,
        "coordinator": ["127.0.0.1:${SPECD_PORT}:50051"],
        "grafana": ["127.0.0.1:${SPECD_GRAFANA_PORT}:3000"],
    }


def test_the_settings_that_are_there_to_be_edited_are_those_of_the_page() -> None:
    lines = [line for line in (DEPLOY / ".env").read_text().splitlines() if line and not line.startswith("#")]
    values = dict(line.split("=") for line in lines)
    assert (values.pop("SPECD_TARGET"), values.pop("SPECD_DRAFT")) == ("", "")  # the included pair
    assert values.pop("SPECD_PORT") == port(UpSettings.model_fields["listen"].default)
    assert values.pop("SPECD_HTTP_PORT") == port(GatewaySettings.model_fields["listen"].default)
    assert f"<http://127.0.0.1:{values.pop('SPECD_GRAFANA_PORT')}>" in SERVING
    certs = values.pop("SPECD_CERTS").replace("./", "deploy/")
    assert f" {certs}/$process\n" in SERVING
    assert f"/{certs}/\n" in (ROOT / ".gitignore").read_text()
    assert values == {"COMPOSE_PROJECT_NAME": "specd"}
    used = {name for file in DEPLOY.glob("*.yaml") for name in re.findall(r"\$\{(\w+)", file.read_text())}
    ports = {"SPECD_PORT", "SPECD_HTTP_PORT", "SPECD_GRAFANA_PORT"}
    assert used == {"SPECD_TARGET", "SPECD_DRAFT", "SPECD_CERTS", *ports}


def test_workers_are_in_a_network_without_a_way_out() -> None:
    for worker in WORKERS:
        for file in ("compose.yaml", "compose.tls.yaml"):
            assert services_of(file)[worker]["networks"] == ["workers"]
    assert services_of("compose.lookup.yaml")["target-worker"]["networks"] == ["workers"]
    for file in ("compose.yaml", "compose.lookup.yaml", "compose.tls.yaml"):
        assert read(file)["networks"]["workers"] == {"internal": True}


def test_with_tls_other_machines_reach_what_clients_call_alone_and_nothing_is_insecure() -> None:
    services = services_of("compose.tls.yaml")
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert published == {
        "coordinator": ["${SPECD_PORT}:50051"],
        "gateway": ["${SPECD_HTTP_PORT}:8080"],
        "grafana": ["127.0.0.1:${SPECD_GRAFANA_PORT}:3000"],
    }
    for name in (*WORKERS, "coordinator", "gateway"):
        (certs,) = [volume for volume in services[name]["volumes"] if volume.endswith(":/tls:ro")]
        assert certs == f"${{SPECD_CERTS}}/{name}:/tls:ro"  # and no other's key
        assert not [variable for variable in services[name]["environment"] if "INSECURE" in variable], name


def test_addresses_have_the_ports_that_processes_listen_on() -> None:
    """Also outside of containers, where the native variant expects the workers."""
    draft, target, coordinator = (
        {name: port(s.model_fields[name].default) for name in ("listen", "metrics_listen")}
        for s in (DraftWorkerSettings, TargetWorkerSettings, CoordinatorSettings)
    )
    assert services_of("compose.yaml")["coordinator"]["environment"] == {
        "SPECD_COORDINATOR_DRAFT": f"draft-worker:{draft['listen']}",
        "SPECD_COORDINATOR_TARGET": f"target-worker:{target['listen']}",
        "SPECD_COORDINATOR_INSECURE": "true",
    }
    gateway = services_of("compose.yaml")["gateway"]["environment"]
    assert port(gateway["SPECD_GATEWAY_COORDINATOR"]) == coordinator["listen"]
    assert port(gateway["SPECD_GATEWAY_LISTEN"]) == port(GatewaySettings.model_fields["listen"].default)
    listening = dict(re.findall(r"SPECD_(\w+_LISTEN)=0\.0\.0\.0:(\d+)", (DEPLOY / "Dockerfile").read_text()))
    assert listening == {
        f"{process}_{name.upper()}": number
        for process, ports in (("DRAFT_WORKER", draft), ("TARGET_WORKER", target), ("COORDINATOR", coordinator))
        for name, number in ports.items()
    }


def test_images_are_built_from_all_that_the_wheel_includes() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"].keys()
    assert included
    assert included <= set(re.findall(r"^COPY (\S+) \1$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE))
    assert {f"!{path}" for path in included} <= set((ROOT / ".dockerignore").read_text().splitlines())


def test_cuda_workers_have_a_gpu_and_the_image_for_it() -> None:
    services = services_of("compose.cuda.yaml")
    for worker in WORKERS:
        (device,) = services[worker]["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    images = {name: service["image"] for name, service in services.items()}
    assert images == dict.fromkeys((*WORKERS, "download"), f"specd-worker-cuda:{__version__}")
