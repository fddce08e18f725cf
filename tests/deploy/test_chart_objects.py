"""The chart's objects find each other, and Prometheus and Grafana find the processes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.deploy.chart import (
    FILES,
    HELM,
    ROOT,
    SETTINGS,
    containers,
    deployments,
    labels,
    of_kind,
    options_of,
    render,
    rendered,
)

every_file = pytest.mark.parametrize("file", FILES)
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()


# -- How objects find each other


@every_file
def test_selectors_find_the_pods_and_their_ports(file: str) -> None:
    pods = [deployment["template"] for deployment in deployments(file).values()]
    for each in rendered(file):
        spec = each.get("spec", {})
        selector = spec.get("selector") or spec.get("podSelector")
        if each["kind"] not in {"Service", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor", "InferencePool"}:
            continue
        if each["kind"] == "Service" and "external" in each["metadata"]["name"]:
            assert selector is None
            continue
        wanted = selector.get("matchLabels", selector)
        found = [pod for pod in pods if wanted.items() <= labels(pod).items()]
        if not found and wanted["app.kubernetes.io/component"] not in deployments(file):
            assert each["kind"] in {"NetworkPolicy", "PodMonitor"}  # of workers that the values leave out
            continue
        assert len(found) == (2 if "specd-ranks" in wanted else 1), each["metadata"]["name"]
        ports = {port["name"]: port["containerPort"] for c in found[0]["spec"]["containers"] for port in c["ports"]}
        named = [port.get("targetPort") for port in spec.get("ports", ())]
        named += [port["port"] for rule in spec.get("ingress", ()) for port in rule.get("ports", ())]
        named += [endpoint["port"] for endpoint in spec.get("podMetricsEndpoints", ())]
        assert set(named) <= set(ports)
        assert {port["number"] for port in spec.get("targetPorts", ())} <= set(ports.values())


def coordinator_options(file: str) -> dict[str, Any]:
    return next(options_of(container) for process, container, _ in containers(file) if process == "coordinator")


@every_file
def test_the_coordinator_looks_up_names_that_services_have(file: str) -> None:
    services = {each["metadata"]["name"]: each["spec"] for each in rendered(file) if each["kind"] == "Service"}
    for option in ("target", "draft"):
        for address in filter("none".__ne__, coordinator_options(file)[option].split(",")):
            match = re.fullmatch(r"dns:([a-z0-9-]+)\.models\.svc:(\d+)", address)
            assert match, address
            service = services[match[1]]
            assert service["clusterIP"] == "None"
            assert int(match[2]) in {port["port"] for port in service["ports"]}


def test_addresses_outside_of_the_cluster_are_in_slices_of_their_families() -> None:
    found = [each for each in rendered("everything") if each["kind"] == "EndpointSlice"]
    addresses = {
        each["metadata"]["name"]: (
            each["metadata"]["labels"]["kubernetes.io/service-name"],
            each["addressType"],
            [address for endpoint in each["endpoints"] for address in endpoint["addresses"]],
        )
        for each in found
    }
    target, draft = "t-decoder-target-workers-external", "t-decoder-draft-workers-external"
    assert addresses == {
        f"{target}-ipv4": (target, "IPv4", ["192.0.2.11"]),
        f"{target}-ipv6": (target, "IPv6", ["2001:db8::11"]),
        f"{draft}-ipv6": (draft, "IPv6", ["2001:db8::12"]),
    }


def test_another_model_has_other_workers_and_new_coordinators() -> None:
    """A coordinator refuses the weights that it does not know: it may not look up workers of the next model."""
    pair = {"targets": {"model": "a"}, "drafts": {"model": "b"}}
    tls = {"enabled": True, **{f"{name}Secret": name for name in ("coordinator", "gateway", "target", "draft")}}
    secrets = {"tls": tls, "tokensSecret": "tokens"}
    changes: dict[str, Any] = {
        "another target": {"targets": {"model": "c"}, "drafts": {"model": "b"}},
        "another version": {**pair, "images": {"tag": "9.9.9"}},
        "TLS": {**pair, **secrets},
        "more memory": {"targets": {"model": "a", "settings": {"cache-bytes": "1GiB"}}, "drafts": {"model": "b"}},
    }
    before = revisions(pair)
    assert [revisions(changes[name]) == before for name in changes] == [False, False, False, True]


def revisions(values: Any) -> tuple[str, ...]:
    objects = render(values)
    pods = {name: each["spec"]["template"] for name, each in of_kind(objects, "Deployment").items()}
    target = labels(pods["target-worker"])["specd-revision"]
    assert of_kind(objects, "Service")["target-workers"]["spec"]["selector"]["specd-revision"] == target
    annotations = pods["coordinator"]["metadata"]["annotations"]
    assert annotations["specd-target-revision"] == target
    # What a Deployment selects can never change.
    for each in of_kind(objects, "Deployment").values():
        assert "specd-revision" not in each["spec"]["selector"]["matchLabels"]
    return target, annotations["specd-draft-revision"]


def test_a_scaled_deployment_leaves_its_size_to_the_scaler() -> None:
    assert "replicas" in deployments("default")["target-worker"]
    assert "replicas" not in deployments("everything")["target-worker"]
    (scaled,) = [each["spec"] for each in rendered("everything") if each["kind"] == "ScaledObject"]
    named = {each["metadata"]["name"] for each in rendered("everything") if each["kind"] == "Deployment"}
    assert scaled["scaleTargetRef"]["name"] in named


def test_sessions_stay_where_they_are_kept() -> None:
    def affinity(**values: Any) -> str:
        spec: Any = of_kind(render(values), "Service")["t-specd"]["spec"]
        return str(spec["sessionAffinity"])

    assert affinity() == "ClientIP"
    assert affinity(coordinators={"replicas": 1}) == "None"
    assert affinity(coordinators={"sessionServer": {"url": "redis://valkey:6379"}}) == "None"
    assert affinity(coordinators={"sessionServer": {"existingSecret": "valkey"}}) == "None"


# -- Monitoring


def test_every_metric_exists() -> None:
    known = set(re.findall(r"`(specd_\w+|process_\w+|python_info|up)", OPERATIONS)) | {"up"}
    (rules,) = [each["spec"]["groups"] for each in rendered("everything") if each["kind"] == "PrometheusRule"]
    (scaled,) = [each["spec"]["triggers"] for each in rendered("everything") if each["kind"] == "ScaledObject"]
    expressions = [rule["expr"] for group in rules for rule in group["rules"]]
    expressions += [trigger["metadata"]["query"] for trigger in scaled]
    used = {name for text in expressions for name in re.findall(r"(?<![\w:\"])(specd_\w+)(?!\w*:)", text)}
    assert len(used) > 20
    assert {re.sub("_(sum|count|bucket)$", "", name) for name in used} <= known
    recorded = {rule["record"] for group in rules for rule in group["rules"] if "record" in rule}
    named = {name for text in expressions for name in re.findall(r"\b(instance\w*:[\w:]+)", text)}
    assert named <= recorded


def test_rules_are_those_of_prometheus() -> None:
    (made,) = [each["spec"] for each in rendered("everything") if each["kind"] == "PrometheusRule"]
    shipped = [
        group
        for path in sorted((ROOT / "deploy" / "prometheus" / "rules").glob("*.yml"))
        for group in yaml.safe_load(path.read_text())["groups"]
    ]
    for before, after in zip(shipped, made["groups"], strict=True):
        for old, new in zip(before["rules"], after["rules"], strict=True):
            assert {**old, "annotations": None} == {**new, "annotations": None}
    links = {
        rule["annotations"]["runbook_url"] for group in made["groups"] for rule in group["rules"] if "alert" in rule
    }
    assert all(re.fullmatch(r"https://docs\.example\.org/specd/operations\.md#specd\w+", link) for link in links)
    assert links


def test_jobs_are_those_of_the_rules() -> None:
    pods, services = jobs_of("PodMonitor", "podMetricsEndpoints"), jobs_of("ServiceMonitor", "endpoints")
    rules = "".join(path.read_text() for path in (ROOT / "deploy" / "prometheus" / "rules").glob("*.yml"))
    named = {job for text in re.findall(r'job=~?"([a-z|-]+)"', rules) for job in text.split("|")}
    assert named <= pods == set(SETTINGS)
    assert services == {"target-worker", "draft-worker"}


def jobs_of(kind: str, endpoints: str) -> set[str]:
    """Return the jobs in the monitors of a kind."""
    monitors = [each["spec"] for each in rendered("everything") if each["kind"] == kind]
    rules = [rule for monitor in monitors for endpoint in monitor[endpoints] for rule in endpoint["relabelings"]]
    return {rule["replacement"] for rule in rules if rule["targetLabel"] == "job"}


def test_dashboards_are_those_of_grafana() -> None:
    (made,) = [each for each in rendered("everything") if each["kind"] == "ConfigMap"]
    shipped = {f"specd-{path.name}": path.read_text() for path in (ROOT / "deploy/grafana/dashboards").glob("*.json")}
    assert made["data"] == shipped
    assert labels(made)["grafana_dashboard"] == "1"
    assert sum(map(len, shipped.values())) < 2**20  # the limit of a ConfigMap


def test_a_target_of_several_ranks_is_scaled_and_kept_apart_as_a_group() -> None:
    """Only rank 0 is called; a follower that is evicted ends its group, so groups are disrupted one at a time."""
    file = HELM / "values" / "ranks.yaml"
    scaler = {"enabled": True, "prometheusAddress": "http://prometheus", "query": "1"}
    made = render({"autoscaling": scaler, "hub": {"offline": True}}, file)
    (group,) = of_kind(made, "LeaderWorkerSet").values()
    (scaled,) = of_kind(made, "ScaledObject").values()
    found = scaled["spec"]["scaleTargetRef"]
    assert found == {"apiVersion": group["apiVersion"], "kind": group["kind"], "name": group["metadata"]["name"]}
    assert "replicas" not in group["spec"]
    leader, follower = (group["spec"]["leaderWorkerTemplate"][f"{name}Template"] for name in ("leader", "worker"))
    called = of_kind(made, "Service")["target-workers"]["spec"]["selector"]
    assert called.items() <= labels(leader).items()
    assert not called.items() <= labels(follower).items()
    budget = of_kind(made, "PodDisruptionBudget")["target-worker"]["spec"]
    ranks = budget["selector"]["matchLabels"]
    assert budget["maxUnavailable"] == 1
    assert ranks.items() <= labels(leader).items() & labels(follower).items()
    policy = of_kind(made, "NetworkPolicy")["ranks"]["spec"]
    assert policy["podSelector"]["matchLabels"] == ranks
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": ranks}}]}]
    assert policy["egress"][0] == {"to": [{"podSelector": {"matchLabels": ranks}}]}
