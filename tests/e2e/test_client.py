"""The Python client against real processes, whose coordinator is killed in the middle of streams."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from jsonschema import validate
from pydantic import BaseModel, ConfigDict, Field

from specd import AsyncClient, Client
from specd.client import Completion, Delta, Finished, GenerationOptions, Grammar, Retrying, RetryPolicy, Stream
from specd.errors import InvalidRequestError, NotFoundError, SpecdError, UnavailableError
from specd.supervisor import Stack
from specd.vocabulary import FinishReason, TokenSource
from tests.e2e.faults import SEED
from tests.e2e.processes import PATIENCE_SECONDS
from tests.thorough import examples

PROMPT = "class Stack:\n    def"


@pytest.fixture(scope="module")
def blocking(stack: Stack) -> Iterator[Client]:
    """A client for threads."""
    with Client(stack.address) as client:
        yield client


def in_thread(function: Any, *arguments: Any) -> Any:
    """Return a future of a thread's result, so that the event loop, which watches the processes, keeps running."""
    return asyncio.wait_for(asyncio.to_thread(function, *arguments), PATIENCE_SECONDS)


async def test_events_are_the_text_its_tokens_and_the_end(blocking: Client) -> None:
    def read() -> tuple[list[Any], Completion, Completion]:
        stream = blocking.generate(PROMPT, max_tokens=24, num_draft_tokens=4, draft_source="model")
        events = list(stream)
        alone = blocking.generate(PROMPT, max_tokens=24, draft_source="none").completion()
        return events, stream.completion(), alone

    events, completion, alone = await in_thread(read)
    *deltas, finished = events
    assert all(isinstance(event, Delta) for event in deltas)
    assert isinstance(finished, Finished)
    assert "".join(delta.text for delta in deltas) == completion.text == alone.text
    assert [token for delta in deltas for token in delta.tokens] == list(completion.tokens)
    assert {token.source for token in completion.tokens} == {TokenSource.TARGET, TokenSource.DRAFT}
    assert {token.source for token in alone.tokens} == {TokenSource.TARGET}
    assert finished.reason is completion.finish_reason is FinishReason.LENGTH
    statistics = completion.statistics
    assert statistics.generated_tokens == len(completion.tokens) == 24
    assert statistics.accepted_tokens == sum(delta.round.accepted for delta in deltas)
    assert 0 < statistics.acceptance_rate <= 1
    assert statistics.tokens_per_second > 0
    assert statistics.num_resumptions == 0


async def test_the_same_seed_gives_the_same_tokens_to_both_clients(stack: Stack, blocking: Client) -> None:
    options: GenerationOptions = {"temperature": 1.0, "seed": SEED, "max_tokens": 24, "top_log_probabilities": 2}
    async with AsyncClient(stack.address) as client:
        one = await client.generate(PROMPT, **options).completion()
        pieces = [text async for text in client.generate(PROMPT, **options).texts()]
    other = await in_thread(lambda: blocking.generate(PROMPT, **options).completion())
    assert one.token_ids == other.token_ids
    assert "".join(pieces) == one.text
    assert one.seed == SEED
    values = one.tokens[0].log_probabilities
    assert values is not None
    assert len(values.top_model) == 2


async def test_a_client_says_what_it_is_connected_to(stack: Stack, blocking: Client) -> None:
    described = await in_thread(blocking.describe)
    assert described.target.vocabulary_size == 8192
    assert described.draft is not None
    async with AsyncClient(stack.address) as client:
        assert await client.describe() == described


async def test_a_generation_can_name_its_model(stack: Stack, blocking: Client) -> None:
    def ask() -> None:
        (model,) = blocking.models()
        assert model == blocking.describe().target
        named = blocking.generate(PROMPT, model=model.name, max_tokens=4).completion()
        assert named.token_ids == blocking.generate(PROMPT, max_tokens=4).completion().token_ids
        with pytest.raises(SpecdError, match=f"the one that is served is '{model.name}'") as refused:
            blocking.generate(PROMPT, model="another", max_tokens=4).completion()
        assert refused.value.reason == "MODEL_NOT_FOUND"
        with pytest.raises(SpecdError, match="'another'"):
            blocking.count_tokens(PROMPT, model="another")

    await in_thread(ask)


