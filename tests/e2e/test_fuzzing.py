"""With any bytes, every call and request ends with a suitable status, and nothing else happens."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.fuzz_requests import METHODS
from tests.e2e.fuzzing import fuzz
from tests.e2e.http_fuzzing import POSTS


async def test_random_messages_do_no_harm(tmp_path: Path) -> None:
    """`make fuzz` sends more of them, and others each time."""
    result, problems = await fuzz(tmp_path, seed=3, num_messages=1000)
    assert problems == []
    assert result.num_messages >= 1000
    reached = {method for method, _ in result.codes}
    rpcs = {f"/{method.containing_service.full_name}/{method.name}" for _, method in METHODS}
    assert {method for method in reached if method.startswith("/")} == rpcs
    assert reached >= {f"POST {path}" for path in POSTS}
    assert result.codes["POST /v1/completions", "200"] > 0
    assert result.codes["/specd.v1.GenerationService/Generate", "OK"] > 0
