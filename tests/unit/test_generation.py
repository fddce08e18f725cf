"""The coordinator's event loop stays free."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from coordinator.generation import Coordinator
from coordinator.sessions.request import GenerationRequest
from coordinator.telemetry.metrics import CoordinatorMetrics
from coordinator.workers.drafter import DraftStream
from coordinator.workers.remote_worker import RemoteWorker
from coordinator.workers.verifier import TargetStream
from specd.errors import InvalidRequestError
from specd.model_info import ModelInfo
from specd.settings import CoordinatorSettings
from specd.text.chat import ChatTemplate


async def test_a_long_text_is_encoded_beside_the_event_loop() -> None:
    """A megabyte takes a second, in which other sessions go on."""

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
        target=RemoteWorker[TargetStream]("TARGET_UNAVAILABLE"),
        draft=RemoteWorker[DraftStream]("DRAFT_NOT_CONFIGURED"),
    )
    with pytest.raises(InvalidRequestError):
        await anext(coordinator.generate(GenerationRequest("x" * 5000, client="")))
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()
