"""Check 5: an eavesdropper on an encrypted link sees the rounds of a generation, and with intervals none of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from specd.identity.roles import Role
from specd.rpc.credentials import ClientCredentials
from specd.supervisor import Stack
from specd.v1.generation_pb2 import DRAFT_SOURCE_LOOKUP, StopConditions
from specd.v1.sampling_pb2 import SamplingParameters
from tests.e2e.calls import responses_to
from tests.e2e.guarded import credentials, files_of, make_certificates
from tests.e2e.processes import draft_of, start_specd
from tests.raw_client import RawClient

# Five texts that repeat themselves, and five that do not; each has the same number of tokens.
EASY = [f"{name} = [\n" + f'    "{name}",\n' * 12 for name in ("alpha", "beta", "gamma", "delta", "omega")]
HARD = [f"def {name}(" for name in ("parse", "merge", "split", "visit", "close")]
pytestmark = pytest.mark.alone

SAMPLING = {True: SamplingParameters(), False: SamplingParameters(temperature=3, seed=1)}
FIELDS: dict[str, Any] = {
    **{"max_tokens": 32, "stop": StopConditions(ignore_eos=True)},
    **{"draft_source": DRAFT_SOURCE_LOOKUP, "num_draft_tokens": 8},
}
SHORT_SECONDS, LONG_SECONDS = 0.25, 8.0

# A message has a session's id and the times of its round. Records of HTTP/2's own (PING, WINDOW_UPDATE) are shorter.
_LEAST_MESSAGE_BYTES = 100
_RECORD_HEADER_BYTES = 5


@dataclass
class Watcher:
    """The view of a TCP proxy in front of a coordinator: the time and length of each TLS record."""

    coordinator: str
    records: list[tuple[float, int]] = field(default_factory=list)
    _serving: list[asyncio.Task[Any]] = field(default_factory=list)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        """Pass connections on; yields the port, and at the end waits for each connection to end, as its client did."""
        server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            await asyncio.wait_for(asyncio.gather(*self._serving), 10)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.current_task()
        assert serving
        self._serving.append(serving)
        host, _, port = self.coordinator.rpartition(":")
        up_reader, up_writer = await asyncio.open_connection(host, int(port))
        copies = [
            asyncio.ensure_future(self._ask(reader, up_writer)),
            asyncio.ensure_future(self._answer(up_reader, writer)),
        ]
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        for copy in copies:
            copy.cancel()
        await asyncio.gather(*copies, return_exceptions=True)
        for end in (up_writer, writer):
            end.close()
        await asyncio.gather(up_writer.wait_closed(), writer.wait_closed(), return_exceptions=True)

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            header = await reader.readexactly(_RECORD_HEADER_BYTES)
            body = await reader.readexactly(int.from_bytes(header[3:], "big"))
            self.records.append((time.monotonic(), len(body)))
            writer.write(header + body)

    def messages(self) -> list[float]:
        """Return when messages of a generation came, and forget all records."""
        times = [at for at, length in self.records if length >= _LEAST_MESSAGE_BYTES]
        self.records.clear()
        return times


@asynccontextmanager
async def watched(stack: Stack, certs: Path, interval_seconds: float) -> AsyncIterator[tuple[str, ClientCredentials]]:
    """Run a coordinator that sends at intervals over TLS; yields its address."""
    options = ["--target", stack.target.facts["address"], "--draft", draft_of(stack).facts["address"]]
    options += [*files_of(certs, Role.COORDINATOR), "--listen", "127.0.0.1:0", "--metrics-listen", "none"]
    options += ["--stream-interval-seconds", str(interval_seconds)]
    async with start_specd("coordinator", *options, SPECD_LOG_FORMAT="json") as running:
        ready = await running.next_event("ready")
        yield ready["address"], credentials(certs, Role.CLIENT)


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certs"))


async def traces(address: str, given: ClientCredentials, prompts: list[str], **fields: Any) -> list[list[float]]:
    """Generate from each prompt, all at a time; return when a watcher of each connection saw messages."""

    async def trace(prompt: str) -> list[float]:
        async with AsyncExitStack() as open_:
            watcher = Watcher(address)
            port = await open_.enter_async_context(watcher.listening())
            named = ClientCredentials(given.ca, given.cert, given.key, server_name="localhost")
            client = await open_.enter_async_context(RawClient(f"127.0.0.1:{port}", named))
            await client.model_info()
            await asyncio.sleep(0.1)  # the watcher has what came before
            watcher.records.clear()
            began_at = time.monotonic()
            responses = await responses_to(client.generate(prompt, **{**FIELDS, **fields}))
            await asyncio.sleep(0.1)
            assert sum(len(response.tokens) for response in responses) == FIELDS["max_tokens"]
            times = watcher.messages()
            assert 0 < len(times) <= len(responses)  # two can be in one record
            return [at - began_at for at in times]

    return await asyncio.gather(*(trace(prompt) for prompt in prompts))


async def test_rounds_tell_prompts_apart(stack: Stack, certs: Path) -> None:
    """Or what follows shows nothing."""
    async with watched(stack, certs, 0) as (address, given):
        easy = await traces(address, given, EASY, sampling=SAMPLING[True])
        hard = await traces(address, given, HARD, sampling=SAMPLING[False])
    assert sum(map(len, easy)) < sum(map(len, hard))


async def test_at_intervals_prompts_look_alike(stack: Stack, certs: Path) -> None:
    """Each text is ready within one interval, and comes at its end."""
    async with watched(stack, certs, LONG_SECONDS) as (address, given):
        easy, hard = await asyncio.gather(
            traces(address, given, EASY, sampling=SAMPLING[True]),
            traces(address, given, HARD, sampling=SAMPLING[False]),
        )
    assert [len(trace) for trace in (*easy, *hard)] == [1] * 10
    assert all(LONG_SECONDS * 0.99 <= at < 2 * LONG_SECONDS for (at,) in (*easy, *hard))


async def test_messages_come_at_their_times_and_not_with_the_rounds(stack: Stack, certs: Path) -> None:
    async with watched(stack, certs, SHORT_SECONDS) as (address, given):
        (slow,) = await traces(address, given, HARD[:1], sampling=SAMPLING[False])
        (fast,) = await traces(address, given, EASY[:1], sampling=SAMPLING[True])
    for trace in (slow, fast):
        for number, at in enumerate(trace, start=1):
            assert at >= number * SHORT_SECONDS * 0.99
