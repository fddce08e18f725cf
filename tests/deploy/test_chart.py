"""Kubernetes takes the chart's objects, and the processes take their options."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from specd.rpc.server import LIVENESS
from specd.settings import load_settings
from specd.version import __version__
from tests.deploy.chart import (
    CHART,
    EVERYTHING,
    FILES,
    HELM,
    KUBERNETES,
    ROOT,
    SETTINGS,
    Object,
    containers,
    deployments,
    options_of,
    problems,
    rendered,
    run_helm,
    template,
)
from tests.e2e.processes import run_specd

# The kinds that come with an operator, and a values file that makes some.
CUSTOM = {
    **dict.fromkeys(
        ("ScaledObject", "PodMonitor", "ServiceMonitor", "PrometheusRule", "HTTPRoute", "InferencePool"), "everything"
    ),
    "LeaderWorkerSet": "ranks",
}
every_file = pytest.mark.parametrize("file", FILES)


# -- What helm and Kubernetes say


@every_file
def test_helm_finds_nothing_wrong(file: str) -> None:
    done = run_helm("lint", "--strict", str(CHART), *(f"--values={path}" for path in FILES[file]))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", KUBERNETES)
@every_file
def test_kubernetes_takes_every_object(file: str, version: str) -> None:
    found = {f"{each['kind']} {each['metadata']['name']}": problems(each, version) for each in rendered(file)}
    assert not {name: why for name, why in found.items() if why}
    no_schema = {name.split()[0] for name, why in found.items() if why is None}
    assert no_schema <= CUSTOM.keys()


@pytest.mark.parametrize("kind", CUSTOM)
def test_the_definition_of_a_custom_resource_takes_it(kind: str) -> None:
    found = [each for each in rendered(CUSTOM[kind]) if each["kind"] == kind]
    assert found
    for each in found:
        problem = problems(each, KUBERNETES[-1])
        if problem is None:
            pytest.skip(f"there is no definition of {kind}: tests/deploy/chart.py has the places")
        assert problem == ""


def test_a_packaged_chart_has_the_rules_and_dashboards(tmp_path: Path) -> None:
    done = run_helm("package", str(CHART), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("specd-*.tgz")
    again = run_helm("template", "t", str(archive), "--namespace", "models", f"--values={EVERYTHING}")
    assert again.stdout.replace("\r", "") == template({}, EVERYTHING).stdout


def test_versions_are_those_of_the_program() -> None:
    chart = dict(re.findall(r"^(\w+): (.*)$", (CHART / "Chart.yaml").read_text(), re.MULTILINE))
    assert chart["version"] == chart["appVersion"] == __version__
    assert f">={KUBERNETES[0]}-0" in chart["kubeVersion"]


def test_images_have_the_names_that_compose_gives_them() -> None:
    names = yaml.safe_load((CHART / "values.yaml").read_text())["images"]
    compose = "".join(path.read_text() for path in (ROOT / "deploy").glob("*.yaml"))
    built = set(re.findall(r"image: (specd-[a-z-]+):", compose))
    assert {names["coordinator"], names["worker"], names["workerCuda"]} == built
    gpus = [container["image"] for process, container, _ in containers("gpu") if process == "target-worker"]
    assert gpus == [f"{names['workerCuda']}:{__version__}"]


# -- Processes


@cache
def help_of(process: str) -> str:
    return run_specd(process, "--help").stdout


def test_every_option_is_one_of_the_process() -> None:
    with ThreadPoolExecutor() as pool:
        list(pool.map(help_of, SETTINGS))
    for file in FILES:
        for process, container, _ in containers(file):
            known = set(re.findall(r"--[a-z0-9-]+", help_of(process)))
            used = {argument.partition("=")[0] for argument in container["args"][2:]}
            assert used <= known, f"{file}: {process}"
            assert container["args"][0].startswith("--log-level=")


@every_file
def test_every_value_is_one_that_the_process_takes(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for process, container, _ in containers(file):
        for variable in container.get("env", ()):
            monkeypatch.setenv(variable["name"], variable.get("value", "redis://USER:PASSWORD@valkey:6379/0"))
        flags = {name.removeprefix("no-").replace("-", "_"): value for name, value in options_of(container).items()}
        settings = load_settings(SETTINGS[process], flags)
        for name, value in flags.items():
            if isinstance(value, bool):
                assert getattr(settings, name) is value
        for variable in container.get("env", ()):
            monkeypatch.delenv(variable["name"])
    # A number that Helm would write as 1e+06.
    if file == "everything":
        assert options_of(coordinator(file))["session-budget-tokens"] == "1000000"


def coordinator(file: str) -> Object:
    return next(container for process, container, _ in containers(file) if process == "coordinator")


def test_the_values_name_every_setting_that_the_chart_does_not_set_itself() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())["$defs"]
    own = {
        *("listen", "metrics_listen", "insecure", "tls_cert", "tls_key", "tls_ca", "shutdown_grace_seconds", "model"),
        *("target", "draft", "tokens", "session_server", "session_file", "session_file_required", "allowed_hosts"),
        *("coordinator", "coordinator_ca", "coordinator_cert", "coordinator_key", "coordinator_name"),
        *("ranks", "ranks_listen", "follow", "rank", "rank_host"),
        "models",  # the coordinator of a cell serves one
    }
    names = ("coordinatorSettings", "gatewaySettings", "targetSettings", "draftSettings")
    for name, settings in zip(names, SETTINGS.values(), strict=True):
        expected = {field.replace("_", "-") for field in settings.model_fields if field not in own}
        assert schema[name]["properties"].keys() == expected
        kinds: dict[Any, str] = {bool: "boolean", int: "integer", float: "number"}
        for field, described in schema[name]["properties"].items():
            kind = settings.model_fields[field.replace("-", "_")].annotation
            assert described.get("type", "string") == kinds.get(kind, "string"), field


@every_file
def test_every_path_and_every_volume_is_mounted(file: str) -> None:
    for process, container, pod in containers(file):
        mounts = {mount["mountPath"]: mount for mount in container.get("volumeMounts", ())}
        probes = [container.get(f"{kind}Probe", {}) for kind in ("startup", "liveness", "readiness")]
        asked = [argument for probe in probes for argument in probe.get("exec", {}).get("command", ())]
        variables = [f"={variable.get('value', '')}" for variable in container.get("env", ())]
        paths = {text.partition("=")[2] for text in (*container["args"], *asked, *variables) if "=/" in text}
        for path in paths:
            assert any(path == mounted or path.startswith(f"{mounted}/") for mounted in mounts), f"{process}: {path}"
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in mounts.values()} <= volumes
        used = {mount["name"] for each in pod["containers"] for mount in each.get("volumeMounts", ())}
        assert used == volumes
        for volume in pod["volumes"]:
            if "secret" in volume:  # for the group of the pod alone
                assert volume["secret"]["defaultMode"] == 0o440


@every_file
def test_a_container_can_do_little(file: str) -> None:
    (uid,) = re.findall(r"^USER (\d+)$", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE)
    for process, container, pod in containers(file):
        user = pod["securityContext"]
        assert {user["runAsUser"], user["runAsGroup"], user["fsGroup"]} == {int(uid)}, process
        assert user["runAsNonRoot"] is True
        assert user["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False  # variables of a Service called specd would be settings


@every_file
def test_probes_ask_for_what_they_are_about(file: str) -> None:
    for process, container, _ in containers(file):
        if "follow" in options_of(container):  # rank 0 ends with it
            assert not any(f"{kind}Probe" in container for kind in ("startup", "liveness", "readiness"))
            continue
        startup, liveness, readiness = (container[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness"))
        if process == "gateway":
            assert liveness["httpGet"]["path"] == startup["httpGet"]["path"] == "/openapi.json"
            assert readiness["httpGet"]["path"] == "/health"
            continue
        assert service_asked_for(liveness) == LIVENESS
        assert service_asked_for(readiness) == ""
        # A coordinator starts without workers; a worker has started when it has its model.
        assert service_asked_for(startup) == (LIVENESS if process == "coordinator" else "")
        port = options_of(container)["listen"].rpartition(":")[2]
        for probe in (startup, liveness, readiness):
            asked = probe["exec"]["command"][2].rpartition(":")[2] if "exec" in probe else str(probe["grpc"]["port"])
            assert asked == port


def service_asked_for(probe: Object) -> str:
    if "grpc" in probe:
        return str(probe["grpc"].get("service", ""))
    (given,) = [each for each in probe["exec"]["command"] if each.startswith("--service=")] or [""]
    return given.removeprefix("--service=")


@every_file
def test_pods_have_the_time_for_their_drain(file: str) -> None:
    for process, container, pod in containers(file):
        pause = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        drain = float(options_of(container).get("shutdown-grace-seconds", 0))
        assert pod["terminationGracePeriodSeconds"] >= pause + drain + 5, process  # specd/rpc/server.py: 3 + 1
    for component, deployment in deployments(file).items():
        if component != "coordinator" and "progressDeadlineSeconds" in deployment:
            (container,) = deployment["template"]["spec"]["containers"]
            probe = container["startupProbe"]
            time = probe["periodSeconds"] * probe["failureThreshold"]
            assert deployment["progressDeadlineSeconds"] > time >= 1800


# -- What a person reads


def test_the_notes_say_where_it_is_and_what_is_not_safe() -> None:
    notes = template({}, notes=True).stdout.partition("NOTES:")[2]
    for name in ("t-specd.models.svc:50051", "http://t-specd.models.svc:8080/v1", "tls.enabled is false", "Valkey"):
        assert name in notes
    safe = template(
        {"coordinators": {"sessionServer": {"url": "redis://valkey"}}}, HELM / "values" / "tls.yaml", notes=True
    )
    assert "https://t-specd.models.svc:8080/v1" in safe.stdout.partition("NOTES:")[2]
    assert "WARNING" not in safe.stdout.partition("NOTES:")[2]


def test_rules_and_dashboards_are_links_in_the_chart() -> None:
    """A copy of a file would become stale."""
    for path in (CHART / "files").iterdir():
        assert not path.readlink().is_absolute()
        assert path.resolve().is_relative_to(ROOT / "deploy")
