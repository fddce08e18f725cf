"""The programs that read the launchd agents and the compose files accept them."""

from __future__ import annotations

import plistlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specd.settings import EMBEDDED_TARGET
from tests.e2e.processes import complaint, run_specd, start_specd

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SERVING = (ROOT / "docs" / "serving.md").read_text()
BIN = Path(sys.executable).parent
WORKERS = ("draft-worker", "target-worker")


def test_compose_files_fit_the_schema() -> None:
    files = sorted(map(str, DEPLOY.glob("*.yaml")))
    assert len(files) == 6
    command = [str(BIN / "check-jsonschema"), "--builtin-schema", "vendor.compose-spec", *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("process", [*WORKERS, "gateway"])
def test_launchd_starts_a_process_as_the_page_installs_it(process: str, tmp_path: Path) -> None:
    (line,) = re.findall(r"^ *(sed .*\.plist) > \S+$", SERVING, re.MULTILINE)
    script = f"process={process}; {line}"
    environment = {"HOME": str(tmp_path), "PATH": f"{BIN}:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-euc", script], cwd=ROOT, env=environment, capture_output=True, timeout=60, check=True
    )
    agent = plistlib.loads(done.stdout)
    assert agent.pop("ProgramArguments")[:2] == [str(BIN / "specd"), process]
    assert agent == {
        "Label": f"specd.{process}",
        "KeepAlive": True,
        "ProcessType": "Interactive",
        "StandardErrorPath": f"{tmp_path}/Library/Logs/specd.{process}.log",
    }


@pytest.mark.thorough
async def test_a_follower_waits_with_what_launchd_gives_it() -> None:
    agent = plistlib.loads((DEPLOY / "launchd" / "specd.target-follower.plist").read_bytes())
    _, command, *arguments = agent["ProgramArguments"]
    assert (agent["Label"], agent["KeepAlive"]) == ("specd.target-follower", True)
    assert arguments[-2:] == ["--follow", "first-mac.local:50054"]
    at = arguments.index("--model") + 1
    arguments[at] = EMBEDDED_TARGET  # without a download
    async with start_specd(command, *arguments) as follower:
        assert (await follower.next_event("waiting for rank 0"))["address"] == "first-mac.local:50054"


@pytest.mark.parametrize("worker", WORKERS)
def test_the_command_line_takes_what_launchd_gives_it(worker: str, tmp_path: Path) -> None:
    agent = plistlib.loads((DEPLOY / "launchd" / f"specd.{worker}.plist").read_bytes())
    _, *arguments = agent["ProgramArguments"]
    assert arguments[-1] in SERVING
    elsewhere = ("--listen", f"unix:{tmp_path}/worker", "--metrics-listen", "none")
    # It comes as far as the download, which tests have no way to.
    done = run_specd(*arguments, *elsewhere, HF_HOME=str(tmp_path), OPENBLAS_NUM_THREADS="1")
    assert done.returncode == 2
    assert (
        f"{arguments[-1]} is not a local directory, and the Hugging Face repository cannot be downloaded"
        in complaint(done.stderr)
    )


async def test_the_gateway_starts_with_what_launchd_gives_it() -> None:
    agent = plistlib.loads((DEPLOY / "launchd" / "specd.gateway.plist").read_bytes())
    _, command, *arguments = agent["ProgramArguments"]
    async with start_specd(command, *arguments, "--listen", "127.0.0.1:0") as gateway:
        assert (await gateway.next_event("ready"))["coordinator"] == "127.0.0.1:50051"  # that of the containers
