"""Schemathesis, which makes requests up from the OpenAPI document: no request makes the gateway fail."""

from __future__ import annotations

from pathlib import Path

from specd.supervisor import Stack
from tests.clients.programs import install, program, run, url_of

SCHEMATHESIS = ("tool", "run", "--from", "schemathesis==4.32.5", "schemathesis")
# The same requests each time, as many as there is time for.
BOUNDED = ("--max-examples", "30", "--max-time", "60", "--generation-deterministic")


async def test_no_request_that_the_document_suggests_is_answered_by_a_failure(
    arranged_stack: Stack, tmp_path: Path
) -> None:
    uv = program("uv")
    await install(uv, *SCHEMATHESIS, "--version", directory=tmp_path)
    document = f"{url_of(arranged_stack).removesuffix('/v1')}/openapi.json"
    options = ("--checks", "not_a_server_error", *BOUNDED, "--no-color")
    output = await run(uv, *SCHEMATHESIS, "run", document, *options, directory=tmp_path)
    assert "11 selected / 11 total" in output
