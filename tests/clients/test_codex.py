"""Codex in a session with a call of its tool that runs a command."""

from __future__ import annotations

from pathlib import Path

import pytest

from specd.supervisor import Stack
from tests.clients.codex import Codex
from tests.clients.programs import url_of
from tests.gateway.arranged_model import RUN_BY_CODEX, SCRIPTS


@pytest.mark.usefixtures("node")
async def test_codex_calls_its_tool_and_the_command_runs(arranged_stack: Stack, tmp_path: Path) -> None:
    codex = Codex(tmp_path, url=url_of(arranged_stack), model="arranged")
    said = await codex.run("execute a command")
    assert (codex.project / "written.txt").read_text() == RUN_BY_CODEX
    assert SCRIPTS["sunny"] in said  # what the model says to the tool's result
