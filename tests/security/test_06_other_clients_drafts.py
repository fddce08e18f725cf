"""Check 6: no client changes another's drafts or learns of its text by them; nor does anyone change a token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from specd.v1.generation_pb2 import (
    DRAFT_SOURCE_LOOKUP,
    DRAFT_SOURCE_MODEL,
    GenerateRequest,
    SessionStatistics,
    StopConditions,
)
from specd.v1.sampling_pb2 import SamplingParameters
from tests.e2e.calls import responses_to
from tests.security.owners import Owner, stack_with_owners

pytestmark = pytest.mark.alone

# Clients of whom nothing is known yet, by attempt.
ATTEMPTS = [[f"newcomer-{attempt}-{i}" for i in range(3)] for attempt in range(3)]
NEWCOMERS = [name for names in ATTEMPTS for name in names]
PROMPT = "class Vector:\n    def __add__(self, other):\n"


@pytest.fixture(scope="module")
async def owners(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, Owner]]:
    names: dict[str, dict[str, int]] = {name: {} for name in ("alice", "mallory", *NEWCOMERS)}
    async with stack_with_owners(tmp_path_factory.mktemp("tokens"), names) as (_, running):
        yield running


async def generate(owner: Owner, **fields: Any) -> tuple[list[int], SessionStatistics]:
    """Return the tokens of a completion, and its statistics."""
    fields = {"text": PROMPT, "max_tokens": 64, "stop": StopConditions(ignore_eos=True), **fields}
    responses = await responses_to(owner.generation.Generate(GenerateRequest(**fields)))
    return [token.id for response in responses for token in response.tokens], responses[-1].statistics


async def test_a_client_that_spoils_acceptance_spoils_its_own(owners: dict[str, Owner]) -> None:
    """Learning is by temperature, so both ask for the same one; top_k decides whether the text can be guessed."""

    async def drafted(owner: Owner, top_k: int, max_tokens: int, seed: int = 1) -> tuple[list[int], int]:
        sampling = SamplingParameters(temperature=100, top_k=top_k, seed=seed)
        token_ids, statistics = await generate(
            owner, draft_source=DRAFT_SOURCE_MODEL, sampling=sampling, max_tokens=max_tokens
        )
        return token_ids, statistics.proposed_tokens

    # A session soon goes by its own rounds, so it is its first tokens that show what it was told.
    undisturbed, _ = await drafted(owners["alice"], top_k=1, max_tokens=8)
    counts = []
    # The machine's pace also decides how much is drafted. So three clients are counted together, and another three are
    # asked if the planner has drafted little for the first.
    for names in ATTEMPTS:
        of_mallory = of_others = 0
        for name in names:
            for seed in range(10):
                await drafted(owners["mallory"], top_k=200, max_tokens=64, seed=seed)
            token_ids, num_proposed = await drafted(owners[name], top_k=1, max_tokens=8)
            of_others += num_proposed
            spoilt, num_proposed = await drafted(owners["mallory"], top_k=1, max_tokens=8)
            of_mallory += num_proposed
            assert undisturbed == spoilt == token_ids
        counts.append((of_others, of_mallory))
        if of_others > 1.3 * of_mallory:
            return
    raise AssertionError(f"(of others, of mallory): {counts}")


async def test_what_was_said_to_one_client_is_looked_up_for_no_other(owners: dict[str, Owner]) -> None:
    """With a given k, look-up depends on what it reads and on nothing else."""
    fields: dict[str, Any] = {"draft_source": DRAFT_SOURCE_LOOKUP, "num_draft_tokens": 8}
    token_ids, before = await generate(owners["mallory"], **fields)
    for _ in range(2):
        said, _ = await generate(owners["alice"], prediction_token_ids={"ids": token_ids}, **fields)
        assert said == token_ids
    again, after = await generate(owners["mallory"], **fields)
    assert again == token_ids
    assert [*after.proposed_by_position] == [*before.proposed_by_position]
    _, own = await generate(owners["mallory"], prediction_token_ids={"ids": token_ids}, **fields)
    # Had it been read, it would have been found.
    assert own.sources["prediction"].accepted > 0
    assert own.accepted_tokens > before.accepted_tokens
