"""What the README shows works as it says."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from specd.supervisor import Stack

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


async def run(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=ROOT
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return output.decode()


def test_the_python_example_is_the_one_in_the_readme() -> None:
    shown = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert shown is not None
    assert shown[1] == (ROOT / "examples" / "generate.py").read_text()


async def test_the_python_example_runs(stack: Stack) -> None:
    output = await run(sys.executable, "examples/generate.py", stack.address)
    assert re.search(r"\d+ of \d+ proposed tokens were accepted\n$", output)


async def test_the_shell_example_runs(stack: Stack) -> None:
    """The call that the README makes with grpcurl and buf curl: by reflection, with this JSON."""
    line = re.search(r"^buf (curl .*) -d '(.*)' http://127.0.0.1:50051/(\S+)$", README, re.MULTILINE)
    assert line is not None
    options, body, method = line.groups()
    buf = shutil.which("buf", path=str(Path(sys.executable).parent))
    assert buf is not None
    output = await run(buf, *options.split(), "-d", body, f"http://{stack.address}/{method}")
    decoder, messages = json.JSONDecoder(), []
    while output.strip():
        message, end = decoder.raw_decode(output.lstrip())
        messages.append(message)
        output = output.lstrip()[end:]
    assert messages[-1]["statistics"]["generatedTokens"] == json.loads(body)["max_tokens"]

    grpcurl = re.search(r"^grpcurl -plaintext -d '(.*)' 127.0.0.1:50051 (\S+)$", README, re.MULTILINE)
    assert grpcurl is not None
    assert grpcurl.groups() == (body, method)


def test_the_tree_names_every_module_and_no_other() -> None:
    shown = README.split("## The tree")[1]
    names = {path.name for part in ("coordinator", "specd", "specd/worker") for path in (ROOT / part).glob("*.py")}
    names -= {"__init__.py", "__main__.py"}
    assert {name for name in names if name not in shown} == set()
    in_tree = set(re.findall(r"\b(\w+\.py)\b", shown))
    existing = {path.name for path in ROOT.rglob("*.py") if ".venv" not in path.parts}
    assert in_tree - existing == set()


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_links_lead_somewhere(path: str) -> None:
    assert (ROOT / path).exists()
