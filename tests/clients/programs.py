"""Programs that call the gateway, as their users start them."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from specd.supervisor import Stack

NODE = Path(__file__).parent / "node"
_MOST_SECONDS = 240
# Messages of uv and npm when they cannot reach an index.
_NO_INDEX = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "ENETUNREACH", "Failed to fetch")


async def run(
    *command: str | Path, directory: Path, exit_code: int = 0, variables: Mapping[str, str] | None = None
) -> str:
    """Run a program to its end, and return what it writes to standard output. Fails if the exit code is another one."""
    code, output, errors = await _end_of(*command, directory=directory, variables=variables or {})
    assert code == exit_code, f"{command[0]} ended with {code}\n{output}\n{errors}"
    return output


async def install(*command: str | Path, directory: Path) -> None:
    """Run a program that installs something. Skips the test if there is no index to install from."""
    code, output, errors = await _end_of(*command, directory=directory, variables={})
    if code and any(sign in errors for sign in _NO_INDEX):
        pytest.skip(f"{command[0]} reaches no index: {errors[-300:]}")
    assert code == 0, f"{command} ended with {code}\n{output}\n{errors}"


async def _end_of(*command: str | Path, directory: Path, variables: Mapping[str, str]) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=directory,
        env={**os.environ, **variables},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_MOST_SECONDS):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


def program(name: str) -> str:
    """Return the path of a program. Skips the test if there is none."""
    path = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def url_of(stack: Stack) -> str:
    """Return the base URL that clients of OpenAI's API are given."""
    assert stack.gateway is not None
    return f"http://{stack.gateway.facts['address']}/v1"
