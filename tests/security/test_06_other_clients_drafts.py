"""Check 6: no client changes another's drafts or learns of its text by them; nor does anyone change a token."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
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

MANY_TOKENS = 100
PROMPT = "class Vector:\n    def __add__(self, other):\n"


@pytest.fixture(scope="module")
async def owners(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, Owner]]:
    async with stack_with_owners(tmp_path_factory.mktemp("tokens"), {"alice": {}, "mallory": {}}) as (_, running):
        yield running


async def generate(owner: Owner, **fields: Any) -> tuple[list[int], SessionStatistics]:
    """Return the tokens of a completion, and its statistics."""
    fields = {"text": PROMPT, "max_tokens": 64, "stop": StopConditions(ignore_eos=True), **fields}
    responses = await responses_to(owner.generation.Generate(GenerateRequest(**fields)))
    return [token.id for response in responses for token in response.tokens], responses[-1].statistics


async def test_a_client_that_spoils_acceptance_spoils_its_own(tmp_path: Path) -> None:
    """The coordinator keeps the acceptance that it learnt of each client.

    How much it drafts then also depends on the machine's pace, so that is left to unit tests. Learning is by
    temperature, so all ask for the same one; top_k decides whether the text can be guessed.
    """
    texts: dict[str, list[int]] = {}
    names: dict[str, dict[str, int]] = {"alice": {}, "mallory": {}, "bob": {}}
    async with stack_with_owners(tmp_path, names, cache=tmp_path / "cache") as (_, owners):
        for name, top_k in (("alice", 1), ("mallory", 200), ("bob", 1)):
            num_proposed = 0
            for seed in range(50):
                sampling = SamplingParameters(temperature=100, top_k=top_k, seed=seed)
                text, statistics = await generate(owners[name], draft_source=DRAFT_SOURCE_MODEL, sampling=sampling)
                texts.setdefault(name, text)
                num_proposed += statistics.proposed_tokens
                if num_proposed >= MANY_TOKENS:
                    break
            assert num_proposed >= MANY_TOKENS, name
    assert texts["alice"] == texts["bob"] != texts["mallory"]
    (kept,) = (tmp_path / "cache" / "specd").glob("planner-*.json")
    clients = json.loads(kept.read_text())["clients"]
    assert len(clients) == 3
    acceptance = {name: accepted_part(clients[sha256(name.encode()).hexdigest()[:16]]) for name in owners}
    assert acceptance["mallory"] < 0.5 < 0.8 < acceptance["alice"]
    # Had it learnt anything from mallory, it would expect less.
    assert acceptance["bob"] == pytest.approx(acceptance["alice"], abs=0.1)


def accepted_part(pools: dict[str, tuple[float, list[float], list[float]]]) -> float:
    """Return the part of a client's tried draft tokens that was accepted."""
    counts = [(sum(tried), sum(passed)) for kind, (_, tried, passed) in pools.items() if " accepted " in kind]
    return sum(passed for _, passed in counts) / sum(tried for tried, _ in counts)


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
