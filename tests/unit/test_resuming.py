"""A text is the same for any number of breaks of its stream: the client's code against the coordinator's."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
import structlog
from hypothesis import example, given
from hypothesis import strategies as st

from specd.client.async_client import AsyncClient
from specd.client.async_session import AsyncClientSession
from specd.client.async_stream import AsyncStream
from specd.client.events import Completion, Delta, Retrying
from specd.client.options import GenerationOptions
from specd.client.resuming.generation import Connection, ResumableGeneration, Turn
from specd.client.resuming.retries import RetryPolicy
from specd.errors import CannotResumeError, NotFoundError, SpecdError
from tests.unit.mortal_server import Death, MortalServer, ticking


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    """Log nothing of thousands of sessions."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


QUICK = RetryPolicy(patience_seconds=1e9, first_pause_seconds=0.0, longest_pause_seconds=0.0)

deaths = st.lists(
    st.builds(
        Death,
        st.integers(0, 12),
        loses_sessions=st.booleans(),
        is_unheard=st.booleans(),
        status=st.sampled_from([grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED]),
    ),
    max_size=6,
)
options = st.fixed_dictionaries(
    {"seed": st.integers(0, 2**64 - 1), "temperature": st.just(1.0)},
    optional={
        "max_tokens": st.integers(1, 60),
        "stop": st.lists(st.sampled_from(["ab", "äß", "b🙂", "🙂a", "aaaa", " b "]), max_size=3),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.lists(st.sampled_from([ord("a"), ord(" "), 0xC3, 0xF0]), max_size=1),
        "num_draft_tokens": st.sampled_from([0, 8]),
    },
)


def client_of(server: MortalServer, policy: RetryPolicy = QUICK, *, keeps_tokens: bool = True) -> AsyncClient:
    """Return a client whose calls go to the server, without a connection."""
    client = AsyncClient.__new__(AsyncClient)  # not __init__, which opens a channel
    client.address, clock, connection = "here", ticking(), Connection(has_answered=True)

    def start(turn: Turn, options: GenerationOptions) -> AsyncStream:
        generation = ResumableGeneration(
            turn,
            policy=policy,
            clock=clock.__next__,
            chance=lambda: 0.5,
            connection=connection,
            keeps_tokens=keeps_tokens,
        )
        return AsyncStream(generation, server.open, "here", options.get("timeout_seconds"))

    client._stream = start  # type: ignore[method-assign]
    return client


def same(completion: Completion, expected: Completion) -> None:
    assert completion.text == expected.text
    assert [(token.id, token.text) for token in completion.tokens] == [(t.id, t.text) for t in expected.tokens]
    assert completion.finish_reason is expected.finish_reason
    assert completion.stop_string == expected.stop_string
    assert completion.stop_token_id == expected.stop_token_id
    assert completion.seed == expected.seed
    assert completion.statistics.generated_tokens == len(completion.tokens)
    assert completion.statistics.prompt_tokens == expected.statistics.prompt_tokens
    assert completion.statistics.near_ties == sum(token.near_tie for token in expected.tokens)
    margins = [token.margin for token in expected.tokens if token.margin is not None]
    assert len(margins) == len(expected.tokens)
    smallest = min(margins)
    if smallest == math.inf:
        assert completion.statistics.smallest_margin is completion.statistics.smallest_margin_position is None
    else:
        assert completion.statistics.smallest_margin == smallest
        assert completion.statistics.smallest_margin_position == margins.index(smallest)


def generate(server: MortalServer, prompt: str, options: dict[str, Any]) -> Completion:
    return asyncio.run(client_of(server).generate(prompt, **options).completion())


@given(prompt=st.text("abä🙂 ", min_size=1, max_size=8), options=options, minimum=st.integers(0, 60), deaths=deaths)
def test_a_completion(prompt: str, options: dict[str, Any], minimum: int, deaths: list[Death]) -> None:
    options["min_tokens"] = min(minimum, options.get("max_tokens", 60))
    expected = generate(MortalServer(), prompt, options)
    server = MortalServer(deaths)
    same(generate(server, prompt, options), expected)


