"""A published chat model, SmolLM2-135M-Instruct, through real processes: its chats are those of mlx-lm.

Beside it, as a draft, is a copy of it that lacks a fifth of its layers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load_tokenizer

from specd.supervisor import Stack
from specd.v1.generation_pb2 import (
    DRAFT_SOURCE_LOOKUP,
    DRAFT_SOURCE_MODEL,
    DRAFT_SOURCE_NONE,
    DRAFT_SOURCE_UNSPECIFIED,
    FINISH_REASON_EOS,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP_STRING,
    StopConditions,
)
from specd.v1.sampling_pb2 import SamplingParameters
from specd.worker.model.loader import LoadedModel, load
from tests.e2e.chats import chat_of
from tests.e2e.completions import Completion, complete
from tests.e2e.conversations import CONVERSATIONS, Conversation
from tests.e2e.faults import PATIENT
from tests.e2e.reference import sample_with_mlx_lm
from tests.raw_client import RawClient
from tests.smollm2 import ChatPair
from tests.thorough import examples

SEED = 11


@dataclass(frozen=True)
class Variant:
    """The source and number of draft tokens (None: specd chooses), and whether a session keeps the conversation."""

    source: Any
    k: int | None = None
    in_session: bool = False


@dataclass(frozen=True)
class Case:
    """A conversation at a temperature, and the variants in which specd holds it."""

    conversation: Conversation
    temperature: float
    max_tokens: int
    variants: tuple[Variant, ...]


# Eight conversations of all kinds; all together meet every k, and draft and look-up with each of them.
CASES = [
    Case(
        conversation,
        (0.0, 0.8)[i % 2],
        16,
        (
            Variant(DRAFT_SOURCE_NONE),
            Variant(DRAFT_SOURCE_MODEL, i + 1, in_session=i % 4 > 1),
            Variant(DRAFT_SOURCE_LOOKUP, 8 - i, in_session=i % 4 < 2),
            Variant(DRAFT_SOURCE_UNSPECIFIED),
        ),
    )
    for i, conversation in enumerate(CONVERSATIONS[::5])
]
FIXED = (
    Variant(DRAFT_SOURCE_NONE),
    Variant(DRAFT_SOURCE_MODEL, 3),
    Variant(DRAFT_SOURCE_MODEL, 8, in_session=True),
    Variant(DRAFT_SOURCE_LOOKUP),
)
MANY_CASES = [
    Case(conversation, temperature, 24, FIXED) for temperature in (0.0, 0.8) for conversation in CONVERSATIONS
]


@pytest.fixture(scope="module")
async def client(chat_pair: ChatPair) -> AsyncIterator[RawClient]:
    async with (
        Stack(target=chat_pair.target, draft=chat_pair.draft, environment=PATIENT) as stack,
        RawClient(stack.address) as connected,
    ):
        yield connected


@pytest.fixture(scope="module")
def model(chat_pair: ChatPair) -> LoadedModel:
    """The model in this process, computed by mlx-lm."""
    return load(chat_pair.target, blas="")


@pytest.fixture(scope="module")
def tokenizer(chat_pair: ChatPair) -> Any:
    return load_tokenizer(Path(chat_pair.target))


def test_every_k_is_met() -> None:
    for source in (DRAFT_SOURCE_MODEL, DRAFT_SOURCE_LOOKUP):
        assert {v.k for case in CASES for v in case.variants if v.source == source} == set(range(1, 9))
    assert len(CONVERSATIONS) == 40


def test_it_is_the_published_model(model: LoadedModel, tokenizer: Any) -> None:
    """As far as can be seen without the hub: its sizes, special tokens, template and what it says."""
    info = model.info
    assert (info.architecture, info.vocabulary_size, info.context_length) == ("llama", 49152, 8192)
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert info.eos_token_ids == (2,)
    assert len(tokenizer.get_added_vocab()) == 17
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    token_ids = tokenizer.encode(prompt, add_special_tokens=False)
    said = sample_with_mlx_lm(model, token_ids, 20, temperature=0.0, seed=0)
    assert tokenizer.decode(said) == "The capital of France is Paris.<|im_end|>"


@dataclass(frozen=True)
class Reply:
    """mlx-lm's reply in a turn."""

    num_prompt_tokens: int
    token_ids: list[int]
    text: str
    finish_reason: Any


