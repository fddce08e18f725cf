"""Check 13: hostile chat templates are bounded in time, memory and length, and others get their prompts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from specd.errors import InvalidRequestError
from specd.text.chat import Chat, ChatTemplate
from specd.text.rendering import TemplateRenderer
from tests.unit.conversations import CHATML

QUESTION = {"role": "user", "content": "Why?"}
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@asynccontextmanager
async def renderer_of(source: str, seconds: float = 20.0, **limits: int) -> AsyncIterator[TemplateRenderer]:
    renderer = TemplateRenderer(ChatTemplate(source, SPECIAL_TOKENS, "tiny"), seconds=seconds, **limits)
    try:
        yield renderer
    finally:
        await renderer.close()


async def test_prompts_are_those_of_the_template_in_this_process() -> None:
    chats = [
        Chat((QUESTION,)),
        Chat(
            ({"role": "user", "content": "\ud7ff\U0001f600 \u0000 \"'\\"},),
            tools=({"type": "function", "n": 5, "x": 0.1},),
        ),
        Chat((QUESTION, {"role": "assistant", "content": "Be"}), continue_final_message=True),
    ]
    source = CHATML + "{{ tools | tojson if tools }}"
    async with renderer_of(source) as renderer:
        for chat in chats:
            assert await renderer.render(chat, "a") == ChatTemplate(source, SPECIAL_TOKENS, "tiny").render(chat)


async def test_a_process_is_kept_and_started_again_after_its_end() -> None:
    async with renderer_of("{{ messages[0].content }}") as renderer:
        assert await renderer.render(Chat((QUESTION,)), "a") == "Why?"
        [process] = renderer._all
        began_at = time.perf_counter()
        for _ in range(20):
            await renderer.render(Chat((QUESTION,)), "a")
        assert [*renderer._all] == [process]
        assert time.perf_counter() - began_at < 5
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        with pytest.raises(InvalidRequestError, match="its process ended"):
            await renderer.render(Chat((QUESTION,)), "a")
        assert await renderer.render(Chat((QUESTION,)), "a") == "Why?"
    assert renderer._all == set()


async def test_a_prompt_is_read_no_further_than_a_beginning_that_is_refused() -> None:
    text = '"é\U0001f600\x01' * 2**19
    chat = Chat(({"role": "user", "content": text},))
    num_bytes = len(text.encode())

    def refuse(beginning: str, num_characters: int) -> None:
        assert beginning == text[:1001]
        assert num_characters == len(text)
        raise InvalidRequestError("CONTEXT_EXCEEDED", "too long")

    async with renderer_of("{{ messages[0].content }}", beginning_characters=1001) as renderer:
        assert await renderer.render(Chat((QUESTION,)), "a") == "Why?"
        [process] = renderer._all
        tracemalloc.start()
        try:
            with pytest.raises(InvalidRequestError, match="too long"):
                await renderer.render(chat, "a", refuse)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        # The text in UTF-8, which Python keeps with it, its JSON with every control character escaped, and a piece. A
        # prompt that is read whole takes two more of its four bytes for each character.
        assert most < 3.2 * num_bytes
        assert await renderer.render(chat, "a") == text
        assert [*renderer._all] == [process]


HOSTILE = {
    "loop": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "longer than 2 s"),
    "growth": (
        "{% set n = namespace(s='x') %}{% for a in range(60) %}{% set n.s = n.s * 2 %}{% endfor %}",
        "256 MiB",
    ),
    "width": ("{{ '%2000000000d' % 1 }}", "256 MiB"),
    "output": ("{{ 'x' * 2000000 }}", "2000000 characters, more than 1000000"),
    "recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    "nesting": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "failed"),
    "power": ("{{ 9 ** (9 ** 9) }}", "longer than 2 s"),
    "half of a surrogate pair": (r"{{ '\ud800' }}", "half of a surrogate pair"),
    "attribute": ("{{ ''.__class__.__mro__ }}", "unsafe"),
}


@pytest.mark.parametrize("kind", HOSTILE)
async def test_a_hostile_template_fails_in_time_and_says_why(kind: str) -> None:
    source, why = HOSTILE[kind]
    limits = {"memory_bytes": 256 * 2**20, "most_characters": 10**6}
    async with renderer_of(source, seconds=2.0, **limits) as renderer:
        began_at = time.perf_counter()
        with pytest.raises(InvalidRequestError, match=why) as error:
            await renderer.render(Chat((QUESTION,)), "a")
        assert error.value.reason == "CHAT_TEMPLATE_FAILED"
        assert time.perf_counter() - began_at < 30


async def test_one_clients_endless_conversations_do_not_keep_another_waiting() -> None:
    source = "{% if messages[0].content == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    source += "{% endfor %}{% endif %}{{ messages[0].content }}"
    async with renderer_of(source, seconds=8.0) as renderer:
        await renderer.render(Chat((QUESTION,)), "b")
        loop = Chat(({"role": "user", "content": "loop"},))
        hostile = [asyncio.ensure_future(renderer.render(loop, "a")) for _ in range(5)]
        await asyncio.sleep(0.1)
        assert await renderer.render(Chat((QUESTION,)), "b") == "Why?"
        assert not any(task.done() for task in hostile)
        for task in hostile:
            task.cancel()
        await asyncio.gather(*hostile, return_exceptions=True)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_it_has_none_of_the_coordinators_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECD_TOKEN", "secret")
    async with renderer_of("{{ messages[0].content }}") as renderer:
        await renderer.render(Chat((QUESTION,)), "a")
        [process] = renderer._all
        assert "secret" not in Path(f"/proc/{process.pid}/environ").read_text()  # noqa: ASYNC240


@pytest.mark.parametrize(
    ("chat", "reason"),
    [
        (Chat(()), "EMPTY_PROMPT"),
        (Chat((QUESTION,), template_arguments={"tokenize": True}), "OUT_OF_RANGE"),
        (Chat(({"role": "x", "content": json.dumps({})},)), "CHAT_TEMPLATE_FAILED"),
    ],
)
async def test_errors_are_those_of_the_template(chat: Chat, reason: str) -> None:
    async with renderer_of("{{ raise_exception('no') if messages[0].role == 'x' }}") as renderer:
        with pytest.raises(InvalidRequestError) as error:
            await renderer.render(chat, "a")
        assert error.value.reason == reason