def test_there_are_deaths_in_the_middle() -> None:
    """In the examples above, streams do break behind tokens."""
    server = MortalServer(
        [Death(3, loses_sessions=True), Death(0, loses_sessions=False), Death(2, loses_sessions=True)]
    )
    options = {"seed": 5, "temperature": 1.0, "max_tokens": 60, "ignore_eos": True}
    completion = generate(server, "äa", options)
    assert [len(request.resumption.token_ids) > 0 for request in server.requests] == [False, True, True, True]
    assert len(server.requests[2].resumption.token_ids) == len(server.requests[1].resumption.token_ids)
    assert len(server.requests[3].resumption.token_ids) > len(server.requests[2].resumption.token_ids)
    assert completion.statistics.num_resumptions == 2
    assert completion.statistics.generated_tokens == 60
    assert 0 < completion.statistics.near_ties < 60
    assert len({*completion.text} & {*"ä🙂"}) > 0


async def turns_of(
    session: AsyncClientSession, says: list[Any], is_chat: bool, options: dict[str, Any]
) -> list[Completion]:
    ask: Any = session.chat if is_chat else session.generate
    return [await ask(said, **options).completion() for said in says]


@given(
    says=st.lists(st.text("abä🙂", min_size=1, max_size=5), min_size=1, max_size=4),
    is_chat=st.booleans(),
    options=options,
    deaths=deaths,
)
def test_a_session(says: list[str], is_chat: bool, options: dict[str, Any], deaths: list[Death]) -> None:
    """Its turns too, where the coordinator has lost it, or has a turn that the client has not."""
    options["max_tokens"] = min(options.get("max_tokens", 20), 20)
    whole = asyncio.run(turns_of(client_of(MortalServer()).session(), list(says), is_chat, options))
    session = client_of(MortalServer(deaths)).session()
    for completion, expected in zip(asyncio.run(turns_of(session, list(says), is_chat, options)), whole, strict=True):
        same(completion, expected)
    if is_chat:
        assert [message["content"] for message in session.messages[1::2]] == [each.text for each in whole]


def test_a_session_goes_on_from_its_end() -> None:
    says = ["ab", None, None]
    options = {"seed": 1, "temperature": 1.0, "max_tokens": 8, "ignore_eos": True}
    whole = asyncio.run(turns_of(client_of(MortalServer()).session(), says, False, options))
    broken = MortalServer(
        [Death(2, loses_sessions=True), Death(99, loses_sessions=False), Death(0, loses_sessions=True)]
    )
    for completion, expected in zip(
        asyncio.run(turns_of(client_of(broken).session(), says, False, options)), whole, strict=True
    ):
        same(completion, expected)


@given(says=st.text("ab🙂ä ", min_size=1, max_size=8), options=options, deaths=deaths)
@example(says="b", options={"seed": 1, "temperature": 1.0, "max_tokens": 20}, deaths=[Death(3, loses_sessions=False)])
@example(
    says="b",
    options={"seed": 1, "temperature": 1.0, "max_tokens": 20},
    deaths=[Death(3, loses_sessions=False, is_unheard=True)],
)
def test_a_session_that_began_elsewhere_is_resumed_if_it_is_as_it_was(
    says: str, options: dict[str, Any], deaths: list[Death]
) -> None:
    """A server that has kept its last turn, or lost the session, refuses; no turn is there twice, and no text wrong."""

    async def go(deaths: list[Death]) -> tuple[Completion | SpecdError, int]:
        server = MortalServer()
        began = await client_of(server).generate("ab", max_tokens=4, ignore_eos=True, seed=5).completion()
        server.deaths = [*deaths]
        stream = client_of(server).session(began.session_id).generate(says, **options)
        try:
            result: Completion | SpecdError = await stream.completion()
        except SpecdError as error:
            result = error
        known = {each.session_id: each.num_turns for each in server.sessions}
        return result, known.get(began.session_id, 0)

    whole, _ = asyncio.run(go([]))
    assert isinstance(whole, Completion)
    result, num_turns = asyncio.run(go(deaths))
    if isinstance(result, Completion):
        same(result, whole)
        assert num_turns == 2 or any(death.loses_sessions for death in deaths)
    else:
        assert num_turns <= 2
        assert isinstance(result, CannotResumeError | NotFoundError) or "Socket closed" in str(result)
    if all(death.after_messages and not death.is_unheard and not death.loses_sessions for death in deaths):
        assert isinstance(result, Completion), "each part began, and the session stayed"


