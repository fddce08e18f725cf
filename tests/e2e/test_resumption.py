"""Generations that continue after their stream broke, with the protocol's own messages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
from grpc import StatusCode

from specd.errors import error_info
from specd.supervisor import Stack
from specd.v1.generation_pb2 import GenerateResponse, Resumption, StopConditions
from specd.v1.sampling_pb2 import ACCEPTANCE_METHOD_REJECTION, SamplingParameters
from tests.e2e.calls import END_TOKEN, VOCABULARY_SIZE, error_of, responses_to
from tests.e2e.completions import PROMPT
from tests.e2e.faults import SEED
from tests.raw_client import RawClient
from tests.thorough import examples

MAX_TOKENS = 40

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"sampling": SamplingParameters(temperature=0.9, top_p=0.95, seed=SEED)},
    "penalties": {
        "sampling": SamplingParameters(
            temperature=0.8, seed=SEED, repetition_penalty=1.3, frequency_penalty=0.4, penalty_context_size=0
        )
    },
    "log-probabilities": {"top_log_probabilities": 3, "sampling": SamplingParameters(temperature=0.7, seed=SEED)},
    "min_tokens": {
        "sampling": SamplingParameters(temperature=1.0, seed=SEED),
        "stop": StopConditions(min_tokens=30, token_ids=list(range(1, 400)), strings=["\n"]),
    },
    "stop string": {
        "sampling": SamplingParameters(temperature=1.0, seed=SEED),
        "stop": StopConditions(strings=["no such text", "self."], min_tokens=12, ignore_eos=True),
    },
    "characters of several tokens": {
        "prompt": "# Schöne Grüße: ÄÖÜ 你好, 世界 🙂🙃\ntexts = ['你好",
        "sampling": SamplingParameters(temperature=1.0, seed=SEED),
    },
}


def tokens_of(responses: Sequence[GenerateResponse]) -> list[Any]:
    """The comparable part of a token: all of its fields but the source, which depends on the rounds."""
    tokens = [token for response in responses for token in response.tokens]
    return [(token.id, token.text, token.log_probabilities.sampling, token.log_probabilities.model) for token in tokens]


@pytest.mark.parametrize("name", examples(REQUESTS, 3))
async def test_any_part_of_a_generation_can_be_resumed(client: RawClient, name: str) -> None:
    fields = {"max_tokens": MAX_TOKENS, "num_draft_tokens": 4, **REQUESTS[name]}
    prompt = fields.pop("prompt", PROMPT)
    whole = await responses_to(client.generate(prompt, **fields))
    expected = tokens_of(whole)
    ends = list(accumulate(len(response.tokens) for response in whole))[:-1]
    assert len(ends) >= 3
    for end in (0, *ends[::3]):
        resumption = Resumption(
            token_ids=[token[0] for token in expected[:end]], prompt_fingerprint=whole[0].prompt_fingerprint
        )
        rest = await responses_to(client.generate(prompt, resumption=resumption, **fields))
        together = tokens_of(rest)
        assert [token[:2] for token in together] == [token[:2] for token in expected[end:]]
        for one, other in zip(together, expected[end:], strict=True):
            assert one[2:] == pytest.approx(other[2:], abs=1e-3)
        assert rest[-1].finish_reason == whole[-1].finish_reason
        assert rest[-1].stop_string == whole[-1].stop_string
        assert rest[-1].statistics.generated_tokens == len(expected) - end


async def test_the_first_message_says_what_is_continued(client: RawClient) -> None:
    first, *others = await responses_to(client.generate(PROMPT, max_tokens=8, return_prompt_token_ids=True))
    assert first.prompt_token_ids
    assert first.prompt_fingerprint
    assert not any(response.prompt_fingerprint or response.prompt_token_ids for response in others)
    by_tokens, *_ = await responses_to(client.generate(list(first.prompt_token_ids), max_tokens=8))
    assert by_tokens.prompt_fingerprint == first.prompt_fingerprint
    assert not by_tokens.prompt_token_ids
    another, *_ = await responses_to(client.generate(PROMPT + " ", max_tokens=8))
    assert another.prompt_fingerprint != first.prompt_fingerprint


async def test_a_lost_session_goes_on_from_its_tokens(client: RawClient) -> None:
    """As if it had never been lost: the tokens of its turns are those of the session that was there."""
    sampling = SamplingParameters(temperature=0.8, seed=SEED)
    first = await responses_to(client.generate(PROMPT, max_tokens=12, sampling=sampling, return_prompt_token_ids=True))
    second = await responses_to(
        client.generate(
            "\n    def", max_tokens=12, sampling=sampling, session_id=first[0].session_id, return_prompt_token_ids=True
        )
    )
    had = [*first[0].prompt_token_ids, *(token.id for response in first for token in response.tokens)]
    assert list(second[0].prompt_token_ids)[: len(had)] == had
    restored = await responses_to(
        client.generate(
            "\n    def",
            max_tokens=12,
            sampling=sampling,
            resumption=Resumption(
                session_token_ids=had,
                token_ids=[token.id for token in second[0].tokens],
                prompt_fingerprint=second[0].prompt_fingerprint,
            ),
        )
    )
    assert restored[0].session_id != first[0].session_id
    assert tokens_of(second[:1]) + tokens_of(restored) == tokens_of(second)
    # It is a session like any other: it has this turn too.
    third = [
        await responses_to(client.generate("\n", max_tokens=6, sampling=sampling, session_id=each[0].session_id))
        for each in (second, restored)
    ]
    assert tokens_of(third[0]) == tokens_of(third[1])


@pytest.mark.parametrize(
    ("resumption", "fields", "reason", "message"),
    [
        ({"prompt_fingerprint": "0" * 32}, {}, "CANNOT_RESUME", "another prompt"),
        ({"token_ids": [7] * 8}, {}, "CONTRADICTION", "resumption has 8 tokens, but max_tokens is 8"),
        ({"token_ids": [VOCABULARY_SIZE]}, {}, "TOKEN_OUT_OF_VOCABULARY", "resumption.token_ids"),
        ({"session_token_ids": [VOCABULARY_SIZE]}, {}, "TOKEN_OUT_OF_VOCABULARY", str(VOCABULARY_SIZE)),
        ({"token_ids": [7, END_TOKEN]}, {}, "CONTRADICTION", "end token 0 at 1"),
        ({"token_ids": [7]}, {"stop": StopConditions(token_ids=[7])}, "CONTRADICTION", "end token 7"),
        ({"session_token_ids": [7]}, {"session_id": "x"}, "CONTRADICTION", "session_id"),
    ],
)
async def test_what_cannot_be_resumed_is_refused(
    client: RawClient, resumption: dict[str, Any], fields: dict[str, Any], reason: str, message: str
) -> None:
    error = await error_of(client.generate(PROMPT, max_tokens=8, resumption=Resumption(**resumption), **fields))
    is_another = reason == "CANNOT_RESUME"
    assert error.code() is (StatusCode.FAILED_PRECONDITION if is_another else StatusCode.INVALID_ARGUMENT)
    assert error_info(error).reason == reason
    assert message in str(error.details())


async def test_a_whole_stop_string_is_not_gone_beyond(client: RawClient) -> None:
    whole = await responses_to(client.generate(PROMPT, max_tokens=8))
    text = "".join(response.text for response in whole)
    resumption = Resumption(token_ids=[token.id for response in whole for token in response.tokens])
    stop = StopConditions(strings=[text[:3]])
    error = await error_of(client.generate(PROMPT, max_tokens=16, resumption=resumption, stop=stop))
    assert error_info(error).reason == "CONTRADICTION"
    assert "stop string" in str(error.details())


async def test_rejection_goes_on_too(client: RawClient, stack: Stack) -> None:
    """The sample of the target's distribution depends on the rounds, so this checks only its form."""
    fields: dict[str, Any] = {
        "max_tokens": 16,
        "sampling": SamplingParameters(temperature=1.0, seed=SEED, acceptance=ACCEPTANCE_METHOD_REJECTION),
        "stop": StopConditions(ignore_eos=True),
    }
    whole = await responses_to(client.generate(PROMPT, **fields))
    resumption = Resumption(token_ids=[token.id for token in whole[0].tokens])
    rest = await responses_to(client.generate(PROMPT, resumption=resumption, **fields))
    assert rest[-1].statistics.generated_tokens == 16 - len(whole[0].tokens)
