"""What a request can ask for, through real processes on the embedded pair: sampling, stop conditions, chats."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import mlx.core as mx
import numpy as np
import pytest
from google.protobuf import struct_pb2
from mlx_lm.sample_utils import make_logits_processors
from transformers import PreTrainedTokenizerFast

from coordinator.tokenizer import Tokenizer
from specd.client import Client
from specd.errors import error_info
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from specd.v1.generation_pb2 import (
    FINISH_REASON_EOS,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP_STRING,
    FINISH_REASON_STOP_TOKEN,
    FINISH_REASON_UNSPECIFIED,
    Chat,
    ChatMessage,
    GenerateResponse,
    StopConditions,
)
from specd.v1.sampling_pb2 import ACCEPTANCE_METHOD_REJECTION, SamplingParameters
from specd.worker.model import LoadedModel
from tests.models import CHAT_TEMPLATE, SECOND_END_TOKEN, save_chat_target
from tests.processes import PATIENCE_SECONDS
from tests.reference import decode_with_mlx_lm

pytestmark = pytest.mark.processes

PROMPT = "class Stack:\n    def"
END_TOKEN = 0
MAX_TOKENS = 32
KS = (0, 4, 8)


@dataclass(frozen=True)
class Completion:
    """The messages of a stream."""

    responses: list[GenerateResponse]

    @property
    def tokens(self) -> list[Any]:
        return [token for response in self.responses for token in response.tokens]

    @property
    def token_ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def text(self) -> str:
        return "".join(response.text for response in self.responses)

    @property
    def last(self) -> GenerateResponse:
        return self.responses[-1]

    @property
    def statistics(self) -> Any:
        return self.last.statistics


async def complete(client: Client, prompt: str | Sequence[int] | Chat = PROMPT, **fields: Any) -> Completion:
    """Generate to the end, and check what holds for every stream."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        completion = Completion([response async for response in client.generate(prompt, **fields)])
    responses, tokens, statistics = completion.responses, completion.tokens, completion.statistics
    assert len({(response.session_id, response.seed) for response in responses}) == 1
    for response in responses:
        is_last = response is responses[-1]
        assert response.text == "".join(token.text for token in response.tokens)
        assert (response.finish_reason != FINISH_REASON_UNSPECIFIED) == response.HasField("statistics") == is_last
        assert (response.WhichOneof("stopped_by") is not None) <= is_last
        assert response.tokens
        assert sum(token.drafted for token in response.tokens) == response.round.accepted
    rounds = [response.round for response in responses]
    assert statistics.generated_tokens == len(tokens)
    assert statistics.generated_tokens == (
        statistics.accepted_tokens + statistics.recovered_tokens + statistics.bonus_tokens
    )
    assert statistics.rounds == len(rounds)
    assert statistics.proposed_tokens == sum(round_.proposed for round_ in rounds)
    assert statistics.accepted_tokens == sum(round_.accepted for round_ in rounds)
    assert statistics.wasted_tokens == statistics.proposed_tokens - statistics.accepted_tokens
    by_position = range(fields.get("num_draft_tokens", 32))
    for counted, counts in (
        ([round_.proposed for round_ in rounds], statistics.proposed_by_position),
        ([round_.accepted for round_ in rounds], statistics.accepted_by_position),
    ):
        expected = [sum(count > position for count in counted) for position in by_position]
        assert [*counts, *[0] * (len(by_position) - len(counts))] == expected
    return completion