def test_a_session_that_is_not_there_is_an_error_at_once() -> None:
    with pytest.raises(NotFoundError):
        asyncio.run(client_of(MortalServer()).session("nosuch").generate("b").completion())


def error_of(server: MortalServer, policy: RetryPolicy, **options: Any) -> tuple[SpecdError, int]:
    async def go() -> tuple[SpecdError, int]:
        stream = client_of(server, policy).generate("ab", ignore_eos=True, **options)
        retries = 0
        with pytest.raises(SpecdError) as raised:
            async for event in stream:
                retries += isinstance(event, Retrying)
        return raised.value, retries

    return asyncio.run(go())


def test_another_model_does_not_go_on() -> None:
    server = MortalServer([Death(3, loses_sessions=True)])
    server.model = replace(server.model, fingerprint="another")  # of its next life
    error, retries = error_of(server, QUICK, max_tokens=20)
    assert isinstance(error, CannotResumeError)
    assert retries == 1


def test_patience_ends() -> None:
    server = MortalServer([Death(2, loses_sessions=True)] + [Death(0, loses_sessions=True)] * 50)
    error, retries = error_of(server, RetryPolicy(0.02, 0.0, 0.0), max_tokens=20)
    assert error.reason == "UNAVAILABLE"
    assert 1 < retries < 50
    error, retries = error_of(MortalServer([Death(2, loses_sessions=True)]), RetryPolicy(0.0), max_tokens=20)
    assert (error.reason, retries) == ("UNAVAILABLE", 0)


def test_a_client_that_keeps_no_tokens_gives_all_of_them_in_events() -> None:
    """As the gateway: the prompt and the end are in the first and the last Delta, also where the stream broke."""

    async def go(server: MortalServer) -> tuple[list[Delta], AsyncStream]:
        client = client_of(server, replace(QUICK, only_resumes=True), keeps_tokens=False)
        stream = client.chat("ab", seed=3, temperature=1.0, max_tokens=20, ignore_eos=True, echo=True)
        return [event async for event in stream if isinstance(event, Delta)], stream

    whole, _ = asyncio.run(go(MortalServer()))
    resumed, stream = asyncio.run(go(MortalServer([Death(3, loses_sessions=True), Death(2, loses_sessions=True)])))
    assert [token.id for delta in resumed for token in delta.tokens] == [t.id for delta in whole for t in delta.tokens]
    assert "".join(delta.text for delta in resumed) == "".join(delta.text for delta in whole)
    for first, *later in (whole, resumed):
        assert (first.prompt_end, first.max_tokens) == ("u:ab\na:", 20)
        assert "".join(token.text for token in first.prompt_tokens) == first.prompt_end
        assert {(delta.prompt_end, delta.max_tokens, delta.prompt_tokens) for delta in later} == {("", 0, ())}
        assert [delta.finished is not None for delta in later] == [False] * (len(later) - 1) + [True]
    assert resumed[-1].finished is not None
    assert resumed[-1].finished.statistics.num_resumptions == 2
    assert resumed[-1].finished.statistics.generated_tokens == 20
    assert (stream.text, len(stream.tokens)) == ("", 0)


def test_a_client_that_only_resumes_leaves_refusals_to_its_caller() -> None:
    policy = replace(QUICK, only_resumes=True)
    error, retries = error_of(MortalServer([Death(0, loses_sessions=True)]), policy, max_tokens=20)
    assert (error.reason, retries) == ("UNAVAILABLE", 0)
