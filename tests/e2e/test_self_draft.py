"""A target worker that drafts itself, through the service: two processes instead of three."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from specd.v1.sampling_pb2 import ACCEPTANCE_METHOD_COUPLED, ACCEPTANCE_METHOD_REJECTION
from tests.e2e.completions import complete
from tests.e2e.faults import ENVIRONMENT, is_whole, kill
from tests.e2e.faults import complete as complete_undisturbed
from tests.e2e.processes import PATIENCE_SECONDS, start_specd
from tests.e2e.self_drafting import FIELDS, ask, assert_sessions_go_together, assert_survives_a_kill
from tests.raw_client import RawClient
from tests.thorough import examples


@pytest.fixture(scope="module")
async def self_drafting() -> AsyncIterator[Stack]:
    options = {"target-worker": {"self_draft": EMBEDDED_DRAFT}}
    async with Stack(target=EMBEDDED_TARGET, draft="", environment=ENVIRONMENT, options=options) as stack:
        yield stack


@pytest.fixture(scope="module")
async def self_client(self_drafting: Stack) -> AsyncIterator[RawClient]:
    async with RawClient(self_drafting.address) as connected:
        yield connected


async def test_the_model_that_drafts_is_known(self_drafting: Stack, self_client: RawClient) -> None:
    assert self_drafting.draft is None
    info = await self_client.model_info()
    assert (info.draft.name, info.draft_fault) == (Path(EMBEDDED_DRAFT).name, "")
    assert await is_whole(self_drafting)


@pytest.mark.parametrize("temperature", examples([1.0, 0.0, 0.7], 1))
@pytest.mark.parametrize("acceptance", examples([ACCEPTANCE_METHOD_COUPLED, ACCEPTANCE_METHOD_REJECTION], 1))
async def test_rounds_are_those_of_a_draft_worker(
    client: RawClient, self_client: RawClient, prompts: list[str], temperature: float, acceptance: int
) -> None:
    """Tokens, and by position what was proposed and accepted; and with COUPLED the text of the target alone."""
    sampling = {"temperature": temperature, "acceptance": acceptance}
    for number, k in ((1, 1), (2, 4), (3, 8)):
        by_worker = await ask(client, prompts[number], k, **sampling)
        by_target = await ask(self_client, prompts[number], k, **sampling)
        assert by_target.token_ids == by_worker.token_ids
        ours, theirs = by_target.statistics, by_worker.statistics
        assert list(ours.proposed_by_position) == list(theirs.proposed_by_position)
        assert list(ours.accepted_by_position) == list(theirs.accepted_by_position)
        assert ours.proposed_tokens > 0
        if acceptance == ACCEPTANCE_METHOD_COUPLED:
            assert by_target.token_ids == (await ask(client, prompts[number], 0, **sampling)).token_ids


@pytest.mark.thorough
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_sessions_go_together(self_client: RawClient, prompts: list[str], temperature: float) -> None:
    await assert_sessions_go_together(self_client, prompts[1:7], temperature)


@pytest.mark.parametrize(("kill_in_round", "temperature"), examples([(6, 1.0), (3, 0.0), (2, 0.7)], 1))
async def test_a_killed_target_changes_nothing_and_drafts_again(
    self_drafting: Stack, self_client: RawClient, prompts: list[str], kill_in_round: int, temperature: float
) -> None:
    await assert_survives_a_kill(
        self_drafting, self_client, prompts[2], kill_in_round=kill_in_round, temperature=temperature
    )


@pytest.mark.thorough
async def test_sessions_continue_on_a_target_that_comes_back_without_a_draft(prompts: list[str]) -> None:
    """With REJECTION, for which the first target has kept the distributions of its tokens."""
    options = {"target-worker": {"self_draft": EMBEDDED_DRAFT}}
    async with (
        Stack(target=EMBEDDED_TARGET, draft="", environment=ENVIRONMENT, options=options) as stack,
        RawClient(stack.address) as client,
    ):

        def restart(number: int) -> None:
            if number == 8:
                stack.target.command.remove(f"--self-draft={EMBEDDED_DRAFT}")
                kill(stack.target)

        wanted: dict[str, Any] = {"max_tokens": 160, "temperature": 1.0, "acceptance": ACCEPTANCE_METHOD_REJECTION}
        first, *others = await asyncio.gather(
            complete_undisturbed(client, prompts[1], **wanted, on_round=restart),
            *(complete_undisturbed(client, prompt, **wanted) for prompt in prompts[2:7]),
        )
    assert sum(response.round.proposed for response in first.responses[1:8]) > 0
    assert first.statistics.target_replays >= 1
    for each in (first, *others):
        assert len(each.token_ids) == 160
        assert each.responses[-1].round.proposed == 0


async def test_up_starts_no_draft_worker(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/coordinator"
    async with (
        asyncio.timeout(PATIENCE_SECONDS),
        start_specd("up", "--draft-in-target", "--no-metrics", "--listen", address) as up,
    ):
        event = await up.next_event("ready", process="coordinator")
        assert event["draft"].endswith(Path(EMBEDDED_DRAFT).name)
        async with RawClient(address) as client:
            completion = await complete(client, "def add(a, b):", num_draft_tokens=4, **FIELDS)
            assert completion.statistics.proposed_tokens > 0
