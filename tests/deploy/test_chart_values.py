"""Values that are wrong are refused, by a message that names the key."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.chart import render, template

Values = dict[str, Any]
PAIR: Values = {"targets": {"model": "a"}, "drafts": {"model": "b"}}
SECRETS = {f"{name}Secret": name for name in ("coordinator", "gateway", "target", "draft")}

# The values, and what the refusal must have in it.
OF_THE_SCHEMA: dict[str, tuple[Values, str]] = {
    "unknown key": ({"coordinator": {"replicas": 3}}, "additional properties 'coordinator' not allowed"),
    "unknown key within": ({"targets": {"replica": 3}}, "/targets': additional properties 'replica'"),
    "text for a number": ({"targets": {"replicas": "two"}}, "/targets/replicas"),
    "no coordinator": ({"coordinators": {"replicas": 0}}, "/coordinators/replicas"),
    "negative": ({"drafts": {"replicas": -1}}, "/drafts/replicas"),
    "no rank": ({"targets": {"ranks": 0}}, "/targets/ranks"),
    "way between Macs": ({"targets": {"settings": {"ranks-backend": "jaccl"}}}, "/targets/settings/ranks-backend"),
    "half a GPU": ({"targets": {"gpus": 0.5}}, "/targets/gpus"),
    "misspelt setting": ({"coordinators": {"settings": {"max-session": 8}}}, "additional properties 'max-session'"),
    "setting of another process": ({"targets": {"settings": {"max-sessions": 8}}}, "/targets/settings"),
    "setting of the chart": ({"targets": {"settings": {"listen": "0.0.0.0:1"}}}, "'listen' not allowed"),
    "setting in Python's form": ({"targets": {"settings": {"cache_bytes": "8GiB"}}}, "'cache_bytes' not allowed"),
    "wrong kind of setting": ({"coordinators": {"settings": {"lookup": "yes"}}}, "/coordinators/settings/lookup"),
    "too many draft tokens": ({"coordinators": {"settings": {"num-draft-tokens": 64}}}, "num-draft-tokens"),
    "no size": ({"drafts": {"settings": {"cache-bytes": "lots"}}}, "/drafts/settings/cache-bytes"),
    "bits": ({"targets": {"settings": {"kv-bits": 5}}}, "/targets/settings/kv-bits"),
    "no time": ({"coordinators": {"settings": {"draft-timeout-seconds": 0}}}, "draft-timeout-seconds"),
    "no address": ({"targets": {"external": ["mac.local"]}}, "/targets/external/0"),
    "port of an address": ({"targets": {"external": ["192.0.2.1:50053"]}}, "/targets/external/0"),
    "an address twice": ({"targets": {"external": ["192.0.2.1", "192.0.2.1"]}}, "/targets/external"),
    "no port": ({"targets": {"externalPort": 70000}}, "/targets/externalPort"),
    "another store": ({"coordinators": {"sessionServer": {"url": "memcached://cache"}}}, "/sessionServer/url"),
    "unknown level": ({"logLevel": "trace"}, "/logLevel"),
    "unknown policy": ({"images": {"pullPolicy": "Sometimes"}}, "/images/pullPolicy"),
    "tag with a name": ({"images": {"tag": "specd:1"}}, "/images/tag"),
    "name of a Secret": ({"tokensSecret": "My Secret"}, "/tokensSecret"),
    "unknown volume": ({"targets": {"cache": {"configMap": {"name": "x"}}}}, "/targets/cache"),
    "two volumes": ({"targets": {"cache": {"emptyDir": {}, "hostPath": {"path": "/x"}}}}, "/targets/cache"),
    "claim without a name": ({"targets": {"models": {"persistentVolumeClaim": {}}}}, "'claimName'"),
    "relative path": ({"targets": {"cache": {"hostPath": {"path": "cache"}}}}, "/targets/cache/hostPath/path"),
    "number as a label": ({"targets": {"nodeSelector": {"gpus": 4}}}, "/targets/nodeSelector/gpus"),
    "kind of Service": ({"coordinators": {"service": {"type": "Headless"}}}, "/coordinators/service/type"),
    "amount": ({"targets": {"resources": {"limits": {"memory": "4 GB"}}}}, "/targets/resources/limits/memory"),
    "peer": ({"networkPolicy": {"clientsFrom": [{}]}}, "/networkPolicy/clientsFrom/0"),
    "no reader of metrics": ({"networkPolicy": {"metricsFrom": []}}, "/networkPolicy/metricsFrom"),
    "scaler without Prometheus": ({"autoscaling": {"enabled": True}}, "/autoscaling/prometheusAddress"),
    "route without a gateway": ({"httpRoute": {"enabled": True}}, "/httpRoute/gatewayName"),
    "pool without a picker": ({"inferencePool": {"enabled": True}}, "/inferencePool/endpointPicker"),
    "host with a scheme": ({"gateway": {"hosts": ["https://llm.example.org"]}}, "/gateway/hosts/0"),
}
OF_THE_CHART: dict[str, tuple[Values, str]] = {
    "no target": ({"targets": {"replicas": 0}}, "targets.replicas is 0 and targets.external is empty"),
    "no draft": ({"drafts": {"replicas": 0}}, "drafts.replicas is 0 and drafts.external is empty"),
    "half of a pair": ({"targets": {"model": "a"}}, "only one of targets.model and drafts.model is set"),
    "no way to replace a pod": (
        {"targets": {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 0}}},
        "targets.rollingUpdate has maxUnavailable 0 and maxSurge 0",
    ),
    "offline without a model": ({**PAIR, "hub": {"offline": True}}, "hub.offline is true, and targets.model"),
    "two session servers": (
        {"coordinators": {"sessionServer": {"url": "redis://a", "existingSecret": "a"}}},
        "coordinators.sessionServer.url and coordinators.sessionServer.existingSecret",
    ),
    "door without TLS": (
        {"coordinators": {"service": {"type": "LoadBalancer"}}},
        "coordinators.service.type is LoadBalancer, and tls.enabled is false",
    ),
    "TLS without certificates": ({"tls": {"enabled": True}, "tokensSecret": "t"}, "tls.coordinatorSecret is empty"),
    "TLS without a worker's": (
        {"tls": {**SECRETS, "enabled": True, "draftSecret": ""}, "tokensSecret": "t"},
        "tls.draftSecret is empty",
    ),
    "TLS and a gateway without tokens": ({"tls": {**SECRETS, "enabled": True}}, "tokensSecret is empty"),
    "ranks with a draft of their own": (
        {"targets": {"ranks": 2, "settings": {"self-draft": "b"}}},
        "targets.ranks is 2, and targets.settings.self-draft is set",
    ),
    "ranks with adapters": (
        {"targets": {"ranks": 2, "settings": {"adapters": "sql=/models/sql"}}},
        "targets.ranks is 2, and targets.settings.adapters is set",
    ),
    "nothing to scale": (
        {
            "autoscaling": {"enabled": True, "prometheusAddress": "http://p", "query": "1"},
            "targets": {"replicas": 0, "external": ["192.0.2.1"]},
        },
        "autoscaling.enabled is true, and targets.replicas is 0",
    ),
    "least above most": ({"autoscaling": {"minReplicas": 9}}, "autoscaling.minReplicas is greater"),
    "scaler without its labels": (
        {"autoscaling": {"enabled": True, "prometheusAddress": "http://p"}},
        "autoscaling.query is empty",
    ),
    "route to no gateway": (
        {"httpRoute": {"enabled": True, "gatewayName": "g"}, "gateway": {"enabled": False}},
        "need gateway.enabled",
    ),
}
WRONG = {**OF_THE_SCHEMA, **OF_THE_CHART}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_refused_by_its_name(name: str) -> None:
    values, message = WRONG[name]
    done = template(values)
    assert done.returncode != 0
    assert message in done.stderr


def test_the_nearest_right_values_are_taken() -> None:
    """So the refusals above have the reason that they name."""
    right: list[Values] = [
        {"targets": {"replicas": 0, "external": ["192.0.2.1", "2001:db8::1"]}},
        {**PAIR, "hub": {"offline": True}, "targets": {"model": "a", "models": {"hostPath": {"path": "/models"}}}},
        {"tls": {**SECRETS, "enabled": True}, "tokensSecret": "t"},
        {"tls": {**SECRETS, "enabled": True}, "gateway": {"enabled": False}},
        {"targets": {"cache": {"persistentVolumeClaim": {"claimName": "models"}}}},
        {"autoscaling": {"enabled": True, "prometheusAddress": "http://p", "query": "1"}},
        {"targets": {"ranks": 2, "settings": {"self-draft": "none"}}},
        {"coordinators": {"settings": {"num-draft-tokens": "auto", "lookup": False, "max-request-bytes": "8MiB"}}},
    ]
    right[1]["drafts"] = {"model": "b", "cache": {"hostPath": {"path": "/cache"}}}
    for values in right:
        assert render(values)
