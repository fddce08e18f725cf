"""Monitoring, on live processes: a real Prometheus with the rules and dashboards that are shipped."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from deploy.prometheus.local import SHIPPED, LocalPrometheus, Series
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from specd.v1.generation_pb2 import SessionStatistics
from specd.v1.sampling_pb2 import Grammar, SamplingParameters
from tests.dashboards import Panel
from tests.e2e.processes import (
    PATIENCE_SECONDS,
    eventually,
    read_metric,
    read_metrics_text,
    scraped_address,
    wait_until_idle,
)
from tests.raw_client import RawClient
from tests.unit.test_monitoring_files import READ, RULE_TESTS, RULES, all_rules

needs_prometheus = pytest.mark.skipif(
    shutil.which("promtool") is None or shutil.which("prometheus") is None,
    reason="there is no prometheus and promtool here: install the package prometheus",
)

SETTINGS = {
    "SPECD_COORDINATOR_MAX_SESSIONS": "2",
    "SPECD_COORDINATOR_MAX_QUEUED": "2",
}


def promtool(*arguments: str | Path, stdin: str = "") -> None:
    done = subprocess.run(["promtool", *arguments], input=stdin, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr


@needs_prometheus
def test_promtool_accepts_the_configuration() -> None:
    for file in ("prometheus.yml", "lookup.yml"):
        promtool("check", "config", SHIPPED / file)
    promtool("check", "config", "--syntax-only", SHIPPED / "tls.yml")  # its certificates are elsewhere
    promtool("check", "rules", "--lint-fatal", *RULES)


@needs_prometheus
def test_the_rules_do_what_their_tests_say() -> None:
    promtool("test", "rules", *RULE_TESTS)


async def value_of(prometheus: LocalPrometheus, expression: str) -> float:
    (series,) = await prometheus.query(expression)
    return float(series["value"][1])


@dataclass
class Load:
    """Clients of a stack, and what they were told."""

    client: RawClient
    prompts: list[str]
    statistics: list[SessionStatistics] = field(default_factory=list)
    codes: set[str] = field(default_factory=set)

    async def ask(self, number: int, **fields: Any) -> None:
        """Run a session to its end, and keep its statistics or its error."""
        try:
            async for response in self.client.generate(self.prompts[number], **fields):
                last = response
        except grpc.aio.AioRpcError as error:
            self.codes.add(error.code().name)
        else:
            self.statistics.append(last.statistics)

    async def go_away(self) -> None:
        """Begin a session and leave it, without a draft, because its proposals would not be reported."""
        call = self.client.generate(self.prompts[0], max_tokens=400, num_draft_tokens=0)
        await anext(aiter(call))
        call.cancel()  # type: ignore[attr-defined]

    async def of_all_kinds(self, stack: Stack) -> None:
        """Do what clients do, and what happens to them."""
        assert stack.draft is not None
        assert stack.gateway is not None
        await asyncio.to_thread(_complete_over_http, stack.gateway.facts["url"])
        sampled = SamplingParameters(temperature=0.8, seed=1)
        for number in range(2):
            greedy = self.ask(number, max_tokens=48, num_draft_tokens=4)
            await asyncio.gather(greedy, self.ask(number + 2, max_tokens=48, sampling=sampled))
        await self.ask(0, max_tokens=48)  # alone, and with a prompt that the workers have
        for number in range(2):
            await self.ask(number, max_tokens=120, grammar=Grammar(regex=r'(\{"a long name": "[a-z ]+"\}\n){30}'))
        await self.go_away()
        await self.ask(0, num_draft_tokens=99)
        await self.ask(0, session_id="unknown")
        os.kill(stack.draft.pid, signal.SIGSTOP)
        try:
            await self.ask(1, max_tokens=16, num_draft_tokens=4)  # the planner might not ask the draft
            await eventually(lambda: read_metric(stack.coordinator, "specd_draft_available") == 0)
        finally:
            os.kill(stack.draft.pid, signal.SIGCONT)
        await eventually(lambda: read_metric(stack.coordinator, "specd_draft_available") == 1)
        # So many would not draft by themselves.
        await asyncio.gather(*(self.ask(number, max_tokens=48, num_draft_tokens=4) for number in range(8)))
        await wait_until_idle(stack)


def _complete_over_http(url: str) -> None:
    """Without a draft: its tokens are not in the statistics of the load."""
    body = json.dumps({"prompt": "def f", "max_tokens": 8, "num_draft_tokens": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as response:
        assert json.load(response)["usage"]["completion_tokens"]


@dataclass
class Monitored:
    """A stack that has had a load of all kinds, and the Prometheus that scraped it from beginning to end."""

    stack: Stack
    prometheus: LocalPrometheus
    load: Load
    began_at: float
    ended_at: float

    async def evaluate(self, expression: str) -> list[Series]:
        """Return the series of an expression over the run, those that have a number anywhere."""
        found = await self.prometheus.query_range(expression, self.began_at, self.ended_at, 1)
        return [series for series in found if any(math.isfinite(float(value)) for _, value in series["values"])]


@pytest.fixture(scope="module")
async def monitored(prompts: list[str]) -> AsyncIterator[Monitored]:
    async with Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, http="127.0.0.1:0", environment=SETTINGS) as stack:
        addresses = {child.name: scraped_address(child) for child in stack.children}
        async with LocalPrometheus(addresses, interval_seconds=1) as prometheus, RawClient(stack.address) as client:
            load = Load(client, prompts)
            began_at = time.time()
            await load.of_all_kinds(stack)
            num_rounds = read_metric(stack.coordinator, "specd_rounds_total")
            while await value_of(prometheus, "specd_rounds_total") < num_rounds:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            async with asyncio.timeout(PATIENCE_SECONDS):
                # A scrape that is late sees all requests at once, which is no rate: it takes one more.
                while not await prometheus.query("instance:specd_http_requests:rate5m > 0"):
                    assert stack.gateway is not None
                    await asyncio.to_thread(_complete_over_http, stack.gateway.facts["url"])
                    await asyncio.sleep(1)
                seen = time.time()
                while not await prometheus.has_evaluated_all_rules_since(seen):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            yield Monitored(stack, prometheus, load, began_at, time.time())


@needs_prometheus
async def test_the_load_was_of_all_kinds(monitored: Monitored) -> None:
    assert len(monitored.load.statistics) >= 8
    assert monitored.load.codes == {"INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED"}
    assert any(statistics.rounds_without_draft for statistics in monitored.load.statistics)


@needs_prometheus
async def test_promtool_finds_nothing_in_the_metrics(monitored: Monitored) -> None:
    for process in monitored.stack.children:
        promtool("check", "metrics", stdin=read_metrics_text(process))


@needs_prometheus
@pytest.mark.parametrize(
    ("name", "panel"), [pytest.param(name, panel, id=panel.title) for name in READ for panel in READ[name].panels]
)
async def test_every_query_of_every_panel_returns_data(name: str, panel: Panel, monitored: Monitored) -> None:
    if panel.title == "Process memory" and sys.platform != "linux":
        pytest.skip("process_resident_memory_bytes is there on Linux only")
    variables = await READ[name].choose_all(monitored.prometheus)
    for query in panel.queries:
        assert await monitored.evaluate(query.resolved(variables)), query.expression


@needs_prometheus
@pytest.mark.parametrize("rule", [pytest.param(rule, id=rule.get("record") or rule["alert"]) for rule in all_rules()])
async def test_every_rule_returns_data(rule: dict[str, Any], monitored: Monitored) -> None:
    # An alert whose condition is not met has no data, be its metrics there or not: `bool` makes a 0 of that.
    expression = re.sub(r"(==|!=|<=|>=|<|>)(?= )", r"\1 bool", rule["expr"]) if "alert" in rule else rule["expr"]
    assert await monitored.evaluate(expression)
    if "record" in rule:
        assert await monitored.evaluate(rule["record"])


@needs_prometheus
async def test_prometheus_evaluates_all_rules_without_errors(monitored: Monitored) -> None:
    rules = await monitored.prometheus.rules()
    assert {rule["name"] for rule in rules} == {rule.get("record") or rule["alert"] for rule in all_rules()}
    assert {(rule["health"], rule.get("lastError", "")) for rule in rules} == {("ok", "")}


@needs_prometheus
async def test_the_acceptance_rate_is_that_of_the_sessions_exactly(monitored: Monitored) -> None:
    value = partial(value_of, monitored.prometheus)
    statistics = monitored.load.statistics
    proposed = sum(session.proposed_tokens for session in statistics)
    accepted = sum(session.accepted_tokens for session in statistics)
    assert 0 < accepted < proposed
    assert await value("specd_proposed_tokens_total") == proposed
    assert await value("specd_accepted_tokens_total") == accepted
    assert await value("specd_accepted_tokens_total / specd_proposed_tokens_total") == accepted / proposed
    assert await value("vllm:spec_decode_num_draft_tokens_total") == proposed
    assert await value("vllm:spec_decode_num_accepted_tokens_total") == accepted
    for position in range(max(len(session.accepted_by_position) for session in statistics)):
        accepted_here = sum(sum(session.accepted_by_position[position : position + 1]) for session in statistics)
        alias = f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{position}"}}'
        assert await value(alias) == accepted_here


@needs_prometheus
async def test_drafts_under_their_name_in_vllm_are_the_rounds_with_a_proposal(monitored: Monitored) -> None:
    (series,) = await monitored.prometheus.query("vllm:spec_decode_num_drafts_total")
    proposals = sum(sum(session.proposed_by_position[:1]) for session in monitored.load.statistics)
    assert float(series["value"][1]) == proposals
    labels = {"__name__", "instance", "job", "model_name", "engine"}
    assert set(series["metric"]) == labels
    assert series["metric"]["model_name"] == Path(EMBEDDED_TARGET).name