async def test_a_session_is_deleted_at_its_end(stack: Stack, blocking: Client) -> None:
    def talk() -> tuple[Completion, Completion, Completion, str]:
        with blocking.session() as session:
            first = session.generate(PROMPT, max_tokens=8).completion()
            second = session.generate("\n    def", max_tokens=8).completion()
            whole = blocking.generate(list(session.token_ids)[:-8], max_tokens=8).completion()
            return first, second, whole, session.session_id

    first, second, whole, session_id = await in_thread(talk)
    assert second.session_id == first.session_id == session_id
    assert second.text == whole.text
    assert second.statistics.target_reused_tokens > 0
    with pytest.raises(NotFoundError, match=session_id):
        await in_thread(blocking.delete_session, session_id)
    async with AsyncClient(stack.address) as client:
        async with client.session() as session:
            assert (await session.generate(PROMPT, max_tokens=8).completion()).token_ids == first.token_ids
        with pytest.raises(NotFoundError):
            await client.session(session.session_id).generate("\n", max_tokens=1).completion()


async def test_a_stream_can_be_closed(stack: Stack, blocking: Client) -> None:
    def begin() -> Stream:
        with blocking.generate(PROMPT, max_tokens=1500, ignore_eos=True) as stream:
            next(stream)
            return stream

    stream = await in_thread(begin)
    assert 0 < len(stream.tokens) < 1500
    assert await in_thread(list, stream) == []
    with pytest.raises(RuntimeError, match="closed before its end"):
        stream.completion()


