"""The embedded pair, through real processes: Generate streams what mlx-lm decodes, for every k, draft and neighbour.

Sampling too: seed and prompt decide what comes out, and nothing else does. The reference for it is mlx-lm's own
decoding with the target alone, whose random draw is replaced by ours. What `kill -9` of a worker does to a session is
in test_kills.py.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from tokenizers import Tokenizer as HuggingFaceTokenizer

from specd.text.tokenizer import Tokenizer
from specd.v1.generation_pb2 import SessionStatistics
from specd.v1.sampling_pb2 import SamplingParameters
from specd.worker.model.loader import LoadedModel
from tests.conftest import TWENTY_PROMPTS
from tests.e2e.conftest import DRAFT_KINDS
from tests.e2e.reference import sample_with_mlx_lm
from tests.raw_client import RawClient

MAX_TOKENS = 32
SEED = 1_000_003


@dataclass(frozen=True)
class Case:
    """A prompt and a temperature, and some of the ks; most cases run with `--thorough` only."""

    name: str
    prompt: str
    temperature: float
    ks: tuple[int, ...]
    is_thorough: bool


def cases() -> Iterator[Case]:
    """Every prompt greedily, and every other at each of two temperatures in turn; every k meets each temperature."""
    for i, path in enumerate(TWENTY_PROMPTS):
        yield Case(path.stem, path.read_text(), 0.0, (2 * (i // 4) % 9, (2 * (i // 4) + 1) % 9), is_thorough=i % 4 > 0)
    for i, path in enumerate(TWENTY_PROMPTS[1::2]):
        temperature, first = (0.7, 1.0)[i % 2], (0, 3, 0, 3, 6)[i // 2]
        ks = (first, first + 1, first + 2)
        yield Case(f"{path.stem} at {temperature}", path.read_text(), temperature, ks, is_thorough=4 <= i < 8)


CASES = list(cases())
USUAL = [case for case in CASES if not case.is_thorough]
Reference = Callable[[Case], list[int]]


@pytest.fixture(scope="module")
def reference(target: LoadedModel, tokenizer: Tokenizer) -> Reference:
    """The tokens of the target alone for a case, up to and with an end token."""

    @functools.cache
    def compute(case: Case) -> list[int]:
        prompt_ids = tokenizer.encode(case.prompt)
        return sample_with_mlx_lm(target, prompt_ids, MAX_TOKENS, temperature=case.temperature, seed=SEED)

    return compute


async def generate(client: RawClient, case: Case, k: int | None) -> tuple[list[int], SessionStatistics]:
    sampling = SamplingParameters(temperature=case.temperature, seed=SEED)
    call = client.generate(case.prompt, max_tokens=MAX_TOKENS, num_draft_tokens=k, sampling=sampling)
    responses = [response async for response in call]
    assert {response.seed for response in responses} == {SEED}
    return [token.id for response in responses for token in response.tokens], responses[-1].statistics


def test_there_are_prompts_of_every_length(tokenizer: Tokenizer) -> None:
    lengths = [len(tokenizer.encode(path.read_text())) for path in TWENTY_PROMPTS]
    assert len(lengths) >= 20
    assert sum(length < 300 for length in lengths) >= 8
    assert sum(500 <= length < 1500 for length in lengths) >= 2
    assert sum(length >= 1500 for length in lengths) >= 2


def test_every_k_meets_every_temperature() -> None:
    for temperature in (0.0, 0.7, 1.0):
        assert {k for case in USUAL if case.temperature == temperature for k in case.ks} == set(range(9))


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[pytest.mark.thorough] if case.is_thorough else ()) for case in CASES],
)
async def test_every_k_gives_the_tokens_of_mlx_lm(client: RawClient, reference: Reference, case: Case) -> None:
    for k in (*case.ks, None):
        token_ids, statistics = await generate(client, case, k)
        assert token_ids == reference(case), f"k = {k}"
        assert statistics.draft_fault == ""
        assert k is None or (statistics.proposed_tokens > 0) == (k > 0)


async def test_every_draft_gives_the_tokens_of_mlx_lm(odd_client: RawClient, reference: Reference) -> None:
    kind = odd_client.draft_kind  # type: ignore[attr-defined]
    accepted = proposed = 0
    first = DRAFT_KINDS.index(kind)
    # Every sixth, others for each draft: with these each takes some seconds.
    for i, case in enumerate(USUAL[first::6]):
        token_ids, statistics = await generate(odd_client, case, (1, 8, 3)[i])
        assert token_ids == reference(case)
        assert statistics.proposed_tokens > 0
        if case.temperature == 0:
            if kind == "always wrong":
                assert statistics.accepted_tokens == 0
            if kind == "always right" and len(token_ids) == MAX_TOKENS:
                assert statistics.accepted_tokens == statistics.proposed_tokens
        accepted += statistics.accepted_tokens
        proposed += statistics.proposed_tokens
    low, high = {"random": (0, 0.1), "always right": (0.97, 1), "always wrong": (0, 0.1)}[kind]  # up to end tokens
    assert low <= accepted / proposed <= high


async def test_sessions_at_the_same_time_do_not_mix(client: RawClient, reference: Reference) -> None:
    """Sessions of all lengths, temperatures and ks at once, some of them given up on the way."""

    async def give_up(case: Case) -> None:
        sampling = SamplingParameters(temperature=1.5)
        async for _ in client.generate(case.prompt, max_tokens=MAX_TOKENS, num_draft_tokens=3, sampling=sampling):
            return

    async with asyncio.TaskGroup() as tasks:
        for case in USUAL[::4]:
            tasks.create_task(give_up(case))
        running = {
            case: tasks.create_task(generate(client, case, i % 9 if i % 9 else None))
            for i, case in enumerate(USUAL[::2])
        }
    for case, task in running.items():
        assert task.result()[0] == reference(case)


async def test_text_is_the_decoding_of_the_tokens(client: RawClient, target: LoadedModel, prompts: list[str]) -> None:
    tokenizer = HuggingFaceTokenizer.from_str(target.tokenizer_json.decode())
    for prompt in prompts[:16:3]:
        responses = [r async for r in client.generate(prompt, max_tokens=MAX_TOKENS)]
        token_ids = [token.id for r in responses for token in r.tokens]
        text = "".join(r.text for r in responses)
        assert text == "".join(token.text for r in responses for token in r.tokens)
        assert prompt + text == tokenizer.decode([*tokenizer.encode(prompt).ids, *token_ids])