async def refusal(client: Client, prompt: str | Sequence[int] | Chat, **fields: Any) -> tuple[str, str]:
    """Generate, and return reason and message of the INVALID_ARGUMENT that comes of it."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await complete(client, prompt, **fields)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return error_info(raised.value).reason, raised.value.details() or ""


@pytest.fixture(scope="module")
async def greedy(client: Client) -> Completion:
    """What the target alone says when nothing else is asked for."""
    completion = await complete(client, max_tokens=MAX_TOKENS, num_draft_tokens=0)
    assert len(completion.tokens) == MAX_TOKENS
    return completion


# -- Stop conditions


def stopped_by(completion: Completion, strings: Sequence[str], min_tokens: int = 0) -> tuple[str, int, str] | None:
    """Return the text, the number of tokens and the string when the first of these strings ends a completion."""
    texts = [token.text for token in completion.tokens]
    start = len("".join(texts[:min_tokens]))
    for end in range(start + 1, len(completion.text) + 1):
        for string in sorted(strings, key=len, reverse=True):
            if completion.text[start:end].endswith(string):
                num_tokens = next(n for n in range(len(texts)) if len("".join(texts[: n + 1])) >= end) + 1
                return completion.text[: end - len(string)], num_tokens, string
    return None


def across(completion: Completion, first: int, last: int) -> str:
    """Return the text from the middle of one token to the middle of another."""
    texts = [token.text for token in completion.tokens]
    start = len("".join(texts[:first])) + len(texts[first]) // 2
    end = len("".join(texts[:last])) + (len(texts[last]) + 1) // 2
    return completion.text[start:end]


STOPS = {
    "across two tokens": lambda c: [across(c, 5, 6)],
    "across many tokens": lambda c: [across(c, 9, 20)],
    "a character": lambda c: [c.text[40]],
    "the first character": lambda c: [c.text[0]],
    "all of the first token": lambda c: [c.tokens[0].text],
    "the last token": lambda c: [across(c, MAX_TOKENS - 3, MAX_TOKENS - 1) + c.text[-1], c.text[-9:]],
    "the whole text": lambda c: [c.text],
    "several": lambda c: [across(c, 15, 17), across(c, 9, 12), across(c, 9, 13), c.text[60:70], "\n" * 9],
    "one inside the other": lambda c: [across(c, 9, 13), across(c, 10, 11)],
    "almost, and then another": lambda c: [across(c, 4, 9) + "?", across(c, 8, 14)],
}


@pytest.mark.parametrize("num_draft_tokens", KS)
@pytest.mark.parametrize("strings_of", STOPS.values(), ids=STOPS)
async def test_a_stop_string_ends_the_text_before_it(
    client: Client, greedy: Completion, strings_of: Any, num_draft_tokens: int
) -> None:
    strings = [string[:256] for string in strings_of(greedy)]
    expected = stopped_by(greedy, strings)
    assert expected is not None
    text, num_tokens, string = expected
    completion = await complete(
        client, stop=StopConditions(strings=strings), max_tokens=MAX_TOKENS, num_draft_tokens=num_draft_tokens
    )

    assert completion.text == text  # of all messages: nothing of the string was ever shown
    assert completion.token_ids == greedy.token_ids[:num_tokens]
    assert completion.last.finish_reason == FINISH_REASON_STOP_STRING
    assert completion.last.WhichOneof("stopped_by") == "stop_string"
    assert completion.last.stop_string == string


@pytest.mark.parametrize("num_draft_tokens", KS)
async def test_what_only_begins_a_stop_string_is_shown(
    client: Client, greedy: Completion, num_draft_tokens: int
) -> None:
    beginnings = [*dict.fromkeys(greedy.text[i : i + 12] for i in range(0, len(greedy.text), 2))][:63]
    strings = [*(f"{beginning}\N{SNOWMAN}" for beginning in beginnings), greedy.text[-20:] + "\N{SNOWMAN}"]
    completion = await complete(
        client, stop=StopConditions(strings=strings), max_tokens=MAX_TOKENS, num_draft_tokens=num_draft_tokens
    )
    assert completion.text == greedy.text
    assert completion.token_ids == greedy.token_ids
    assert completion.last.finish_reason == FINISH_REASON_LENGTH
    assert completion.last.WhichOneof("stopped_by") is None
    # What may go on as a stop string is held back at the time.
    assert any(not token.text for token in completion.tokens)


@pytest.mark.parametrize("num_draft_tokens", KS)
async def test_a_stop_token_ends_the_text_with_it(client: Client, greedy: Completion, num_draft_tokens: int) -> None:
    stop_token_ids = [greedy.token_ids[20], greedy.token_ids[11], 8191]
    num_tokens = min(greedy.token_ids.index(token_id) for token_id in stop_token_ids[:2]) + 1
    completion = await complete(
        client, stop=StopConditions(token_ids=stop_token_ids), num_draft_tokens=num_draft_tokens
    )

    assert completion.token_ids == greedy.token_ids[:num_tokens]
    assert completion.text == "".join(token.text for token in greedy.tokens[:num_tokens])
    assert completion.last.finish_reason == FINISH_REASON_STOP_TOKEN
    assert completion.last.WhichOneof("stopped_by") == "stop_token_id"
    assert completion.last.stop_token_id == completion.token_ids[-1]


@pytest.mark.parametrize("num_draft_tokens", KS)
async def test_min_tokens_puts_off_stop_tokens(client: Client, greedy: Completion, num_draft_tokens: int) -> None:
    comma = greedy.token_ids[4]
    stop = StopConditions(min_tokens=12, token_ids=[comma])
    completion = await complete(client, stop=stop, max_tokens=MAX_TOKENS, num_draft_tokens=num_draft_tokens)

    # The comma could not be chosen, so that the text is another one.
    assert completion.token_ids[:4] == greedy.token_ids[:4]
    assert comma not in completion.token_ids[:12]
    alone = await complete(client, stop=stop, max_tokens=MAX_TOKENS, num_draft_tokens=0)
    assert completion.token_ids == alone.token_ids
    assert (completion.last.finish_reason == FINISH_REASON_STOP_TOKEN) == (comma in completion.token_ids)


async def test_a_stop_string_after_min_tokens_counts(client: Client, greedy: Completion) -> None:
    string = greedy.tokens[3].text
    for min_tokens in (1, 4, 11, 17):
        expected = stopped_by(greedy, [string], min_tokens)
        assert expected is not None
        assert expected[1] > min_tokens
        stop = StopConditions(min_tokens=min_tokens, strings=[string])
        completion = await complete(client, stop=stop, max_tokens=MAX_TOKENS, num_draft_tokens=4)
        assert (completion.text, len(completion.tokens), completion.last.stop_string) == expected


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
async def test_end_tokens(client: Client, greedy: Completion, num_draft_tokens: int) -> None:
    """With a bias, the model wants to end at once and always."""
    fields: dict[str, Any] = {
        "sampling": SamplingParameters(logit_bias={END_TOKEN: 100}),
        "max_tokens": 20,
        "num_draft_tokens": num_draft_tokens,
    }
    at_once = await complete(client, **fields)
    assert at_once.token_ids == [END_TOKEN]
    assert at_once.text == ""
    assert at_once.last.finish_reason == FINISH_REASON_EOS
    assert at_once.last.WhichOneof("stopped_by") is None

    later = await complete(client, stop=StopConditions(min_tokens=10), **fields)
    assert later.token_ids == [*greedy.token_ids[:10], END_TOKEN]
    assert later.last.finish_reason == FINISH_REASON_EOS

    never = await complete(client, stop=StopConditions(ignore_eos=True), **fields)
    assert never.token_ids == [END_TOKEN] * 20
    assert never.text == ""
    assert never.last.finish_reason == FINISH_REASON_LENGTH

    as_stop_token = await complete(
        client, stop=StopConditions(ignore_eos=True, token_ids=[END_TOKEN], min_tokens=3), **fields
    )
    assert as_stop_token.token_ids == [*greedy.token_ids[:3], END_TOKEN]
    assert as_stop_token.last.finish_reason == FINISH_REASON_STOP_TOKEN
    assert as_stop_token.last.stop_token_id == END_TOKEN

    as_last = await complete(client, stop=StopConditions(min_tokens=19), **fields)
    assert as_last.token_ids == [*greedy.token_ids[:19], END_TOKEN]
    assert as_last.last.finish_reason == FINISH_REASON_EOS

    not_any_more = await complete(client, stop=StopConditions(min_tokens=20), **fields)
    assert not_any_more.token_ids == greedy.token_ids[:20]
    assert not_any_more.last.finish_reason == FINISH_REASON_LENGTH


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 6])
async def test_max_tokens(client: Client, greedy: Completion, max_tokens: int, num_draft_tokens: int) -> None:
    completion = await complete(client, max_tokens=max_tokens, num_draft_tokens=num_draft_tokens)
    assert completion.token_ids == greedy.token_ids[:max_tokens]
    assert completion.last.finish_reason == FINISH_REASON_LENGTH


# -- Biases and penalties


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
async def test_biases(client: Client, greedy: Completion, num_draft_tokens: int) -> None:
    unwanted = {greedy.token_ids[i] for i in (0, 4, 10)}
    fields: dict[str, Any] = {"max_tokens": 16, "num_draft_tokens": num_draft_tokens}
    without = await complete(client, sampling=SamplingParameters(logit_bias=dict.fromkeys(unwanted, -100)), **fields)
    assert not unwanted & {*without.token_ids}

    always = await complete(client, sampling=SamplingParameters(logit_bias={4321: 100}), **fields)
    assert always.token_ids == [4321] * 16


PENALTIES = {
    "repetition": {"repetition_penalty": 1.3},
    "repetition, favoured": {"repetition_penalty": 0.7, "repetition_context_size": 5},
    "presence": {"presence_penalty": 1.5, "presence_context_size": 10_000},
    "frequency": {"frequency_penalty": 0.8},
    "everything": {
        "logit_bias": {290: -2.0, 13: 3.0},
        "repetition_penalty": 1.2,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.5,
        **{f"{name}_context_size": 7 for name in ("repetition", "presence", "frequency")},
    },
}


@pytest.mark.parametrize("options", PENALTIES.values(), ids=PENALTIES)
async def test_penalties_are_those_of_mlx_lm(
    client: Client, target: LoadedModel, tokenizer: Tokenizer, options: dict[str, Any]
) -> None:
    text = "names = [a, b, a, b, a, b, a, b,"
    processors = make_logits_processors(**options)
    expected = decode_with_mlx_lm(target, tokenizer.encode(text), 20, logits_processors=processors)
    without = await complete(client, text, max_tokens=20)
    assert without.token_ids != expected

    fields = {name: value for name, value in options.items() if not name.endswith("context_size")}
    sizes = {value for name, value in options.items() if name.endswith("context_size")}
    for size in sizes:
        fields["penalty_context_size"] = 0 if size == 10_000 else size
    for num_draft_tokens in (0, 3):
        completion = await complete(
            client, text, sampling=SamplingParameters(**fields), max_tokens=20, num_draft_tokens=num_draft_tokens
        )
        assert completion.token_ids == expected


# -- Sampling


async def test_a_seed_makes_sampling_repeatable(client: Client) -> None:
    sampling = SamplingParameters(temperature=0.8, top_k=100, seed=2**63)
    first, again, *others = [
        await complete(client, sampling=sampling, max_tokens=16, num_draft_tokens=num_draft_tokens)
        for num_draft_tokens in (4, 4, 0, 8)
    ]
    assert first.last.seed == 2**63
    assert again.token_ids == first.token_ids
    assert all(other.token_ids == first.token_ids for other in others)

    sampling.seed = 2**63 + 1
    another = await complete(client, sampling=sampling, max_tokens=16)
    assert another.token_ids != first.token_ids


async def test_without_a_seed_each_request_gets_its_own(client: Client) -> None:
    sampling = SamplingParameters(temperature=1, top_k=1000)
    completions = [await complete(client, sampling=sampling, max_tokens=12) for _ in range(3)]
    assert len({completion.last.seed for completion in completions}) == 3
    assert len({tuple(completion.token_ids) for completion in completions}) == 3

    sampling.seed = completions[0].last.seed
    again = await complete(client, sampling=sampling, max_tokens=12, num_draft_tokens=2)
    assert again.token_ids == completions[0].token_ids

    sampling.seed = 0  # which is a seed too
    seeded = [await complete(client, sampling=sampling, max_tokens=12) for _ in range(2)]
    assert [completion.last.seed for completion in seeded] == [0, 0]
    assert seeded[0].token_ids == seeded[1].token_ids


@pytest.mark.parametrize("parameters", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1}], ids=lambda p: next(iter(p)))
@pytest.mark.parametrize("temperature", [0.01, 1, 100])
async def test_only_the_most_likely_token_is_greedy_at_any_temperature(
    client: Client, greedy: Completion, parameters: dict[str, Any], temperature: float
) -> None:
    sampling = SamplingParameters(temperature=temperature, **parameters)
    completion = await complete(client, sampling=sampling, max_tokens=6, num_draft_tokens=0)
    assert completion.token_ids == greedy.token_ids[:6]


# -- Acceptance by REJECTION


def rejection(**parameters: Any) -> SamplingParameters:
    return SamplingParameters(acceptance=ACCEPTANCE_METHOD_REJECTION, **parameters)


@pytest.mark.parametrize("temperature", [0, 0.9])
async def test_with_lenience_1_everything_is_accepted(client: Client, temperature: float) -> None:
    sampling = rejection(temperature=temperature, top_k=50, seed=7, lenience=1)
    completion = await complete(client, sampling=sampling, max_tokens=MAX_TOKENS, num_draft_tokens=4)
    assert completion.statistics.proposed_tokens > 0
    assert completion.statistics.accepted_tokens == completion.statistics.proposed_tokens
    assert completion.statistics.recovered_tokens == 0


@pytest.mark.parametrize("num_draft_tokens", KS)
async def test_rejection_at_temperature_0_is_greedy(client: Client, greedy: Completion, num_draft_tokens: int) -> None:
    completion = await complete(client, sampling=rejection(), max_tokens=MAX_TOKENS, num_draft_tokens=num_draft_tokens)
    assert completion.token_ids == greedy.token_ids


async def test_rejection_is_repeatable_and_sends_less_of_truncated_distributions(client: Client) -> None:
    parameters = {"temperature": 0.9, "seed": 7}
    fields: dict[str, Any] = {"max_tokens": 24, "num_draft_tokens": 4}
    coupled = await complete(client, sampling=SamplingParameters(**parameters), **fields)
    full = await complete(client, sampling=rejection(**parameters), **fields)
    sparse, again = [await complete(client, sampling=rejection(top_k=20, **parameters), **fields) for _ in range(2)]

    assert again.token_ids == sparse.token_ids
    assert 0 < sparse.statistics.accepted_tokens < sparse.statistics.proposed_tokens
    sizes = [c.statistics.round_averages.wire_bytes for c in (coupled, sparse, full)]
    assert sizes[0] < sizes[1] < sizes[2] / 50
    # To and from the coordinator, four bytes for each token of the vocabulary.
    proposed = full.statistics.proposed_tokens / (full.statistics.rounds - 1)
    assert sizes[2] > 2 * proposed * 4 * 8192


# -- Log-probabilities


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParameters(),
        SamplingParameters(temperature=0.7, top_k=20, seed=3),
        SamplingParameters(temperature=0.7, top_k=20, seed=3, acceptance=ACCEPTANCE_METHOD_REJECTION),
        SamplingParameters(temperature=1.5, logit_bias={290: 2.5, 13: -100}, seed=3),
    ],
    ids=["greedy", "top_k", "rejection", "bias"],
)
async def test_log_probabilities_are_those_of_the_target(
    client: Client, target: LoadedModel, tokenizer: Tokenizer, sampling: SamplingParameters, num_draft_tokens: int
) -> None:
    top = 5
    completion = await complete(
        client, sampling=sampling, max_tokens=16, num_draft_tokens=num_draft_tokens, top_log_probabilities=top
    )
    if num_draft_tokens:
        assert completion.statistics.accepted_tokens > 0
        assert completion.statistics.recovered_tokens > 0

    prompt_ids = tokenizer.encode(PROMPT)
    logits = np.array(target.network(mx.array([[*prompt_ids, *completion.token_ids]]))[0], np.float64)
    for token, row in zip(completion.tokens, logits[len(prompt_ids) - 1 :], strict=False):
        values = token.log_probabilities
        model = log_softmax(row)
        np.testing.assert_allclose(values.model, model[token.id], atol=1e-4)
        check_ranked(values.top_model, model, top, tokenizer)

        for token_id, bias in sampling.logit_bias.items():
            row[token_id] += bias
        scores = log_softmax(row)
        kept = 1 if sampling.temperature == 0 else sampling.top_k or scores.size
        scores[scores < np.sort(scores)[-kept]] = -np.inf
        sampled = log_softmax(scores / (sampling.temperature or 1))
        np.testing.assert_allclose(values.sampling, sampled[token.id], atol=1e-4)
        check_ranked(values.top_sampling, sampled, min(top, kept), tokenizer)


def log_softmax(row: np.ndarray) -> np.ndarray:
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


def check_ranked(ranked: Any, expected: np.ndarray, top: int, tokenizer: Tokenizer) -> None:
    assert len({token.id for token in ranked}) == len(ranked) == top
    values = [token.log_probability for token in ranked]
    np.testing.assert_allclose(values, [expected[token.id] for token in ranked], atol=1e-4)
    np.testing.assert_allclose(values, np.sort(expected)[::-1][:top], atol=1e-4)
    assert values == sorted(values, reverse=True)
    assert all(token.text == tokenizer.decode([token.id], skip_special_tokens=False) for token in ranked)


async def test_log_probabilities_come_only_if_asked_for(client: Client, greedy: Completion) -> None:
    assert not any(token.HasField("log_probabilities") for token in greedy.tokens)
    own_only = await complete(client, max_tokens=6, top_log_probabilities=0)
    assert own_only.token_ids == greedy.token_ids[:6]
    for token in own_only.tokens:
        assert token.HasField("log_probabilities")
        assert token.log_probabilities.model < 0
        assert not token.log_probabilities.top_model
        assert not token.log_probabilities.top_sampling


async def test_tokens_that_cannot_be_chosen_have_no_probability(client: Client) -> None:
    completion = await complete(
        client,
        max_tokens=4,
        num_draft_tokens=0,
        top_log_probabilities=20,
        sampling=SamplingParameters(temperature=1, logit_bias={END_TOKEN: 100}),
        stop=StopConditions(min_tokens=3),
    )
    assert completion.token_ids[3:] == [END_TOKEN]
    for token in completion.tokens[:3]:
        assert END_TOKEN not in [ranked.id for ranked in token.log_probabilities.top_sampling]
    assert completion.tokens[3].log_probabilities.top_sampling[0].id == END_TOKEN
    assert completion.tokens[3].log_probabilities.sampling == pytest.approx(0, abs=1e-4)


# -- Statistics


async def test_tokens_that_were_known_are_counted(client: Client) -> None:
    prompt = [4000, *range(100, 160)]
    first, again = [await complete(client, prompt, max_tokens=8, num_draft_tokens=3) for _ in range(2)]
    assert again.token_ids == first.token_ids
    assert first.statistics.target_reused_tokens == first.statistics.draft_reused_tokens == 0
    assert again.statistics.prompt_tokens == len(prompt)
    # The last one is always computed: what comes after it is what the request is for.
    assert again.statistics.target_reused_tokens == len(prompt) - 1
    assert len(prompt) - 1 <= again.statistics.draft_reused_tokens <= len(prompt)
    alone = await complete(client, prompt, max_tokens=8, num_draft_tokens=0)
    assert alone.token_ids == first.token_ids
    assert alone.statistics.draft_reused_tokens == 0
    assert list(alone.statistics.proposed_by_position) == []


@pytest.mark.parametrize("temperature", [2, 100])
async def test_any_tokens_become_the_text_that_they_are(
    client: Client, tokenizer: Tokenizer, temperature: float
) -> None:
    """Most of what is sampled like this is nonsense, with characters that are never completed."""
    sampling = SamplingParameters(temperature=temperature, seed=5)
    stop = StopConditions(ignore_eos=True, strings=["\N{SNOWMAN}", "\N{REPLACEMENT CHARACTER}" * 3])
    completion = await complete(client, sampling=sampling, stop=stop, max_tokens=60, num_draft_tokens=8)
    whole = tokenizer.decode([*tokenizer.encode(PROMPT), *completion.token_ids], skip_special_tokens=True)
    assert PROMPT + completion.text == whole


# -- Chat, and a model with two end tokens


@pytest.fixture(scope="module")
async def chat_stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with Stack(
        target=save_chat_target(tmp_path_factory.mktemp("chat") / "target"), draft=EMBEDDED_DRAFT
    ) as running:
        yield running


@pytest.fixture(scope="module")
async def chat_client(chat_stack: Stack) -> AsyncIterator[Client]:
    async with Client(chat_stack.address) as connected:
        yield connected


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
async def test_each_end_token_ends_the_text(
    chat_client: Client, client: Client, greedy: Completion, num_draft_tokens: int
) -> None:
    assert set((await chat_client.model_info()).target.eos_token_ids) == {END_TOKEN, SECOND_END_TOKEN}
    fields: dict[str, Any] = {"max_tokens": MAX_TOKENS, "num_draft_tokens": num_draft_tokens}
    ended = await complete(chat_client, **fields)
    num_tokens = greedy.token_ids.index(SECOND_END_TOKEN) + 1
    assert ended.token_ids == greedy.token_ids[:num_tokens]
    assert ended.last.finish_reason == FINISH_REASON_EOS

    ignored = await complete(chat_client, stop=StopConditions(ignore_eos=True), **fields)
    assert ignored.token_ids == greedy.token_ids
    assert ignored.last.finish_reason == FINISH_REASON_LENGTH

    at_once = await complete(chat_client, sampling=SamplingParameters(logit_bias={END_TOKEN: 100}), **fields)
    assert at_once.token_ids == [END_TOKEN]

    later = await complete(chat_client, stop=StopConditions(min_tokens=num_tokens), **fields)
    like = await complete(client, stop=StopConditions(min_tokens=num_tokens, token_ids=[SECOND_END_TOKEN]), **fields)
    assert later.token_ids == like.token_ids
    assert SECOND_END_TOKEN not in later.token_ids[:num_tokens]


def struct(values: dict[str, Any]) -> struct_pb2.Struct:
    message = struct_pb2.Struct()
    message.update(values)
    return message


QUESTION = {"role": "user", "content": "def add(a, b):"}
SYSTEM = {"role": "system", "content": "Write code."}
REPLY = {"role": "assistant", "content": "    return"}
TOOL = {"type": "function", "function": {"name": "run"}}
CHATS: dict[str, dict[str, Any]] = {
    "question": {"messages": [QUESTION]},
    "conversation": {"messages": [SYSTEM, QUESTION, REPLY, QUESTION]},
    "continued": {"messages": [QUESTION, REPLY], "continue_final_message": True},
    "fields": {"messages": [{**QUESTION, "aside": "  # please"}]},
    "tools": {"messages": [QUESTION], "tools": [TOOL, TOOL]},
    "arguments": {"messages": [QUESTION], "template_arguments": {"opening": "def", "unused": 3}},
}


def chat_of(
    messages: list[dict[str, Any]],
    tools: Sequence[dict[str, Any]] = (),
    template_arguments: dict[str, Any] | None = None,
    continue_final_message: bool = False,
) -> Chat:
    return Chat(
        messages=[
            ChatMessage(
                role=message["role"],
                content=message["content"],
                fields=struct({name: value for name, value in message.items() if name not in {"role", "content"}}),
            )
            for message in messages
        ],
        tools=map(struct, tools),
        template_arguments=struct(template_arguments or {}),
        continue_final_message=continue_final_message,
    )


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
async def test_a_conversation_is_the_prompt_that_transformers_makes_of_it(
    chat_client: Client, chat: dict[str, Any]
) -> None:
    reference = PreTrainedTokenizerFast(
        tokenizer_file=str(Path(EMBEDDED_TARGET) / "tokenizer.json"), chat_template=CHAT_TEMPLATE
    )
    token_ids = reference.apply_chat_template(
        chat["messages"],
        tools=chat.get("tools"),
        add_generation_prompt=not chat.get("continue_final_message"),
        continue_final_message=chat.get("continue_final_message", False),
        return_dict=False,
        **chat.get("template_arguments", {}),
    )
    fields: dict[str, Any] = {"max_tokens": 8, "stop": StopConditions(ignore_eos=True)}
    expected = await complete(chat_client, token_ids, num_draft_tokens=0, **fields)
    completion = await complete(chat_client, chat_of(**chat), **fields)
    assert completion.statistics.prompt_tokens == len(token_ids)
    assert completion.token_ids == expected.token_ids
    assert completion.text == expected.text


async def test_what_is_wrong_with_a_conversation_is_said(client: Client, chat_client: Client) -> None:
    reason, message = await refusal(client, chat_of([QUESTION]))
    assert reason == "NO_CHAT_TEMPLATE"
    assert EMBEDDED_TARGET in message
    # What the template says can be more than a status has room for.
    for content in ("this", "\N{SNOWMAN}" * 10_000):
        said = [QUESTION, {"role": "nobody", "content": content}]
        reason, message = await refusal(chat_client, chat_of(said))
        assert reason == "CHAT_TEMPLATE_FAILED"
        assert f"nobody may not say {content[:100]}" in message
    reason, message = await refusal(chat_client, chat_of([]))
    assert reason == "EMPTY_PROMPT"
    reason, message = await refusal(chat_client, chat_of([QUESTION], template_arguments={"tokenize": True}))
    assert reason == "OUT_OF_RANGE"
    assert "tokenize" in message
    reason, message = await refusal(chat_client, chat_of([{**QUESTION, "content": "pass\n" * 3000}]))
    assert reason == "CONTEXT_EXCEEDED"


async def test_a_tool_can_be_deep(chat_client: Client) -> None:
    tool: dict[str, Any] = {}
    for _ in range(30):
        tool = {"deeper": tool}
    completion = await complete(chat_client, chat_of([QUESTION], tools=[tool]), max_tokens=2)
    assert completion.statistics.prompt_tokens > 30
