"""A stack whose clients have tokens, and these clients."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from specd.rpc.channel import open_channel
from specd.rpc.credentials import ClientCredentials
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from specd.v1.generation_pb2_grpc import GenerationServiceStub
from specd.v1.session_pb2_grpc import SessionServiceStub
from tests.e2e.guarded import make_tokens


@dataclass(frozen=True)
class Owner:
    """One client of a coordinator, and its token."""

    generation: GenerationServiceStub
    sessions: SessionServiceStub
    token: str


@asynccontextmanager
async def stack_with_owners(
    directory: Path,
    limits: Mapping[str, Mapping[str, int]],
    *,
    http: str = "",
    cache: Path | None = None,
    **settings: str,
) -> AsyncIterator[tuple[Stack, dict[str, Owner]]]:
    """Start a stack with these settings of its coordinator, and clients by name, each with limits of its own.

    `http` is where its gateway listens; "" for none. `cache` is the user's cache directory, if not the usual one.
    """
    texts = make_tokens(directory / "tokens", *limits, **limits)
    environment = {f"SPECD_COORDINATOR_{name.upper()}": value for name, value in settings.items()}
    environment |= {"SPECD_COORDINATOR_TOKENS": str(directory / "tokens"), "OPENBLAS_NUM_THREADS": "1"}
    environment["SPECD_LOG_FORMAT"] = "json"
    if cache is not None:
        environment["XDG_CACHE_HOME"] = str(cache)
    async with AsyncExitStack() as open_:
        stack = await open_.enter_async_context(
            Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, http=http, environment=environment)
        )
        owners = {}
        for name, text in zip(limits, texts, strict=True):
            channel = await open_.enter_async_context(
                open_channel(stack.address, ClientCredentials(None, None, None, text))
            )
            owners[name] = Owner(GenerationServiceStub(channel), SessionServiceStub(channel), text)
        yield stack, owners
