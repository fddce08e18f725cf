"""A worker sends its model's tokenizer and chat template."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from coordinator.workers.connection import WorkerConnection
from coordinator.workers.link import WorkerLink
from coordinator.workers.session_calls import propose_calls
from specd.errors import InvalidRequestError
from specd.rpc.deferred import Deferred
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.text.chat import Chat, ChatTemplate
from specd.text.tokenizer import Tokenizer
from specd.v1 import model_pb2_grpc
from specd.worker.model.loader import LoadedModel, TokenizerConfig, load
from specd.worker.model_service import ModelService
from specd.worker.session.stream import Worker
from tests.encoding import encode_chat
from tests.unit.conversations import CHATML, LLAMA, QUESTION, SPECIAL_TOKENS, SYSTEM, TOOL
from tests.worker.driving import idle_worker
from tests.worker.models import tiny_model


def directory_with(directory: Path, *, jinja: str = "", config: object = None) -> str:
    """Make a copy of the embedded draft with a chat template in a file of its own or in tokenizer_config.json."""
    directory.mkdir()
    for path in Path(EMBEDDED_DRAFT).iterdir():
        shutil.copyfile(path, directory / path.name)
    if jinja:
        (directory / "chat_template.jinja").write_text(jinja)
    if config:
        values = json.loads((directory / "tokenizer_config.json").read_text())
        (directory / "tokenizer_config.json").unlink()
        (directory / "tokenizer_config.json").write_text(json.dumps({**values, "chat_template": config}))
    return str(directory)


class TokenizerFetcher:
    """Fetches a model's tokenizer the way the coordinator does, from a server with nothing but ModelService."""

    def __init__(self, model: LoadedModel) -> None:
        worker: Deferred[Worker] = Deferred("the model")
        worker.set(idle_worker(model))
        self._service = ModelService(worker)

    async def responses(self) -> list[Any]:
        stream = self._service.GetTokenizer(cast(Any, None), cast(Any, None))
        return [response async for response in cast(AsyncIterator[Any], stream)]

    async def fetch(self, model_name: str) -> Tokenizer:
        async def ignore(*_: object) -> None:
            pass

        server = grpc.aio.server()
        model_pb2_grpc.add_ModelServiceServicer_to_server(self._service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        link = WorkerLink[None](
            WorkerConnection("draft", f"127.0.0.1:{port}"),
            calls=propose_calls(),
            open_stream=lambda *_: None,
            accept=ignore,
            on_change=ignore,
        )
        try:
            return await link.fetch_tokenizer(model_name)
        finally:
            await link.close()
            await server.stop(None)


NAMED = [{"name": "tool_use", "template": LLAMA}, {"name": "default", "template": CHATML}]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"jinja": CHATML}, CHATML),
        ({"config": CHATML}, CHATML),
        ({"config": NAMED}, CHATML),
        ({"config": NAMED[:1]}, ""),
        ({}, ""),
    ],
    ids=["chat_template.jinja", "tokenizer_config.json", "by name", "none for chats", "none"],
)
async def test_a_worker_sends_its_model_s_template(tmp_path: Path, files: dict[str, Any], expected: str) -> None:
    model = load(directory_with(tmp_path / "model", **files), blas="")
    fetcher = TokenizerFetcher(model)
    (response,) = await fetcher.responses()
    assert response.config.chat_template == expected
    assert dict(response.config.special_tokens) == SPECIAL_TOKENS
    assert response.chunk == model.tokenizer_json

    tokenizer = await fetcher.fetch("tiny")
    chat = Chat((SYSTEM, QUESTION), tools=(TOOL,))
    if expected:
        text = ChatTemplate(expected, SPECIAL_TOKENS, "tiny").render(chat)
        assert encode_chat(tokenizer, chat) == tokenizer.encode(text, add_special_tokens=False)
    else:
        with pytest.raises(InvalidRequestError, match="the model tiny has no chat template"):
            encode_chat(tokenizer, chat)


@pytest.mark.parametrize("size", [0, 1, 2**20, 2**20 + 1, 3 * 2**20])
async def test_the_config_comes_with_the_first_chunk_only(size: int) -> None:
    config = TokenizerConfig(CHATML, SPECIAL_TOKENS)
    model = replace(tiny_model(), tokenizer_json=b"x" * size, tokenizer_config=config)
    first, *others = await TokenizerFetcher(model).responses()
    assert (first.config.chat_template, dict(first.config.special_tokens)) == (CHATML, SPECIAL_TOKENS)
    assert not any(response.HasField("config") for response in others)
    chunks = [response.chunk for response in (first, *others)]
    assert b"".join(chunks) == model.tokenizer_json
    assert all(0 < len(chunk) <= 2**20 for chunk in chunks) or size == 0


async def test_special_tokens_reach_the_template_over_the_wire() -> None:
    config = TokenizerConfig(LLAMA, {"bos_token": "<|pad|>"})
    tokenizer_json = (Path(EMBEDDED_TARGET) / "tokenizer.json").read_bytes()
    model = replace(tiny_model(), tokenizer_json=tokenizer_json, tokenizer_config=config)
    tokenizer = await TokenizerFetcher(model).fetch("tiny")
    ids = encode_chat(tokenizer, Chat((QUESTION,)))
    assert tokenizer.decode(ids[:1], skip_special_tokens=False) == "<|pad|>"
