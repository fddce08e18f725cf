"""The log of a refused request has the problem and the session, and no text of the client."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from prometheus_client import CollectorRegistry, Counter
from structlog.testing import capture_logs

from coordinator.coordinator import Coordinator
from coordinator.generation import Generation
from coordinator.output import Output
from coordinator.proposals.drafter import DraftStream
from coordinator.sessions.request import GenerationRequest, StopConditions
from coordinator.telemetry.metrics import CoordinatorMetrics
from coordinator.workers.remote_worker import RemoteWorker
from coordinator.workers.verifier import TargetStream
from coordinator.workers.workers import Workers
from specd.coordinator_settings import CoordinatorSettings
from specd.errors import InvalidRequestError, SpecdError
from specd.model_info import ModelInfo
from specd.rpc.access import anyone
from specd.rpc.refusals import refusing_server
from specd.rpc.reporting import reporting_errors
from specd.settings import EMBEDDED_TARGET
from specd.text.chat import Chat, ChatTemplate
from specd.text.template_process import _answer
from specd.text.tokenizer import Tokenizer
from tests.unit.served_models import new_store

MODEL = ModelInfo("m", "llama", "", "", 100, 16, (0,), "float32", "cpu")
CANARY = "canary-7f3a91"
FAILING = "{{ raise_exception('I cannot answer ' + messages[0].content) }}"


async def logged(directory: Path, error: SpecdError) -> dict[str, Any]:
    """Return the log of a call that ends with this error."""
    errors = Counter("errors", "Calls that ended with an error.", ["code", "reason"], registry=None)

    async def call(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        async with reporting_errors(context, errors):
            raise error
        return b""

    server = refusing_server([], anyone)
    server.add_registered_method_handlers("test", {"Generate": grpc.unary_unary_rpc_method_handler(call)})
    # gRPC's channels share connections by address, and the next one would get one that is just being closed.
    address = f"unix:{directory}/{secrets.token_hex(4)}"
    server.add_insecure_port(address)
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        multicallable: Any = channel.unary_unary("/test/Generate")
        with capture_logs() as entries, pytest.raises(grpc.aio.AioRpcError) as raised:
            await multicallable(b"")
    await server.stop(None)
    assert raised.value.details() == str(error)
    (entry,) = (each for each in entries if each["log_level"] == "info")
    return cast("dict[str, Any]", entry)


def error_of(call: Callable[[], object]) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as raised:
        call()
    return raised.value


async def test_a_refused_generation_is_logged_with_its_message_and_its_session(tmp_path: Path) -> None:
    class LetterTokenizer:
        template = ChatTemplate()

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return [5] * len(text)

    coordinator = Coordinator(
        CoordinatorSettings.model_validate({}),
        CoordinatorMetrics(CollectorRegistry()),
        model=MODEL,
        tokenizer=cast(Any, LetterTokenizer()),
        targets=Workers([RemoteWorker[TargetStream]("TARGET_UNAVAILABLE")]),
        sessions=new_store(),
        drafts=Workers([RemoteWorker[DraftStream]("DRAFT_NOT_CONFIGURED")]),
    )
    with pytest.raises(InvalidRequestError) as raised:
        await anext(Generation(coordinator, GenerationRequest(CANARY * 10, client="")).emissions())
    entry = await logged(tmp_path, raised.value)
    assert entry["reason"] == "CONTEXT_EXCEEDED"
    assert "the prompt has 130 tokens, which leaves no room" in entry["error"]
    assert len(entry["session_id"]) == 16
    assert CANARY not in str(entry)


async def test_what_a_client_has_written_is_in_its_answer_and_not_in_the_log(tmp_path: Path) -> None:
    tokenizer = Tokenizer((Path(EMBEDDED_TARGET) / "tokenizer.json").read_bytes())
    chat = Chat(({"role": "user", "content": CANARY},))
    resumed = Output(tokenizer, (), stop_strings=[CANARY])
    refused = [
        error_of(lambda: StopConditions(strings=(CANARY * 50,)).check(MODEL, 5)),
        error_of(lambda: resumed.resume(tokenizer.encode(CANARY, add_special_tokens=False))),
        error_of(lambda: ChatTemplate(FAILING, {}, "m").render(chat)),
    ]
    answer, _ = _answer(ChatTemplate(FAILING, {}, "m"), chat, memory_bytes=2**30, most_characters=1000)
    refused.append(InvalidRequestError(answer["reason"], answer["error"], for_log=answer["for_log"]))
    for error in refused:
        assert CANARY[:6] in str(error)
        entry = await logged(tmp_path, error)
        assert entry["reason"] == error.reason
        assert len(entry["error"]) > 20
        assert CANARY[:6] not in str(entry)
