"""LiteLLM, in an environment of its own: it brings much."""

from __future__ import annotations

from pathlib import Path

from specd.supervisor import Stack
from tests.clients.programs import install, program, run, url_of

SCRIPT = Path(__file__).parent / "litellm_client.py"


async def test_litellm_works_with_another_address(arranged_stack: Stack, tmp_path: Path) -> None:
    uv = program("uv")
    await install(uv, "sync", "--quiet", "--script", SCRIPT, directory=tmp_path)
    output = await run(
        uv, "run", "--quiet", "--offline", "--script", SCRIPT, url_of(arranged_stack), directory=tmp_path
    )
    assert output.endswith("LiteLLM is served\n")
