"""LiteLLM, instructor and opencode with a published chat model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from specd.supervisor import Stack
from tests.clients.opencode import Opencode
from tests.clients.programs import install, program, run, url_of
from tests.e2e.chats import chat_of
from tests.e2e.completions import complete
from tests.e2e.faults import PATIENT
from tests.raw_client import RawClient
from tests.smollm2 import ChatPair

MODEL = "SmolLM2-135M-Instruct"
SCRIPT = Path(__file__).parent / "litellm_conversation.py"
INSTRUCTOR = Path(__file__).parent / "instructor_client.py"
TURNS = ("What is the capital of France?", "¿Y de España? 🇪🇸", "Name both cities.")


@pytest.fixture(scope="module")
async def chat_stack(chat_pair: ChatPair) -> AsyncIterator[Stack]:
    async with Stack(
        target=chat_pair.target, draft=chat_pair.draft, http="127.0.0.1:0", environment=PATIENT
    ) as running:
        yield running


async def test_litellm_holds_a_conversation(chat_stack: Stack, tmp_path: Path) -> None:
    """Its replies are those of the target alone."""
    uv = program("uv")
    await install(uv, "sync", "--quiet", "--script", SCRIPT, directory=tmp_path)
    command = (uv, "run", "--quiet", "--offline", "--script", SCRIPT, url_of(chat_stack), MODEL, *TURNS)
    output = await run(*command, directory=tmp_path)
    replies = json.loads(output.splitlines()[-1])  # LiteLLM may say something before
    messages = []
    async with RawClient(chat_stack.address) as alone:
        for turn, reply in zip(TURNS, replies, strict=True):
            messages.append({"role": "user", "content": turn})
            expected = await complete(alone, chat_of(messages), max_tokens=24, num_draft_tokens=0)
            assert reply == expected.text
            messages.append({"role": "assistant", "content": reply})


async def test_instructor_gets_values_of_its_classes(chat_stack: Stack, tmp_path: Path) -> None:
    uv = program("uv")
    await install(uv, "sync", "--quiet", "--script", INSTRUCTOR, directory=tmp_path)
    command = (uv, "run", "--quiet", "--offline", "--script", INSTRUCTOR, url_of(chat_stack), MODEL)
    assert (await run(*command, directory=tmp_path)).endswith("instructor is served\n")


@pytest.mark.usefixtures("node")
async def test_opencode_holds_a_conversation(chat_stack: Stack, tmp_path: Path) -> None:
    """It always offers tools, and this model knows none: its replies are text."""
    agent = {"build": {"prompt": "You are a helpful assistant.", "temperature": 0}}
    opencode = Opencode(tmp_path, url=url_of(chat_stack), model=MODEL, context_length=8192, agent=agent)
    # Its texts about itself, such as the date, are part of its prompts, and may change the replies of a small model.
    assert "Paris" in await opencode.run(TURNS[0])
    assert (await opencode.run("--continue", "What did I ask?")).strip()
