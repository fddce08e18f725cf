"""Rules, alerts and dashboards are complete, and fit each other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from deploy.grafana.generate import DIRECTORY as DASHBOARDS
from deploy.prometheus.local import SHIPPED
from tests.dashboards import read_dashboard

PROVISIONING = DASHBOARDS.parent / "provisioning"
RULES = sorted((SHIPPED / "rules").glob("*.yml"))
RULE_TESTS = sorted((SHIPPED / "tests").glob("*.yml"))
READ = {path.stem: read_dashboard(path) for path in sorted(DASHBOARDS.glob("*.json"))}


def all_rules() -> Iterator[dict[str, Any]]:
    for path in RULES:
        for group in yaml.safe_load(path.read_text())["groups"]:
            yield from group["rules"]


def test_every_rule_has_a_test() -> None:
    recorded: set[str] = set()
    firing: set[str] = set()
    silent: set[str] = set()
    for path in RULE_TESTS:
        for test in yaml.safe_load(path.read_text())["tests"]:
            recorded |= {check["expr"] for check in test.get("promql_expr_test", ()) if check["exp_samples"]}
            for check in test.get("alert_rule_test", ()):
                (firing if check["exp_alerts"] else silent).add(check["alertname"])
    assert recorded == {rule["record"] for rule in all_rules() if "record" in rule}
    assert firing == silent == {rule["alert"] for rule in all_rules() if "alert" in rule}


def test_every_alert_says_how_bad_it_is_what_it_is_and_where_to_read_on() -> None:
    operations = (SHIPPED.parents[1] / "docs" / "operations.md").read_text()
    for rule in all_rules():
        if "alert" in rule:
            assert re.search("warning|critical", rule["labels"]["severity"])
            assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
            assert "{{ $value" in rule["annotations"]["description"]
            place = f"operations.md#{rule['alert'].lower()}"
            assert rule["annotations"]["runbook_url"] == f"{{{{ $externalLabels.specd_docs }}}}/{place}"
            assert f"\n### {rule['alert']}\n" in operations
    for path in SHIPPED.glob("*.yml"):
        docs = yaml.safe_load(path.read_text())["global"]["external_labels"]["specd_docs"]
        assert re.fullmatch(r"https://[\w.-]+/.*[^/]", docs)


@pytest.mark.parametrize("name", READ)
def test_every_panel_has_a_unit_and_a_description(name: str) -> None:
    assert set(READ) == {"speculation", "service"}
    for panel in READ[name].panels:
        assert panel.unit
        assert panel.axis or panel.kind == "state-timeline"
        assert len(panel.description) > 40
        assert panel.queries


def test_the_provisioned_data_source_is_that_of_the_dashboards() -> None:
    provisioning = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text())
    (source,) = provisioning["datasources"]
    asked = {
        uid for path in DASHBOARDS.glob("*.json") for uid in re.findall(r'"uid": "(?!specd-)(.*)"', path.read_text())
    }
    assert asked == {source["uid"]}
    scraping = yaml.safe_load((SHIPPED / "prometheus.yml").read_text())["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == scraping
