"""Sampling parameters of a request, through real processes: biases, penalties, seeds, REJECTION, log-probabilities."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_logits_processors

from specd.text.tokenizer import Tokenizer
from specd.v1.generation_pb2 import StopConditions
from specd.v1.sampling_pb2 import ACCEPTANCE_METHOD_REJECTION, SamplingParameters
from specd.worker.model.loader import LoadedModel
from tests.e2e.calls import END_TOKEN, responses_to
from tests.e2e.completions import KS, MAX_TOKENS, PROMPT, Completion, complete
from tests.e2e.reference import decode_with_mlx_lm
from tests.raw_client import RawClient

# -- Biases and penalties


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
async def test_biases(client: RawClient, greedy: Completion, num_draft_tokens: int) -> None:
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
    client: RawClient, target: LoadedModel, tokenizer: Tokenizer, options: dict[str, Any]
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


async def test_a_seed_makes_sampling_repeatable(client: RawClient) -> None:
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


async def test_without_a_seed_each_request_gets_its_own(client: RawClient) -> None:
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
    client: RawClient, greedy: Completion, parameters: dict[str, Any], temperature: float
) -> None:
    sampling = SamplingParameters(temperature=temperature, **parameters)
    completion = await complete(client, sampling=sampling, max_tokens=6, num_draft_tokens=0)
    assert completion.token_ids == greedy.token_ids[:6]


# -- Acceptance by REJECTION


def rejection(**parameters: Any) -> SamplingParameters:
    return SamplingParameters(acceptance=ACCEPTANCE_METHOD_REJECTION, **parameters)


@pytest.mark.parametrize("temperature", [0, 0.9])
async def test_with_lenience_1_everything_is_accepted(client: RawClient, temperature: float) -> None:
    sampling = rejection(temperature=temperature, top_k=50, seed=7, lenience=1)
    completion = await complete(client, sampling=sampling, max_tokens=MAX_TOKENS, num_draft_tokens=4)
    assert completion.statistics.proposed_tokens > 0
    assert completion.statistics.accepted_tokens == completion.statistics.proposed_tokens
    assert completion.statistics.recovered_tokens == 0


@pytest.mark.parametrize("num_draft_tokens", KS)
async def test_rejection_at_temperature_0_is_greedy(
    client: RawClient, greedy: Completion, num_draft_tokens: int
) -> None:
    completion = await complete(client, sampling=rejection(), max_tokens=MAX_TOKENS, num_draft_tokens=num_draft_tokens)
    assert completion.token_ids == greedy.token_ids


async def test_rejection_is_repeatable_and_sends_less_of_truncated_distributions(client: RawClient) -> None:
    parameters: dict[str, Any] = {"temperature": 0.9, "seed": 7}
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
    client: RawClient, target: LoadedModel, tokenizer: Tokenizer, sampling: SamplingParameters, num_draft_tokens: int
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


async def test_an_echo_is_the_text_of_the_prompt(client: RawClient, tokenizer: Tokenizer) -> None:
    text = "größe = '\N{SNOWMAN}'  # \N{GRINNING FACE}\n"
    whole, *_ = await responses_to(client.generate(text, max_tokens=2, echo=True))
    assert "".join(token.text for token in whole.prompt_tokens) == text
    assert [token.id for token in whole.prompt_tokens] == tokenizer.encode(text)
    assert not any(token.HasField("log_probabilities") for token in whole.prompt_tokens)
    cut = tokenizer.encode(text)[: len(tokenizer.encode(text)) // 2]
    part, *_ = await responses_to(client.generate(cut, max_tokens=2, echo=True))
    assert "".join(token.text for token in part.prompt_tokens) == tokenizer.decode(cut, skip_special_tokens=True)
    assert not (await responses_to(client.generate(text, max_tokens=2, top_log_probabilities=1)))[0].prompt_tokens


async def test_an_echo_is_of_all_of_a_session(client: RawClient) -> None:
    first = await complete(client, max_tokens=4)
    second, *_ = await responses_to(
        client.generate("\n", max_tokens=2, session_id=first.last.session_id, echo=True, top_log_probabilities=0)
    )
    assert "".join(token.text for token in second.prompt_tokens) == f"{PROMPT}{first.text}\n"
    assert [token.HasField("log_probabilities") for token in second.prompt_tokens].count(False) == 1


async def test_log_probabilities_come_only_if_asked_for(client: RawClient, greedy: Completion) -> None:
    assert not any(token.HasField("log_probabilities") for token in greedy.tokens)
    own_only = await complete(client, max_tokens=6, top_log_probabilities=0)
    assert own_only.token_ids == greedy.token_ids[:6]
    for token in own_only.tokens:
        assert token.HasField("log_probabilities")
        assert token.log_probabilities.model < 0
        assert not token.log_probabilities.top_model
        assert not token.log_probabilities.top_sampling


async def test_tokens_that_cannot_be_chosen_have_no_probability(client: RawClient) -> None:
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


@pytest.mark.parametrize("temperature", [2, 100])
async def test_any_tokens_become_the_text_that_they_are(
    client: RawClient, tokenizer: Tokenizer, temperature: float
) -> None:
    """Most texts that are sampled like this are nonsense, with characters that are never completed."""
    sampling = SamplingParameters(temperature=temperature, seed=5)
    stop = StopConditions(ignore_eos=True, strings=["\N{SNOWMAN}", "\N{REPLACEMENT CHARACTER}" * 3])
    completion = await complete(client, sampling=sampling, stop=stop, max_tokens=60, num_draft_tokens=8)
    whole = tokenizer.decode([*tokenizer.encode(PROMPT), *completion.token_ids], skip_special_tokens=True)
    assert PROMPT + completion.text == whole
