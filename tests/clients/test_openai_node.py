"""openai-node; tests/gateway has openai-python."""

from __future__ import annotations

import json

from specd.supervisor import Stack
from tests.clients.programs import NODE, run, url_of
from tests.gateway.arranged_model import SCRIPTS


async def test_openai_node_works_with_another_address(node: str, arranged_stack: Stack) -> None:
    await run(node, "--test", "openai.test.mjs", directory=NODE, variables={"SPECD_URL": url_of(arranged_stack)})


async def test_openai_node_tries_again_until_the_coordinator_is_back(node: str, arranged_stack: Stack) -> None:
    assert arranged_stack.coordinator.process is not None
    arranged_stack.coordinator.process.kill()
    answered = json.loads(
        await run(node, "retries.mjs", directory=NODE, variables={"SPECD_URL": url_of(arranged_stack)})
    )
    assert answered["text"] == SCRIPTS["hello"]
    *refused, last = answered["statuses"]
    assert last == 200
    assert refused
    assert set(refused) == {503}
