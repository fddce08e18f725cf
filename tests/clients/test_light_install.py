"""`pip install specd` alone: the client and the command line, for servers elsewhere."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specd.supervisor import Stack
from tests.e2e.processes import environment

ROOT = Path(__file__).parents[2]
HEAVY = (
    *("mlx", "mlx_lm", "transformers", "tokenizers", "huggingface_hub", "numpy", "lief", "scipy_openblas32"),
    *("starlette", "uvicorn", "grpc_reflection", "jinja2"),
)
FIND_HEAVY = f"import importlib.util as i; print([name for name in {HEAVY} if i.find_spec(name)])"
CHAT = """
import sys
from specd import Client
with Client(sys.argv[1]) as client, client.session() as session:
    print(session.chat("def area(r):", max_tokens=8).completion().statistics.generated_tokens)
"""


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel of this tree, and what it asks for without extras."""
    directory = tmp_path_factory.mktemp("light")
    uv = shutil.which("uv", path=str(Path(sys.executable).parent))
    assert uv is not None
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(directory)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = directory.glob("*.whl")
    programs = directory / "venv" / "bin"
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, directory / "venv"], check=True)
    install = [
        uv,
        "pip",
        "install",
        "--quiet",
        "--python",
        str(programs / "python"),
        "-c",
        "requirements.lock",
        str(wheel),
    ]
    subprocess.run(install, cwd=ROOT, check=True)
    return programs


def run(directory: Path, *command: object) -> subprocess.CompletedProcess[str]:
    variables = environment()
    variables.pop("PYTHONPATH", None)  # of this tree
    return subprocess.run(
        [str(part) for part in command],
        cwd=directory,
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_it_has_nothing_that_computes_or_serves(light: Path) -> None:
    done = run(light, light / "python", "-c", FIND_HEAVY)
    assert (done.stdout, done.stderr) == ("[]\n", "")


async def test_it_generates_through_a_server(light: Path, stack: Stack) -> None:
    asked = ["generate", "--address", stack.address, "--max-tokens", "24", "def fibonacci(n):"]
    whole = run(light, sys.executable, "-m", "specd", *asked)
    done = run(light, light / "specd", *asked)
    assert done.returncode == 0, done.stderr
    assert done.stdout == whole.stdout != ""

    assert run(light, light / "specd", "health", stack.address).returncode == 0
    watched = run(light, light / "specd", "top", stack.coordinator.facts["metrics_address"], "--once")
    assert watched.stdout.startswith("specd top "), watched.stderr
    example = run(light, light / "python", ROOT / "examples" / "generate.py", stack.address)
    assert example.stdout.endswith(" proposed tokens were accepted\n"), example.stderr
    chat = run(light, light / "python", "-c", CHAT, stack.address)
    assert chat.stdout == "8\n", chat.stderr


@pytest.mark.parametrize("command", ["up", "demo", "bench", "coordinator", "gateway", "target-worker", "draft-worker"])
def test_a_server_says_what_to_install(light: Path, command: str) -> None:
    done = run(light, light / "specd", command)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "specd: this command needs specd's servers, which are not installed: pip install 'specd[serve]'"
    ]
