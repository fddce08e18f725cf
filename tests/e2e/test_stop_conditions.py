"""Stop conditions, through real processes: stop strings and tokens, end tokens, min_tokens and max_tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from specd.v1.generation_pb2 import (
    FINISH_REASON_EOS,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP_STRING,
    FINISH_REASON_STOP_TOKEN,
    StopConditions,
)
from specd.v1.sampling_pb2 import SamplingParameters
from tests.e2e.calls import END_TOKEN
from tests.e2e.completions import KS, MAX_TOKENS, Completion, complete
from tests.raw_client import RawClient


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
    client: RawClient, greedy: Completion, strings_of: Any, num_draft_tokens: int
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
    client: RawClient, greedy: Completion, num_draft_tokens: int
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
    # Text that may become a stop string is held back.
    assert any(not token.text for token in completion.tokens)


@pytest.mark.parametrize("num_draft_tokens", KS)
async def test_a_stop_token_ends_the_text_with_it(client: RawClient, greedy: Completion, num_draft_tokens: int) -> None:
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
async def test_min_tokens_puts_off_stop_tokens(client: RawClient, greedy: Completion, num_draft_tokens: int) -> None:
    comma = greedy.token_ids[4]
    stop = StopConditions(min_tokens=12, token_ids=[comma])
    completion = await complete(client, stop=stop, max_tokens=MAX_TOKENS, num_draft_tokens=num_draft_tokens)

    # The comma could not be chosen, so that the text is another one.
    assert completion.token_ids[:4] == greedy.token_ids[:4]
    assert comma not in completion.token_ids[:12]
    alone = await complete(client, stop=stop, max_tokens=MAX_TOKENS, num_draft_tokens=0)
    assert completion.token_ids == alone.token_ids
    assert (completion.last.finish_reason == FINISH_REASON_STOP_TOKEN) == (comma in completion.token_ids)


async def test_a_stop_string_after_min_tokens_counts(client: RawClient, greedy: Completion) -> None:
    string = greedy.tokens[3].text
    for min_tokens in (1, 4, 11, 17):
        expected = stopped_by(greedy, [string], min_tokens)
        assert expected is not None
        assert expected[1] > min_tokens
        stop = StopConditions(min_tokens=min_tokens, strings=[string])
        completion = await complete(client, stop=stop, max_tokens=MAX_TOKENS, num_draft_tokens=4)
        assert (completion.text, len(completion.tokens), completion.last.stop_string) == expected


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
async def test_end_tokens(client: RawClient, greedy: Completion, num_draft_tokens: int) -> None:
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
async def test_max_tokens(client: RawClient, greedy: Completion, max_tokens: int, num_draft_tokens: int) -> None:
    completion = await complete(client, max_tokens=max_tokens, num_draft_tokens=num_draft_tokens)
    assert completion.token_ids == greedy.token_ids[:max_tokens]
    assert completion.last.finish_reason == FINISH_REASON_LENGTH
