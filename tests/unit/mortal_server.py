"""A coordinator on a target that samples by seed and position, which loses streams, and dies, as a test says."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any, cast

import grpc
from prometheus_client import CollectorRegistry
from tokenizers import AddedToken
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from coordinator.coordinator import Coordinator
from coordinator.core import Part, Plan, Proposal, SessionSetup, Verdict
from coordinator.generation import Generation
from coordinator.proposals.drafter import DraftStream
from coordinator.service import request_from, response_from
from coordinator.sessions.session_store import KeptSession
from coordinator.telemetry.metrics import CoordinatorMetrics
from coordinator.workers.remote_worker import RemoteWorker
from coordinator.workers.verifier import TargetStream
from coordinator.workers.workers import Workers
from specd.caller import Caller
from specd.coordinator_settings import CoordinatorSettings
from specd.errors import SpecdError, to_status
from specd.model_info import ModelInfo
from specd.sampling import Margin
from specd.text.chat import Chat, ChatTemplate
from specd.text.rendering import CheckBeginning, TemplateRenderer
from specd.text.tokenizer import Tokenizer
from specd.v1.generation_pb2 import GenerateRequest, GenerateResponse
from tests.unit.served_models import new_store

END_TOKEN = 256
MODEL = ModelInfo("mortal", "fake", "f", "v", 257, 4096, (END_TOKEN,), "", "")
# Characters of one, two and four bytes, which are as many tokens.
ALPHABET = "ab äß🙂"
_BYTES = [list(character.encode()) for character in ALPHABET]


@cache
def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with a token for each byte, so that characters end up in several."""
    # GPT-2's signs for bytes: printable ones stand for themselves, those from 256 on for the others in their order.
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    signs = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    tokenizer = HuggingFaceTokenizer(BPE(vocab={signs[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    template = ChatTemplate("{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}a:", {}, "mortal")
    return Tokenizer(tokenizer.to_str().encode(), template)


def next_token(token_ids: Sequence[int], setup: SessionSetup) -> int:
    """Return the target's choice: a character is finished, and then seed, position and the end decide."""
    end = list(token_ids[-3:])
    for character in _BYTES:
        for length in range(len(character) - 1, 0, -1):
            if end[-length:] == character[:length]:
                return character[length]
    sampling = setup.sampling
    noise = Random(f"{sampling.seed} {len(token_ids)} {end[-2:]}")
    may_end = END_TOKEN not in sampling.suppressed_token_ids or len(token_ids) >= sampling.suppressed_before
    if may_end and noise.random() < 0.03:
        return END_TOKEN
    # Few choices, so that texts repeat themselves and look-up proposes something.
    return noise.choice(_BYTES[:2] if noise.random() < 0.7 else _BYTES)[0]


def margin_of(position: int, setup: SessionSetup) -> Margin:
    """Return the margin of the target's choice at a position."""
    noise = Random(f"{setup.sampling.seed} {position}")
    value = noise.choice([noise.random() / 8, noise.random() * 8, math.inf])
    return Margin(value, value < 0.1)


class SeededTarget(RemoteWorker[TargetStream]):
    """The target worker."""

    def __init__(self) -> None:
        super().__init__("TARGET_UNAVAILABLE", MODEL)
        self.cache_bytes = 2**40

    def open_stream(self, setup: SessionSetup) -> TargetStream:
        return _SeededStream(setup)


@dataclass
class _SeededStream:
    setup: SessionSetup
    held: list[int] = field(default_factory=list)

    async def verify(
        self, position: int, token_ids: Sequence[int], proposal: Proposal, ahead: Plan, timeout_seconds: float
    ) -> Verdict:
        assert position <= len(self.held)
        session = [*self.held[:position], *token_ids]
        self.held = [*session, *proposal.token_ids]
        accepted = 0
        while (own := next_token(self.held[: len(session) + accepted], self.setup)) in proposal.token_ids[accepted:][
            :1
        ]:
            accepted += 1
        margins = [margin_of(len(session) + i, self.setup) for i in range(accepted + 1)]
        return Verdict(accepted, own, len(self.held), margins=margins)

    async def proposal(self, timeout_seconds: float) -> Part:
        raise AssertionError("this target proposes nothing")

    def close(self) -> None:
        """Hold nothing that would have to be freed."""


@dataclass
class Death:
    """The end of a call: the number of its messages before it, and whether the coordinator and its sessions end too.

    `is_unheard`: the call runs to its end, and only its messages do not arrive. The status is gRPC's own for a
    connection that broke, or CANCELLED, as of servers and proxies that exit at once.
    """

    after_messages: int
    loses_sessions: bool
    is_unheard: bool = False
    status: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE


class _Renderer(TemplateRenderer):
    """Renders here: tests of this floor start no process."""

    async def render(self, chat: Chat, client: str, check: CheckBeginning = lambda beginning, length: None) -> str:
        return self._template.render(chat)


class MortalServer:
    """Serves Generate, and ends its calls as `deaths` say, one after another; then it lives on."""

    def __init__(
        self, deaths: Sequence[Death | None] = (), tokenizer: Tokenizer | None = None, model: ModelInfo = MODEL
    ) -> None:
        self.deaths = list(deaths)
        self.requests: list[GenerateRequest] = []
        self._tokenizer = tokenizer or byte_tokenizer()
        self.model = model
        self._coordinator = self._begin()

    def _begin(self) -> Coordinator:
        coordinator = Coordinator(
            CoordinatorSettings.model_validate({"draft": "none"}),
            CoordinatorMetrics(CollectorRegistry()),
            model=self.model,
            tokenizer=self._tokenizer,
            targets=Workers([SeededTarget()]),
            sessions=new_store(),
            drafts=Workers([RemoteWorker[DraftStream]("DRAFT_NOT_CONFIGURED")]),
        )
        coordinator.renderer = _Renderer(self._tokenizer.template, seconds=1.0)
        return coordinator

    @property
    def sessions(self) -> tuple[KeptSession, ...]:
        """The sessions that are kept now."""
        return self._coordinator.sessions.list("")

    def open(self, request: bytes, timeout_seconds: float | None) -> _Call:
        """Open a call, as a stub does."""
        self.requests.append(GenerateRequest.FromString(request))
        return _Call(self._serve(self.requests[-1]))

    async def _serve(self, request: GenerateRequest) -> AsyncIterator[GenerateResponse]:
        death = self.deaths.pop(0) if self.deaths else None
        sent = 0
        emissions = Generation(self._coordinator, request_from(request, "", Caller(""))).emissions()
        try:
            async for emission in emissions:
                if death is not None and sent == death.after_messages and not death.is_unheard:
                    break
                if death is None or sent < death.after_messages:
                    yield response_from([emission])
                    sent += 1
            else:
                if death is None:
                    return
        except SpecdError as error:
            assert death is None or sent == 0
            if death is None:
                raise _status_of(error) from error
        finally:
            await emissions.aclose()
        if death.loses_sessions:
            self._coordinator = self._begin()
        raise grpc.aio.AioRpcError(death.status, grpc.aio.Metadata(), grpc.aio.Metadata(), "Socket closed")


def _status_of(error: SpecdError) -> grpc.aio.AioRpcError:
    status = cast(Any, to_status(error))
    return grpc.aio.AioRpcError(
        status.code, grpc.aio.Metadata(), grpc.aio.Metadata(*status.trailing_metadata), status.details
    )


class _Call:
    """A call as grpc.aio's: iterated once, and cancelled."""

    def __init__(self, responses: AsyncIterator[GenerateResponse]) -> None:
        self._responses = responses

    def __aiter__(self) -> AsyncIterator[GenerateResponse]:
        return self._responses

    def cancel(self) -> None:
        """The generation does not run while no client reads."""


Clock = Callable[[], float]


def ticking() -> Iterator[float]:
    """Yield the times of a clock that advances by a millisecond at each reading."""
    now = 0.0
    while True:
        yield now
        now += 0.001
