"""Check 3: a session is its owner's: no call shows, continues, lists or deletes another's, or tells of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest

from specd.errors import error_info
from specd.v1.generation_pb2 import GenerateRequest
from specd.v1.session_pb2 import DeleteSessionRequest, GetSessionRequest, ListSessionsRequest
from tests.e2e.calls import error_of, responses_to
from tests.security.owners import Owner, stack_with_owners

LIMITS: dict[str, dict[str, int]] = {
    "alice": {},
    "bob": {},
    "carol": {"sessions": 1, "tokens_per_minute": 60, "max_tokens": 8},
}
PROMPT = "import zebra\n" + "".join(f"def f{number}(x):\n    return x + {number}\n\n" for number in range(12))


@pytest.fixture(scope="module")
async def owners(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, Owner]]:
    async with stack_with_owners(tmp_path_factory.mktemp("tokens"), LIMITS) as (_, running):
        yield running


async def refusal(owner: Owner, method: str, session_id: str) -> grpc.aio.AioRpcError:
    if method == "Generate":
        return await error_of(owner.generation.Generate(GenerateRequest(text="x", session_id=session_id)))
    kind = {"GetSession": GetSessionRequest, "DeleteSession": DeleteSessionRequest}[method]
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await getattr(owner.sessions, method)(kind(session_id=session_id))
    return error.value


async def ids(owner: Owner) -> list[str]:
    return [session.session_id for session in (await owner.sessions.ListSessions(ListSessionsRequest())).sessions]


async def test_anothers_session_is_as_one_that_never_was(owners: dict[str, Owner]) -> None:
    alice, bob = owners["alice"], owners["bob"]
    responses = await responses_to(alice.generation.Generate(GenerateRequest(text="def f(", max_tokens=4)))
    session_id = responses[-1].session_id
    never = "f" * len(session_id)
    assert session_id in await ids(alice)
    assert await ids(bob) == []
    for method in ("GetSession", "Generate", "DeleteSession"):
        anothers, none = [await refusal(bob, method, each) for each in (session_id, never)]
        assert anothers.code() is none.code() is grpc.StatusCode.NOT_FOUND
        assert error_info(anothers) == error_info(none)
        assert (anothers.details() or "").replace(session_id, never) == none.details()
    shown = await alice.sessions.GetSession(GetSessionRequest(session_id=session_id))
    assert shown.session.num_turns == 1
    await responses_to(alice.generation.Generate(GenerateRequest(session_id=session_id, text="x", max_tokens=1)))
    await alice.sessions.DeleteSession(DeleteSessionRequest(session_id=session_id))
    assert await ids(alice) == []


async def test_what_one_has_asked_is_not_found_by_another(owners: dict[str, Owner]) -> None:
    """Check 4, from the outside: `target_reused_tokens` tells of one's own prompts alone."""

    async def reused(owner: Owner) -> int:
        request = GenerateRequest(text=PROMPT, max_tokens=2)
        return int((await responses_to(owner.generation.Generate(request)))[-1].statistics.target_reused_tokens)

    assert await reused(owners["alice"]) <= 3  # of her earlier prompt
    assert await reused(owners["alice"]) > 50
    assert await reused(owners["bob"]) == 0
    assert await reused(owners["bob"]) > 50


async def test_the_limits_of_a_token_hold(owners: dict[str, Owner]) -> None:
    carol = owners["carol"]

    async def ask(**fields: int) -> grpc.aio.AioRpcError:
        return await error_of(carol.generation.Generate(GenerateRequest(text="def f(", **fields)))  # type: ignore[arg-type]

    too_many = await ask(max_tokens=9)
    assert (too_many.code(), error_info(too_many).reason) == (grpc.StatusCode.INVALID_ARGUMENT, "OUT_OF_RANGE")
    assert "at most 8" in (too_many.details() or "")

    first = carol.generation.Generate(GenerateRequest(text=PROMPT, max_tokens=8))
    await first.read()
    second = await ask(max_tokens=1)
    assert (second.code(), error_info(second).reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "CLIENT_SESSIONS")
    await responses_to(first)

    third = await ask(max_tokens=1)  # the prompt alone has more tokens than a minute
    assert (third.code(), error_info(third).reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "CLIENT_TOKENS")
    responses = await responses_to(owners["bob"].generation.Generate(GenerateRequest(text="x", max_tokens=20)))
    assert responses[-1].statistics.generated_tokens == 20
