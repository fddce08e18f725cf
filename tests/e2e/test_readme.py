"""The examples of the README and of docs/api.md run."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
from pathlib import Path

from specd.supervisor import Stack

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
API = (ROOT / "docs" / "api.md").read_text()


async def run(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=ROOT
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return output.decode()


async def test_the_python_example_runs(stack: Stack) -> None:
    output = await run(sys.executable, "examples/generate.py", stack.address)
    assert re.search(r"\d+ of \d+ proposed tokens were accepted\n$", output)


async def test_the_shell_example_runs(stack: Stack) -> None:
    """The call that both pages make with grpcurl, and one with buf curl: by reflection, with this JSON."""
    line = re.search(r"^buf (curl .*) -d '(.*)' http://127.0.0.1:50051/(\S+)$", API, re.MULTILINE)
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

    for page in (README, API):
        grpcurl = re.search(r"^grpcurl -plaintext -d '(.*)' 127.0.0.1:50051 (\S+)$", page, re.MULTILINE)
        assert grpcurl is not None
        assert grpcurl.groups() == (body, method)
