"""opencode in a session with a call of its tool that writes a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from specd.supervisor import Stack
from tests.clients.opencode import Opencode
from tests.clients.programs import url_of
from tests.gateway.arranged_model import SCRIPTS, WRITTEN


@pytest.mark.usefixtures("node")
async def test_opencode_calls_its_tool_and_the_file_is_written(arranged_stack: Stack, tmp_path: Path) -> None:
    opencode = Opencode(tmp_path, url=url_of(arranged_stack), model="arranged", context_length=4096)
    said = await opencode.run("write")
    assert (opencode.project / "written.py").read_text() == WRITTEN
    assert SCRIPTS["sunny"] in said  # what the model says to the tool's result
