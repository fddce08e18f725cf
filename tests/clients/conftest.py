"""Running stacks for clients that others have written, and what those are installed with."""

from __future__ import annotations

import pytest

from tests.clients.programs import NODE, install, program, run
from tests.gateway.conftest import arranged_stack, stack

_OLDEST_NODE = 20

__all__ = ["arranged_stack", "node", "stack"]


@pytest.fixture(scope="session")
async def node() -> str:
    """The path of node, with the packages of node/package-lock.json installed."""
    path = program("node")
    version = await run(path, "--version", directory=NODE)
    if int(version.removeprefix("v").partition(".")[0]) < _OLDEST_NODE:
        pytest.skip(f"llmprobe needs Node {_OLDEST_NODE} or later, and this is {version.strip()}")
    await install(program("npm"), "ci", "--ignore-scripts", directory=NODE)
    return path
