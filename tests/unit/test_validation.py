"""What requests may ask for, to clients' service and to workers: the limits of every field, and what is said beyond.

What they may say about sampling is in test_sampling.py.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import pytest

from coordinator.sessions.prompt import EncodedPrompt
from coordinator.sessions.request import GenerationRequest, StopConditions, check_prompt, resolve_max_tokens
from specd.errors import InvalidRequestError
from specd.model_info import ModelInfo
from specd.rpc.messages import sampling_from
from specd.setting_types import MAX_NUM_DRAFT_TOKENS
from specd.v1.sampling_pb2 import SamplingParameters, SessionSampling
from specd.worker.session.validation import check_request

VOCABULARY_SIZE = 100
CONTEXT_LENGTH = 50
MODEL = ModelInfo("some/model", "llama", "", "", VOCABULARY_SIZE, CONTEXT_LENGTH, (0,), "float32", "cpu")

LARGEST_UINT32 = 2**32 - 1
OUT_OF_VOCABULARY = [VOCABULARY_SIZE, 2**31 - 1, LARGEST_UINT32]


@contextlib.contextmanager
def refused(reason: str, named: str) -> Iterator[None]:
    """Expect InvalidRequestError with this reason and these words."""
    with pytest.raises(InvalidRequestError, match=re.escape(named)) as error:
        yield
    assert error.value.reason == reason
    if reason in {"OUT_OF_RANGE", "CONTEXT_EXCEEDED", "TOKEN_OUT_OF_VOCABULARY"}:
        metadata = error.value.metadata
        assert metadata["value"] in str(error.value)
        assert metadata.keys() == {"field", "value", "limit"}


@pytest.mark.parametrize("length", [1, CONTEXT_LENGTH - 1])
def test_a_prompt_leaves_room_to_generate(length: int) -> None:
    check_prompt(MODEL, [VOCABULARY_SIZE - 1] * length)


@pytest.mark.parametrize(
    ("token_ids", "reason", "named"),
    [
        pytest.param([], "EMPTY_PROMPT", "the prompt is empty", id="empty"),
        pytest.param([5] * CONTEXT_LENGTH, "CONTEXT_EXCEEDED", "has 50 tokens", id="fills the context"),
        pytest.param([5] * 100_000, "CONTEXT_EXCEEDED", "has 100000 tokens", id="over the context"),
        *(
            pytest.param([5, token_id, 7], "TOKEN_OUT_OF_VOCABULARY", f"token_ids has {token_id}", id=str(token_id))
            for token_id in OUT_OF_VOCABULARY
        ),
    ],
)
def test_a_prompt_is_refused(token_ids: list[int], reason: str, named: str) -> None:
    with refused(reason, named):
        check_prompt(MODEL, token_ids)


def test_max_tokens_fit_in_the_context() -> None:
    assert resolve_max_tokens(MODEL, 20, None) == 30
    assert resolve_max_tokens(MODEL, 20, 1) == 1
    assert resolve_max_tokens(MODEL, 20, 30) == 30
    with refused("OUT_OF_RANGE", "max_tokens is 0"):
        resolve_max_tokens(MODEL, 20, 0)
    for max_tokens in (31, LARGEST_UINT32):
        with refused("CONTEXT_EXCEEDED", f"max_tokens {max_tokens} make {20 + max_tokens}"):
            resolve_max_tokens(MODEL, 20, max_tokens)
    with refused("CONTEXT_EXCEEDED", "max_tokens can be at most 30"):
        resolve_max_tokens(MODEL, 20, 31)


def test_num_draft_tokens_has_a_limit() -> None:
    for num_draft_tokens in (None, 0, MAX_NUM_DRAFT_TOKENS):
        assert (
            GenerationRequest(num_draft_tokens=num_draft_tokens, max_tokens=3, client="").check(
                MODEL, EncodedPrompt([1])
            )
            == 3
        )
    for num_draft_tokens in (MAX_NUM_DRAFT_TOKENS + 1, LARGEST_UINT32):
        with refused("OUT_OF_RANGE", f"num_draft_tokens is {num_draft_tokens}"):
            GenerationRequest(num_draft_tokens=num_draft_tokens, client="").check(MODEL, EncodedPrompt([1]))


@pytest.mark.parametrize(
    "stop",
    [
        StopConditions(token_ids=(0, VOCABULARY_SIZE - 1) * 512),
        StopConditions(strings=("é" * 256,) * 64),
        StopConditions(min_tokens=3),
    ],
    ids=["tokens", "strings", "min_tokens"],
)
def test_stop_conditions_at_their_limits_are_taken(stop: StopConditions) -> None:
    stop.check(MODEL, max_tokens=3)


@pytest.mark.parametrize(
    ("stop", "reason", "named"),
    [
        *(
            pytest.param(
                StopConditions(token_ids=(5, token_id)),
                "TOKEN_OUT_OF_VOCABULARY",
                f"stop.token_ids has {token_id}",
                id=f"token {token_id}",
            )
            for token_id in OUT_OF_VOCABULARY
        ),
        pytest.param(StopConditions(token_ids=(5,) * 1025), "OUT_OF_RANGE", "1025 entries", id="1025 tokens"),
        pytest.param(StopConditions(strings=("x",) * 65), "OUT_OF_RANGE", "65 entries", id="65 strings"),
        pytest.param(StopConditions(strings=("x",) * 10_000), "OUT_OF_RANGE", "10000 entries", id="10000 strings"),
        pytest.param(StopConditions(strings=("x", "")), "OUT_OF_RANGE", "'' of 0 characters", id="empty string"),
        pytest.param(StopConditions(strings=("é" * 257,)), "OUT_OF_RANGE", "of 257 characters", id="long string"),
        pytest.param(StopConditions(min_tokens=4), "CONTRADICTION", "min_tokens is 4", id="min_tokens over max_tokens"),
        pytest.param(
            StopConditions(min_tokens=LARGEST_UINT32),
            "CONTRADICTION",
            f"min_tokens is {LARGEST_UINT32}",
            id="largest min_tokens",
        ),
    ],
)
def test_stop_conditions_are_refused(stop: StopConditions, reason: str, named: str) -> None:
    with refused(reason, named):
        stop.check(MODEL, max_tokens=3)


def test_an_acceptance_method_that_is_not_there_is_refused() -> None:
    message = SessionSampling(parameters=SamplingParameters(acceptance=100))  # type: ignore[arg-type]
    with refused("OUT_OF_RANGE", "acceptance is 100"):
        sampling_from(message)


@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": [VOCABULARY_SIZE - 1]},
        {"token_ids": [5] * CONTEXT_LENGTH},
        {"position": CONTEXT_LENGTH - 33, "num_draft_tokens": 32},
        {"position": CONTEXT_LENGTH - 33, "proposal": [VOCABULARY_SIZE - 1] * 32},
    ],
    ids=str,
)
def test_a_request_to_a_worker_at_its_limits_is_taken(fields: dict[str, Any]) -> None:
    check_request(MODEL, **{"position": 0, "token_ids": [5], **fields})


@pytest.mark.parametrize(
    ("fields", "reason", "named"),
    [
        ({"token_ids": []}, "EMPTY_TOKEN_IDS", "token_ids is empty"),
        *(({"token_ids": [5, i]}, "TOKEN_OUT_OF_VOCABULARY", f"token_ids has {i}") for i in OUT_OF_VOCABULARY),
        *(({"proposal": [7, i]}, "TOKEN_OUT_OF_VOCABULARY", f"proposal has {i}") for i in OUT_OF_VOCABULARY),
        ({"num_draft_tokens": 33}, "OUT_OF_RANGE", "asks for 33 draft tokens"),
        ({"num_draft_tokens": LARGEST_UINT32}, "OUT_OF_RANGE", f"asks for {LARGEST_UINT32} draft tokens"),
        ({"proposal": [5] * 33}, "OUT_OF_RANGE", "asks for 33 draft tokens"),
        ({"token_ids": [5] * 51}, "CONTEXT_EXCEEDED", "51 token_ids"),
        ({"token_ids": [5] * 47, "num_draft_tokens": 4}, "CONTEXT_EXCEEDED", "make 51"),
        ({"token_ids": [5] * 47, "proposal": [5] * 4}, "CONTEXT_EXCEEDED", "make 51"),
        ({"position": LARGEST_UINT32}, "CONTEXT_EXCEEDED", str(LARGEST_UINT32)),
    ],
)
def test_a_request_to_a_worker_is_refused(fields: dict[str, Any], reason: str, named: str) -> None:
    with refused(reason, named):
        check_request(MODEL, **{"position": 0, "token_ids": [5], **fields})
