"""The coordinator's event loop stays free."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from coordinator import coordinator as coordinator_module
from coordinator.coordinator import Coordinator
from coordinator.generation import Generation
from coordinator.proposals.drafter import DraftStream
from coordinator.sessions.request import GenerationRequest
from coordinator.telemetry.metrics import CoordinatorMetrics
from coordinator.workers.remote_worker import RemoteWorker
from coordinator.workers.verifier import TargetStream
from coordinator.workers.workers import Workers
from specd.client.protocol.wire import set_chat
from specd.coordinator_settings import CoordinatorSettings
from specd.errors import InvalidRequestError
from specd.model_info import ModelInfo
from specd.text.chat import Chat, ChatTemplate
from specd.text.literals import Literals
from specd.v1.generation_pb2 import GenerateRequest
from tests.unit.mortal_server import MortalServer
from tests.unit.served_models import new_store


async def test_a_long_text_is_encoded_beside_the_event_loop() -> None:
    """A megabyte takes a second, during which other sessions continue."""

    class SlowTokenizer:
        template = ChatTemplate()

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            threads.append(threading.current_thread())
            return [5] * len(text)

    threads: list[threading.Thread] = []
    coordinator = Coordinator(
        CoordinatorSettings.model_validate({}),
        CoordinatorMetrics(CollectorRegistry()),
        model=ModelInfo("m", "llama", "", "", 8192, 2048, (0,), "float32", "cpu"),
        tokenizer=cast(Any, SlowTokenizer()),
        targets=Workers([RemoteWorker[TargetStream]("TARGET_UNAVAILABLE")]),
        sessions=new_store(),
        drafts=Workers([RemoteWorker[DraftStream]("DRAFT_NOT_CONFIGURED")]),
    )
    with pytest.raises(InvalidRequestError):
        await anext(Generation(coordinator, GenerationRequest("x" * 5000, client="")).emissions())
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


async def test_a_conversation_is_searched_for_special_tokens_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[threading.Thread] = []

    class WatchedLiterals(Literals):
        def hidden_in(self, chat: Chat) -> Chat:
            threads.append(threading.current_thread())
            return super().hidden_in(chat)

    monkeypatch.setattr(coordinator_module, "Literals", WatchedLiterals)
    chat = Chat(({"role": "user", "content": "<|" * 1000},))
    request = GenerateRequest(max_tokens=1)
    set_chat(request, chat)
    assert [response async for response in MortalServer().open(request.SerializeToString(), None)]
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()