def hold_with_mlx_lm(model: LoadedModel, tokenizer: Any, case: Case, *, in_session: bool) -> list[Reply]:
    """Hold the conversation with the target alone, and cut replies at stop strings.

    A session keeps the tokens that the model chose for its replies. Without one, the tokenizer chooses them again.
    """
    replies: list[Reply] = []
    messages = opening_of(case)
    for turn in case.conversation.turns:
        messages.append({"role": "user", "content": turn})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        if in_session:
            prompt = with_own_tokens(tokenizer, prompt, replies, model.info.eos_token_ids)
        said = sample_with_mlx_lm(model, prompt, case.max_tokens, temperature=case.temperature, seed=SEED)
        text = tokenizer.decode(said, skip_special_tokens=True)
        finish_reason = FINISH_REASON_EOS if said[-1] in model.info.eos_token_ids else FINISH_REASON_LENGTH
        if ends := [text.index(stop) for stop in case.conversation.stop if stop in text]:
            text, finish_reason = text[: min(ends)], FINISH_REASON_STOP_STRING
        messages.append({"role": "assistant", "content": text})
        replies.append(Reply(len(prompt), said, text, finish_reason))
    return replies


def with_own_tokens(tokenizer: Any, prompt: list[int], replies: list[Reply], end_ids: Sequence[int]) -> list[int]:
    """Return the tokens of a prompt, with those that the model chose for each whole reply in it."""
    for reply in replies:
        chosen = [token_id for token_id in reply.token_ids if token_id not in end_ids]
        by_tokenizer = tokenizer.encode(reply.text, add_special_tokens=False)
        start, end = reply.num_prompt_tokens, reply.num_prompt_tokens + len(by_tokenizer)
        if reply.finish_reason != FINISH_REASON_STOP_STRING and prompt[start:end] == by_tokenizer:
            prompt = [*prompt[:start], *chosen, *prompt[end:]]
    return prompt


async def hold(client: RawClient, case: Case, variant: Variant) -> list[Completion]:
    """Hold the conversation with specd."""
    turns: list[Completion] = []
    messages = opening_of(case)
    fields: dict[str, Any] = {"draft_source": variant.source, "max_tokens": case.max_tokens}
    if variant.k is not None:
        fields["num_draft_tokens"] = variant.k
    for turn in case.conversation.turns:
        messages.append({"role": "user", "content": turn})
        if variant.in_session and turns:
            messages = messages[-1:]
            fields["session_id"] = turns[-1].last.session_id
        completion = await complete(
            client,
            chat_of(messages),
            sampling=SamplingParameters(temperature=case.temperature, seed=SEED),
            stop=StopConditions(strings=case.conversation.stop),
            **fields,
        )
        messages.append({"role": "assistant", "content": completion.text})
        turns.append(completion)
    return turns


def opening_of(case: Case) -> list[dict[str, Any]]:
    system = case.conversation.system
    return [{"role": "system", "content": system}] if system else []


def names_of(cases: list[Case], what: str) -> list[str]:
    return [f"{what} {i}, {case.conversation.turns[0][:30]!a} at {case.temperature}" for i, case in enumerate(cases)]


@pytest.mark.parametrize(
    "case",
    [*examples(CASES, 1), *examples(MANY_CASES, 0)],
    ids=[*names_of(CASES, "every k"), *names_of(MANY_CASES, "all")],
)
async def test_a_conversation_is_that_of_mlx_lm(
    client: RawClient, model: LoadedModel, tokenizer: Any, case: Case
) -> None:
    of_mlx_lm = {kept: hold_with_mlx_lm(model, tokenizer, case, in_session=kept) for kept in (False, True)}
    held = await asyncio.gather(*(hold(client, case, variant) for variant in case.variants))
    for variant, turns in zip(case.variants, held, strict=True):
        for turn, reply in zip(turns, of_mlx_lm[variant.in_session], strict=True):
            assert turn.statistics.prompt_tokens == reply.num_prompt_tokens, variant
            assert turn.text == reply.text, variant
            assert turn.token_ids == reply.token_ids[: len(turn.token_ids)], variant
            assert turn.last.finish_reason == reply.finish_reason, variant
            assert turn.statistics.draft_fault == "", variant
            assert (turn.statistics.proposed_tokens > 0) <= (variant.source != DRAFT_SOURCE_NONE), variant
