"""Codex, an agent that runs commands, as its users set it up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.programs import NODE, run

_PROGRAM = NODE / "node_modules" / "codex-linux-x64" / "vendor" / "x86_64-unknown-linux-musl" / "bin" / "codex"


class Codex:
    """A project of Codex', in a home directory of its own. Skips the test where there is no program."""

    def __init__(self, home: Path, *, url: str, model: str) -> None:
        if not _PROGRAM.exists():
            pytest.skip("Codex is installed here for Linux on x86-64 only")
        self._home = home
        self.project = home / "project"
        self.project.mkdir()
        settings = {"model": model, "model_provider": "specd"}
        provider = {"name": "specd", "base_url": url, "wire_api": "responses"}
        lines = [
            *(f"{name} = {json.dumps(value)}" for name, value in settings.items()),
            "[model_providers.specd]",
            *(f"{name} = {json.dumps(value)}" for name, value in provider.items()),
        ]
        (home / "config.toml").write_text("\n".join(lines))

    async def run(self, said: str) -> str:
        """Run `codex exec` without its sandbox, which wants a package; return what the model says."""
        home = {"HOME": str(self._home), "CODEX_HOME": str(self._home)}
        options = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
        return await run(_PROGRAM, "exec", *options, said, directory=self.project, variables=home)
