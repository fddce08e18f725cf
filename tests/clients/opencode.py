"""opencode, an agent that writes code, as its users set it up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.programs import NODE, run

_PROGRAM = NODE / "node_modules" / "opencode-linux-x64" / "bin" / "opencode"
# It would ask for lists of models and for plugins.
_OFFLINE = {
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
}


class Opencode:
    """A project of opencode's, in a home directory of its own. Skips the test where there is no program.

    `settings` are others of opencode.json.
    """

    def __init__(self, home: Path, *, url: str, model: str, context_length: int, **settings: Any) -> None:
        if not _PROGRAM.exists():
            pytest.skip("opencode is installed here for Linux on x86-64 only")
        self._home = home
        self.project = home / "project"
        self.project.mkdir()
        models = {model: {"temperature": True, "limit": {"context": context_length, "output": 512}}}
        options = {"baseURL": url, "apiKey": "none"}
        provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": models}
        named = {"model": f"specd/{model}", "small_model": f"specd/{model}"}
        (self.project / "opencode.json").write_text(json.dumps({"provider": {"specd": provider}, **named, **settings}))

    async def run(self, *arguments: str) -> str:
        """Run `opencode run`, and return what the model says."""
        home = {"HOME": str(self._home), "PWD": str(self.project)}
        return await run(_PROGRAM, "run", *arguments, directory=self.project, variables={**_OFFLINE, **home})