def test_a_stream_can_be_cancelled_on_another_thread(stack: Stack) -> None:
    """Reading ends with it, wherever it is, and the connection serves the next request."""
    with Client(stack.address) as connected:
        for num_events in range(5):
            with connected.generate(PROMPT, max_tokens=1500, ignore_eos=True) as stream:
                for _ in range(num_events):
                    next(stream)
                threading.Thread(target=stream.cancel).start()
                assert sum(isinstance(event, Delta) for event in stream) < 200
                with pytest.raises(RuntimeError, match="closed before its end"):
                    stream.completion()
        assert connected.generate(PROMPT, max_tokens=4).completion().tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [({"max_tokens": 3000}, "max_tokens 3000"), ({"max_tokens": -1}, "-1"), ({"seed": 2**64}, "18446744073709551616")],
)
async def test_what_is_wrong_is_said(blocking: Client, options: GenerationOptions, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        await in_thread(lambda: blocking.generate(PROMPT, **options).completion())


async def test_an_option_that_does_not_exist_is_no_silent_one(blocking: Client) -> None:
    with pytest.raises(TypeError, match="temprature"):
        blocking.generate(PROMPT, temprature=1.0)  # type: ignore[call-arg]


async def test_time_runs_out(blocking: Client) -> None:
    with pytest.raises(SpecdError) as raised:
        await in_thread(
            lambda: blocking.generate(PROMPT, max_tokens=1500, ignore_eos=True, timeout_seconds=0.3).completion()
        )
    assert raised.value.reason == "DEADLINE_EXCEEDED"


async def test_nobody_there_is_said_at_once() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(UnavailableError, match="does not answer"):
        await in_thread(lambda: client.generate(PROMPT).completion())


async def test_an_answer_in_a_conversation_needs_a_template(blocking: Client) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        await in_thread(lambda: blocking.chat("hello").completion())
    assert raised.value.reason == "NO_CHAT_TEMPLATE"


LONG: GenerationOptions = {
    "temperature": 0.8,
    "seed": SEED,
    "max_tokens": 160,
    "ignore_eos": True,
    "repetition_penalty": 1.1,
    "stop": "no such text",
}
ALONE: GenerationOptions = {**LONG, "draft_source": "none"}


@pytest.mark.parametrize("signal_number", examples([signal.SIGKILL, signal.SIGTERM], 1))
@pytest.mark.parametrize("kind", examples(["threads", "event loops"], 1))
async def test_a_stream_whose_coordinator_is_killed_is_whole(
    harmed_stack: Stack, kind: str, signal_number: signal.Signals
) -> None:
    """Killed twice: the text is that of an undisturbed run. With SIGTERM its time to end is up before the stream is."""
    async with AsyncClient(harmed_stack.address) as client:
        expected = await client.generate(PROMPT, **ALONE).completion()
        retries, kills = 0, 0

        def seen(event: Any) -> None:
            nonlocal retries, kills
            retries += isinstance(event, Retrying)
            if isinstance(event, Delta) and len(stream.tokens) > 50 * (kills + 1) and kills < 2:
                kills += 1
                os.kill(harmed_stack.coordinator.pid, signal_number)

        if kind == "event loops":
            stream: Any = client.generate(PROMPT, **LONG)
            async for event in stream:
                seen(event)
            completion = await stream.completion()
        else:
            with Client(harmed_stack.address) as blocking:
                stream = blocking.generate(PROMPT, **LONG)

                def read() -> Completion:
                    for event in stream:
                        seen(event)
                    whole: Completion = stream.completion()
                    return whole

                completion = await in_thread(read)
    assert kills == 2
    assert completion.text == expected.text
    assert completion.token_ids == expected.token_ids
    assert completion.finish_reason is expected.finish_reason
    if signal_number is signal.SIGKILL:
        assert retries >= 2
        assert completion.statistics.num_resumptions == 2
    assert completion.statistics.generated_tokens == 160


async def test_a_session_whose_coordinator_is_killed_goes_on(harmed_stack: Stack) -> None:
    options: GenerationOptions = {"temperature": 0.8, "seed": SEED, "max_tokens": 20, "ignore_eos": True}
    prompts = [PROMPT, "\n    def", "\n\nclass"]
    async with AsyncClient(harmed_stack.address) as client:
        calm, hurt = client.session(), client.session()
        expected = [(await calm.generate(prompt, **options).completion()).token_ids for prompt in prompts]
        got = []
        for number, prompt in enumerate(prompts):
            stream = hurt.generate(prompt, **options)
            if number == 1:  # between turns
                os.kill(harmed_stack.coordinator.pid, signal.SIGKILL)
            if number == 2:  # and within one
                async for event in stream:
                    if isinstance(event, Delta):
                        break
                os.kill(harmed_stack.coordinator.pid, signal.SIGKILL)
            got.append((await stream.completion()).token_ids)
        assert got == expected
        assert hurt.token_ids[-20:] == tuple(expected[-1])


async def test_threads_share_a_client(blocking: Client) -> None:
    texts: list[str] = []

    def generate() -> None:
        texts.append(blocking.generate(PROMPT, max_tokens=16).completion().text)

    threads = [threading.Thread(target=generate) for _ in range(4)]
    for thread in threads:
        thread.start()
    await in_thread(lambda: [thread.join() for thread in threads])
    assert len(texts) == 4
    assert len(set(texts)) == 1


def test_importing_specd_imports_no_grpc() -> None:
    code = "import specd, sys; assert 'grpc' not in sys.modules; from specd import Client, AsyncClient; print(Client)"
    heavy = "print([name for name in ('mlx', 'transformers', 'tokenizers', 'starlette') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", f"{code}; {heavy}"], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")


def test_no_policy_waits_less_than_it_is_asked_to() -> None:
    policy = RetryPolicy(first_pause_seconds=0.1, longest_pause_seconds=2.0)
    for failures in (1, 2, 3, 10, 5000):
        assert 0 < policy.pause(failures, 0.0, 0.0) <= policy.pause(failures, 0.0, 0.999) <= 2.0
        assert policy.pause(failures, 5.0, 0.0) >= 5.0


