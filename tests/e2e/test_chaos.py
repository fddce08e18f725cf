"""The benchmark of faults, in small: after any fault no text is wrong and nothing is left."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from tests.e2e.processes import environment

ROOT = Path(__file__).parents[2]
FAULTS = {"draft": 3, "target": 2, "coordinator": 1}
OPTIONS = ["--client-deaths=3", "--calm-seconds=2", "--soak-seconds=4", "--requests=8", "--sessions=3"]


@pytest.mark.thorough
async def test_no_text_is_wrong_whatever_is_harmed(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "benchmarks.chaos", f"--json={path}"),
        *(f"--{name}-faults={count}" for name, count in FAULTS.items()),
        *OPTIONS,
        cwd=ROOT,
        env=environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    report = json.loads(path.read_text())
    phases = [f"{count} {name} faults" for name, count in FAULTS.items()]
    for phase, count in zip(phases, FAULTS.values(), strict=True):
        assert sum(report[phase]["faults"].values()) == count
    for phase in ("no faults", *phases, "soak"):
        assert report[phase]["right"] > 0
        assert report[phase]["wrong"] == 0
        assert report[phase]["failed"] == {}
    assert report["3 client deaths"]["active_sessions"] == 0
    assert report["soak"]["counters_are_the_sums"]
