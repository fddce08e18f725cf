"""The program that checks a cluster: against a real service of this machine, and where there is no cluster."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from deploy.helm.check_cluster import run_command
from deploy.helm.cluster import Cluster
from deploy.helm.service_checks import PROMPTS, ServiceChecks
from specd.rpc.credentials import PLAIN
from specd.startup_error import StartupError
from tests.deploy.chart import ROOT, helm
from tests.e2e.processes import environment, start_specd


def check(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deploy.helm.check_cluster", *arguments]
    variables = environment(**variables)
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.thorough
async def test_texts_are_the_same_while_a_target_is_killed(tmp_path: Path) -> None:
    """Two targets, one of which is killed; `specd up` starts it again, as Kubernetes does."""
    address = f"unix:{tmp_path}/coordinator"
    async with start_specd("up", "--targets", "2", "--no-metrics", "--listen", address, "--draft", "lookup") as up:
        await up.next_event("ready", process="coordinator")
        children = psutil.Process(up.pid).children()
        targets = [child.pid for child in children if "target-worker" in child.cmdline()]
        assert len(targets) == 2
        report = tmp_path / "report.json"
        kill = ("--disturb", f"kill -9 {targets[0]}")
        done = check("--address", address, "--max-tokens", "24", "--json", str(report), *kill)
        assert done.returncode == 0, done.stdout + done.stderr
        compared, disturbed = json.loads(report.read_text())
        assert compared["figures"]["equal"] == compared["figures"]["texts"] == len(PROMPTS)
        assert compared["figures"]["accepted tokens"] > 0
        assert disturbed["figures"]["moved or replayed"] > 0
        assert disturbed["figures"]["failed"] == disturbed["figures"]["wrong"] == 0
        assert "passed  texts during: kill -9" in done.stdout

        # Neither another text nor a command that fails may pass.
        async with ServiceChecks(address, PLAIN, prompts=PROMPTS[:1], max_tokens=8) as checks:
            assert (await checks.compare()).passed
            short: Any = {"num_sessions": 1, "seconds_after": 0.0}
            outcome = await checks.under_load("a command", partial(run_command, "false"), **short)
            assert (outcome.passed, outcome.figures["wrong"]) == (False, 0)
            assert outcome.problem == "the disturbance failed: 'false' ended with 1"
            checks.expected[0] += "!"
            outcome = await checks.under_load("a text", partial(run_command, "true"), **short)
            assert not outcome.passed
            assert "texts are not those of the undisturbed service" in outcome.problem


def test_a_service_that_is_away_is_a_check_that_failed(tmp_path: Path) -> None:
    done = check("--address", f"unix:{tmp_path}/nothing")
    assert done.returncode == 1
    assert "FAILED  texts with and without speculation" in done.stdout


def test_it_says_at_once_that_there_is_no_cluster(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "helm").symlink_to(helm())
    nowhere = {"KUBECONFIG": str(tmp_path / "none"), "PATH": f"{programs}:/usr/bin:/bin"}
    if shutil.which("kubectl") is None:
        done = check(**nowhere)
        assert "there is no kubectl on the path" in done.stderr
    else:
        done = check(**nowhere)
        assert "kubectl reaches no cluster" in done.stderr
        assert "--address" in done.stderr
    assert done.returncode == 2
    assert done.stdout == ""


async def test_it_says_at_once_which_program_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StartupError, match="there is no helm on the path"):
        await Cluster("release", "namespace").check()


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")
async def test_the_programs_know_its_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a cluster they all fail, and for that reason alone."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "helm").symlink_to(helm())
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    cluster = Cluster("release", "namespace")
    commands = [
        cluster.install([], "1m"),
        cluster.uninstall(),
        cluster.kill_a_target(),
        cluster.update_targets(),
        cluster.coordinator().__aenter__(),
        cluster.kubectl("delete", "pod", "name", "--grace-period=1", "--wait=true"),
        cluster.kubectl("rollout", "restart", "deployment/name"),
        cluster.kubectl("rollout", "status", "deployment/name", "--timeout=30m"),
        cluster.kubectl("port-forward", "pod/name", ":50051"),
    ]
    for command in commands:
        with pytest.raises(RuntimeError, match=r"refused|unreachable"):
            await command
