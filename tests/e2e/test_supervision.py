"""The supervisor ends a process that hangs, and gives up one that ends repeatedly."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator

import pytest

from specd import child as children
from specd.child import Child
from specd.errors import StartupError
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from tests.e2e.faults import ENVIRONMENT, Undisturbed, assert_same, complete, eventually, is_whole
from tests.raw_client import RawClient

HANG_SECONDS = 3.0
# Reports to its supervisor, and ends.
_ENDS = "import os, socket; socket.socket(fileno=int(os.environ['SPECD_SUPERVISOR_FD'])).sendall(b'{}\\n')"


@pytest.fixture(scope="module")
async def watched_stack() -> AsyncIterator[Stack]:
    """A stack whose supervisor soon kills what hangs."""
    async with Stack(
        target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, hang_seconds=HANG_SECONDS, environment=ENVIRONMENT
    ) as running:
        yield running


async def test_a_short_pause_is_no_hang(watched_stack: Stack, prompts: list[str], undisturbed: Undisturbed) -> None:
    expected = await undisturbed(prompts[4])
    paused = watched_stack.target.pid

    def pause(number: int) -> None:
        if number == 3:
            os.kill(paused, signal.SIGSTOP)
            asyncio.get_running_loop().call_later(HANG_SECONDS / 3, os.kill, paused, signal.SIGCONT)

    async with RawClient(watched_stack.address) as client:
        assert_same(await complete(client, prompts[4], on_round=pause), expected)
    assert watched_stack.target.pid == paused


async def test_sessions_of_a_target_that_hangs_go_on_with_the_next_one(
    watched_stack: Stack, prompts: list[str], undisturbed: Undisturbed
) -> None:
    expected = await undisturbed(prompts[3])
    others = [child.pid for child in watched_stack.children[:2]]
    hung = watched_stack.target.pid

    def stop(number: int) -> None:
        if number == 3:
            os.kill(hung, signal.SIGSTOP)

    async with RawClient(watched_stack.address) as client:
        assert_same(await complete(client, prompts[3], on_round=stop), expected)
    await eventually(lambda: is_whole(watched_stack))
    assert watched_stack.target.pid != hung
    # The others had nothing to do for as long, and beat all the same.
    assert [child.pid for child in watched_stack.children[:2]] == others


async def test_a_process_that_ends_again_and_again_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_LONGEST_BACKOFF_SECONDS", 0.1)
    child = Child("target-worker", [sys.executable, "-c", _ENDS], {})
    await child.start()
    with pytest.raises(StartupError, match="the target-worker ended 11 times in a row, last with exit code 0"):
        await child.run()
    await child.stop()