async def test_a_prompt_has_as_many_tokens_as_are_counted(stack: Stack, blocking: Client) -> None:
    completion = await in_thread(lambda: blocking.generate(PROMPT, max_tokens=2).completion())
    count = await in_thread(lambda: blocking.count_tokens(PROMPT))
    async with AsyncClient(stack.address) as client:
        assert await client.count_tokens(PROMPT) == count
        assert not (await client.count_tokens(PROMPT, max_tokens=count.room + 1)).fits
    assert count.prompt_tokens == completion.statistics.prompt_tokens > 1
    assert count.fits


class Thing(BaseModel):
    """A class with fields that are not in the order of the alphabet."""

    model_config = ConfigDict(extra="forbid")

    title: str = Field(max_length=12)
    colour: Literal["red", "green"]
    count: int = Field(ge=0, le=999)
    both: tuple[bool, bool]


FORMED: Any = {"temperature": 1.0, "seed": SEED, "max_tokens": 400}


async def test_a_schema_gives_values(stack: Stack, blocking: Client) -> None:
    schema = Thing.model_json_schema()
    async with AsyncClient(stack.address) as client:
        thing = await client.generate(PROMPT, schema=Thing, **FORMED).completion()
        value = await client.generate(PROMPT, schema=schema, **FORMED).completion()
    assert isinstance(thing.parsed, Thing)
    assert thing.text == value.text
    assert value.parsed == thing.parsed.model_dump(mode="json")
    assert list(value.parsed) == list(Thing.model_fields)
    validate(value.parsed, schema)
    alone = await in_thread(
        lambda: blocking.generate(PROMPT, schema=json.dumps(schema), draft_source="none", **FORMED).completion()
    )
    assert alone.parsed == value.parsed
    assert alone.token_ids == value.token_ids


@pytest.mark.parametrize(
    ("grammar", "texts"),
    [
        (Grammar.choice(["yes (a.b)", "no|never"]), {"yes (a.b)", "no|never"}),
        (Grammar.regex("[ab]x?"), {"a", "b", "ax", "bx"}),
        (Grammar.lark('start: "left" | "right"'), {"left", "right"}),
    ],
)
async def test_a_grammar_is_kept(blocking: Client, grammar: Grammar, texts: set[str]) -> None:
    completion = await in_thread(lambda: blocking.generate(PROMPT, grammar=grammar, **FORMED).completion())
    assert completion.text in texts
    assert completion.parsed is None
    with blocking.session() as session:
        turns = await in_thread(
            lambda: [session.generate(prompt, grammar=grammar, **FORMED).completion() for prompt in (PROMPT, "\n")]
        )
    assert {turn.text for turn in turns} <= texts


async def test_a_text_that_was_cut_is_no_value(blocking: Client) -> None:
    cut = await in_thread(lambda: blocking.generate(PROMPT, schema=Thing, max_tokens=3).completion())
    with pytest.raises(ValueError, match=r"ended by length after 3 tokens: set a larger max_tokens"):
        _ = cut.parsed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schema": {}, "grammar": Grammar.json_object()}, "both schema and grammar"),
        ({"schema": {"default": float("nan")}}, "cannot be sent"),
        ({"schema": '{"a"'}, "json_schema is not JSON"),
        ({"schema": {"not": {"type": "string"}}}, "not"),
        ({"grammar": Grammar.regex("(")}, "grammar.regex cannot be kept"),
    ],
)
async def test_a_form_that_cannot_be_kept_says_why(blocking: Client, options: GenerationOptions, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        await in_thread(lambda: blocking.generate(PROMPT, **options).completion())


async def test_a_form_outlives_the_coordinator(harmed_stack: Stack) -> None:
    async with AsyncClient(harmed_stack.address) as client:
        expected = await client.generate(PROMPT, schema=Thing, **FORMED).completion()
        stream = client.generate(PROMPT, schema=Thing, **FORMED)
        killed = False
        async for event in stream:
            if isinstance(event, Delta) and len(stream.tokens) > 5 and not killed:
                killed = True
                os.kill(harmed_stack.coordinator.pid, signal.SIGKILL)
        completion = await stream.completion()
    assert completion.statistics.num_resumptions == 1
    assert completion.token_ids == expected.token_ids
    assert completion.parsed == expected.parsed
