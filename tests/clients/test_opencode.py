"""opencode, an agent that writes code: a session with a call of its tool that writes a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specd.cli.supervisor import Stack
from tests.clients.programs import NODE, run, url_of
from tests.gateway.arranged_model import SCRIPTS, WRITTEN

OPENCODE = NODE / "node_modules" / "opencode-linux-x64" / "bin" / "opencode"
# It would ask for lists of models and for plugins.
OFFLINE = {
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
}


@pytest.mark.usefixtures("node")
async def test_opencode_calls_its_tool_and_the_file_is_written(arranged_stack: Stack, tmp_path: Path) -> None:
    if not OPENCODE.exists():
        pytest.skip("opencode is installed here for Linux on x86-64 only")
    model = {"limit": {"context": 4096, "output": 512}}
    options = {"baseURL": url_of(arranged_stack), "apiKey": "none"}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"arranged": model}}
    config = {"provider": {"specd": provider}, "model": "specd/arranged", "small_model": "specd/arranged"}
    project = tmp_path / "project"
    project.mkdir()
    (project / "opencode.json").write_text(json.dumps(config))
    home = {"HOME": str(tmp_path), "PWD": str(project)}
    said = await run(OPENCODE, "run", "write", directory=project, variables={**OFFLINE, **home})
    assert (project / "written.py").read_text() == WRITTEN
    assert SCRIPTS["sunny"] in said  # what the model says to the tool's result
