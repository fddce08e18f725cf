"""Answers that keep a grammar: valid, and the same for every source, k, batch, death and way to draft."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import jsonschema
import pytest

from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from specd.v1.generation_pb2 import (
    DRAFT_SOURCE_LOOKUP,
    DRAFT_SOURCE_MODEL,
    DRAFT_SOURCE_UNSPECIFIED,
    FINISH_REASON_EOS,
    Reasoning,
    StopConditions,
)
from specd.v1.sampling_pb2 import (
    ACCEPTANCE_METHOD_COUPLED,
    ACCEPTANCE_METHOD_REJECTION,
    Grammar,
    SamplingParameters,
)
from tests.e2e.completions import Completion, complete
from tests.e2e.faults import ENVIRONMENT, eventually, is_whole, kill
from tests.e2e.processes import draft_of, read_metric
from tests.maskbench import schemas
from tests.raw_client import RawClient
from tests.thorough import examples

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON = Grammar(json_schema=json.dumps(SCHEMA))
WIDE = {"type": "object", "properties": {f"k{i}": {} for i in range(3000)}}
SOURCES: dict[str, dict[str, Any]] = {
    "none": {"num_draft_tokens": 0},
    "model": {"draft_source": DRAFT_SOURCE_MODEL, "num_draft_tokens": 4},
    "look-up": {"draft_source": DRAFT_SOURCE_LOOKUP},
    "all": {},
}
_NUM_PARTS = 45  # of the schemas
_LONG_PARTS = {6, 36}  # this model rarely ends an answer of their schemas within 200 tokens
TEMPERATURES = (0.0, 0.7, 1.0)
PROMPTS = ("# a record as JSON\nx = ", "import json\nrecord = ", "{'name': 'Ada'}\n")


def sampling(temperature: float, seed: int = 3, **fields: Any) -> SamplingParameters:
    return SamplingParameters(temperature=temperature, seed=seed, **fields)


async def answer(client: RawClient, prompt: str, temperature: float, k: int | None, **fields: Any) -> Completion:
    """Complete a prompt as a record, which must be valid."""
    given = {} if k is None else {"num_draft_tokens": k}
    fields = {"grammar": JSON, "max_tokens": 300, "sampling": sampling(temperature)} | fields
    completion = await complete(client, prompt, **fields, **given)
    assert completion.last.finish_reason == FINISH_REASON_EOS, completion.text
    jsonschema.validate(json.loads(completion.text), SCHEMA)
    return completion


@pytest.mark.parametrize("temperature", examples([0.7, 0.0, 1.0], 1))
async def test_texts_are_the_same_for_every_source_and_k(client: RawClient, temperature: float) -> None:
    for prompt in PROMPTS:
        expected = await answer(client, prompt, temperature, 0)
        for k, source in (
            (4, DRAFT_SOURCE_MODEL),
            (8, DRAFT_SOURCE_MODEL),
            (6, DRAFT_SOURCE_LOOKUP),
            (None, DRAFT_SOURCE_UNSPECIFIED),
        ):
            drafted = await answer(client, prompt, temperature, k, draft_source=source)
            assert drafted.token_ids == expected.token_ids
            if k == 4:
                assert 0 < drafted.statistics.accepted_tokens <= drafted.statistics.proposed_tokens


@pytest.mark.thorough
async def test_rejection_and_penalties_keep_the_grammar(client: RawClient) -> None:
    for seed in range(4):
        given = sampling(1.0, seed, acceptance=ACCEPTANCE_METHOD_REJECTION)
        await answer(client, PROMPTS[0], 1.0, 4, sampling=given)
        given = sampling(1.0, seed, repetition_penalty=1.3, frequency_penalty=0.5, top_p=0.9, top_k=20, min_p=0.05)
        texts = {(await answer(client, PROMPTS[0], 1.0, k, sampling=given)).text for k in (0, 3, 7)}
        assert len(texts) == 1


@pytest.mark.thorough
async def test_free_and_constrained_sessions_go_together(client: RawClient) -> None:
    free = [(await complete(client, prompt, max_tokens=60, sampling=sampling(1.0))).token_ids for prompt in PROMPTS]
    alone = [(await answer(client, prompt, 1.0, 0)).token_ids for prompt in PROMPTS]
    together = await asyncio.gather(
        *(answer(client, prompt, 1.0, k) for prompt, k in zip(PROMPTS, (4, None, 0), strict=True)),
        *(complete(client, prompt, max_tokens=60, sampling=sampling(1.0)) for prompt in PROMPTS),
    )
    assert [each.token_ids for each in together] == [*alone, *free]


async def test_forced_tokens_are_proposed_and_change_no_text() -> None:
    """They are the only source here, and eight in a round at most."""
    names = [f"the_{word}_of_the_configuration_file" for word in ("name", "size", "owner", "purpose", "encoding")]
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer", "maximum": 9, "minimum": 0} for name in names},
        "required": names,
        "additionalProperties": False,
    }
    fields = {"grammar": Grammar(json_schema=json.dumps(schema)), "max_tokens": 300, "sampling": sampling(0.7)}
    environment = ENVIRONMENT | {"SPECD_COORDINATOR_LOOKUP": "false"}
    async with (
        Stack(target=EMBEDDED_TARGET, draft="", environment=environment) as stack,
        RawClient(stack.address) as client,
    ):
        expected = await complete(client, "x = ", num_draft_tokens=0, **fields)
        drafted = await complete(client, "x = ", num_draft_tokens=8, **fields)
        await complete(client, "x = ", max_tokens=3)
        assert read_metric(stack.coordinator, "specd_constrained_tokens_total") == 2 * len(expected.token_ids)
        num_masked = read_metric(stack.target, "specd_worker_mask_seconds_count")
        assert num_masked == expected.statistics.rounds + drafted.statistics.rounds
    jsonschema.validate(json.loads(expected.text), schema)
    assert drafted.token_ids == expected.token_ids
    forced = drafted.statistics.sources["forced"]
    print(f"{forced.accepted} of {forced.proposed} forced tokens accepted, {drafted.statistics.rounds} rounds")
    assert forced.accepted > 0.8 * forced.proposed > 20


@pytest.fixture(scope="module")
async def mortal() -> AsyncIterator[Stack]:
    async with Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, environment=ENVIRONMENT) as running:
        yield running


@pytest.mark.parametrize(
    ("victim", "kill_in_round"), examples([("target", 3), ("draft", 2), ("target", 9), ("target", 1)], 2)
)
async def test_a_death_in_the_middle_changes_nothing(mortal: Stack, victim: str, kill_in_round: int) -> None:
    async with RawClient(mortal.address) as client:
        await eventually(lambda: is_whole(mortal))
        expected = await answer(client, PROMPTS[0], 1.0, 0)
        responses = []
        async for response in client.generate(
            PROMPTS[0], max_tokens=300, num_draft_tokens=2, grammar=JSON, sampling=sampling(1.0)
        ):
            responses.append(response)
            if len(responses) == kill_in_round:
                kill(mortal.target if victim == "target" else draft_of(mortal))
    completion = Completion(responses)
    assert completion.token_ids == expected.token_ids
    if victim == "target":
        assert completion.statistics.target_replays >= 1


async def test_a_broken_stream_resumes_in_the_middle_of_the_answer(client: RawClient) -> None:
    expected = await answer(client, PROMPTS[1], 1.0, 0)
    for num_kept in (1, 5, len(expected.token_ids) - 2):
        kept = expected.token_ids[:num_kept]
        resumed = await complete(
            client,
            PROMPTS[1],
            max_tokens=300,
            grammar=JSON,
            sampling=sampling(1.0),
            num_draft_tokens=3,
            resumption={"token_ids": kept, "prompt_fingerprint": expected.responses[0].prompt_fingerprint},
        )
        assert kept + resumed.token_ids == expected.token_ids


@pytest.mark.thorough
async def test_a_target_that_drafts_itself_keeps_the_grammar() -> None:
    options = {"target-worker": {"self_draft": EMBEDDED_DRAFT}}
    async with (
        Stack(target=EMBEDDED_TARGET, draft="", environment=ENVIRONMENT, options=options) as stack,
        RawClient(stack.address) as client,
    ):
        for acceptance in (ACCEPTANCE_METHOD_COUPLED, ACCEPTANCE_METHOD_REJECTION):
            given = sampling(1.0, acceptance=acceptance)
            completions = [await answer(client, PROMPTS[0], 1.0, k, sampling=given) for k in (0, 4, None)]
            assert completions[1].statistics.proposed_tokens > 0
            if acceptance == ACCEPTANCE_METHOD_COUPLED:
                assert len({each.text for each in completions}) == 1


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar(regex="[0-9]{3}-[0-9]{4}"), "[0-9]{3}-[0-9]{4}"),
        (Grammar(regex="(yes|no)"), "(yes|no)"),
        (Grammar(lark='start: "if " NAME ":"\nNAME: /[a-z]{1,9}/'), "if [a-z]{1,9}:"),
    ],
)
async def test_other_grammars(client: RawClient, grammar: Grammar, pattern: str) -> None:
    for temperature in (0.0, 1.0):
        texts = {
            (await complete(client, "x = ", grammar=grammar, num_draft_tokens=k, sampling=sampling(temperature))).text
            for k in (0, 4)
        }
        assert len(texts) == 1
        jsonschema.validate(texts.pop(), {"type": "string", "pattern": f"^{pattern}$"})


@pytest.mark.parametrize("end", [" None", " None:\n"])
async def test_reasoning_is_free_and_the_answer_keeps_the_grammar(client: RawClient, end: str) -> None:
    """The text up to its first " None", which is one token, stands for the reasoning of this model, or several."""
    grammar = Grammar(regex="[a-z]{2,5}[0-9]{2}")
    stop = StopConditions(reasoning=Reasoning(end=end))
    texts = set()
    for k in (0, 4, None):
        given = {} if k is None else {"num_draft_tokens": k}
        completion = await complete(
            client, "def add(a, b)", grammar=grammar, stop=stop, sampling=sampling(0.0), max_tokens=60, **given
        )
        reasoning, _, said = completion.text.partition(end)
        assert reasoning == " ->"
        jsonschema.validate(said.lstrip("\n"), {"type": "string", "pattern": "^[a-z]{2,5}[0-9]{2}$"})
        texts.add(completion.text)
    assert len(texts) == 1


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a keyword": ({"grammar": Grammar(json_schema='{"uniqueItems": true}')}, "BAD_GRAMMAR", "uniqueItems"),
    "no kind": ({"grammar": Grammar()}, "OUT_OF_RANGE", "grammar has no kind"),
    "ignore_eos": ({"grammar": JSON, "stop": StopConditions(ignore_eos=True)}, "CONTRADICTION", "ignore_eos"),
    "min_tokens": (
        {"grammar": Grammar(regex="ab"), "stop": StopConditions(min_tokens=20)}, "GRAMMAR_BROKEN", "min_tokens",
    ),
    "min_tokens without a draft": (
        {"grammar": Grammar(regex="ab"), "stop": StopConditions(min_tokens=20), "num_draft_tokens": 0},
        "GRAMMAR_BROKEN", "because other parameters, such as min_tokens",
    ),
    "min_tokens at the last token": (
        {"grammar": Grammar(regex="a"), "stop": StopConditions(min_tokens=3), "max_tokens": 3, "num_draft_tokens": 0},
        "GRAMMAR_BROKEN", "because other parameters, such as min_tokens",
    ),
    "resumption": (
        {"grammar": Grammar(regex="ab"), "resumption": {"token_ids": [77]}}, "GRAMMAR_BROKEN", "forbids token 77",
    ),
    "too large": (
        {"grammar": Grammar(json_schema=json.dumps(WIDE))},
        "GRAMMAR_BROKEN", "too large",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_a_grammar_that_cannot_be_kept_ends_with_the_reason(client: RawClient, name: str) -> None:
    fields, reason, words = REFUSED[name]
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await complete(client, "x = {", **fields)
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert words in (raised.value.details() or "")
    assert reason in str(raised.value.trailing_metadata())
    await answer(client, PROMPTS[0], 0.0, 2)


def check_parting(one: Completion, other: Completion) -> None:
    """Check that two texts are the same, up to a near tie: of 20,000 tokens, one or two are closer than float32."""
    for first, second in zip(one.tokens, other.tokens, strict=False):
        if first.id != second.id:
            assert first.near_tie and second.near_tie
            return
    assert len(one.tokens) == len(other.tokens)


@pytest.mark.parametrize(("turn", "part"), examples(itertools.product(range(len(TEMPERATURES)), range(_NUM_PARTS)), 1))
async def test_answers_are_valid_for_schemas_of_others(client: RawClient, turn: int, part: int) -> None:
    """MaskBench's schemas, a part at a time, each at one temperature a turn: the same text with every source."""
    chosen = [(number, each["schema"]) for number, each in enumerate(schemas()) if number % _NUM_PARTS == part]
    lock, counts = asyncio.Semaphore(4), Counter[str]()

    async def completed(number: int, schema: Any, fields: dict[str, Any]) -> Completion | None:
        """Return a completion, None for a schema that is refused."""
        asked = {"grammar": Grammar(json_schema=json.dumps(schema)), "max_tokens": 200, **fields}
        temperature = TEMPERATURES[(number // _NUM_PARTS + turn) % len(TEMPERATURES)]
        async with lock:
            try:
                return await complete(client, "# JSON\nx = ", sampling=sampling(temperature, number), **asked)
            except grpc.aio.AioRpcError as error:
                assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
                return None

    async def check(number: int, schema: Any) -> None:
        completions = await asyncio.gather(*(completed(number, schema, fields) for fields in SOURCES.values()))
        answers = [completion for completion in completions if completion is not None]
        assert len(answers) in {0, len(completions)}
        for completion in answers:
            check_parting(answers[0], completion)
            is_whole = completion.last.finish_reason == FINISH_REASON_EOS
            if is_whole:
                jsonschema.validate(json.loads(completion.text), schema)
            counts["valid" if is_whole else "cut"] += 1

    await asyncio.gather(*(check(*each) for each in chosen))
    print(dict(counts))
    assert counts["valid"] >= len(chosen) or (part in _LONG_PARTS and counts.total() >= len(chosen))
