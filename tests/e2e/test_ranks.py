"""A target in several processes: the same texts for any proposal, and through the end or the hang of any rank."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from specd.child import Child
from specd.supervisor import Stack
from tests.e2e.completions import Completion
from tests.e2e.faults import ENVIRONMENT, assert_same, complete, eventually, is_whole, sessions_and_tokens
from tests.raw_client import RawClient
from tests.thorough import examples

RANKS = 2
# The sums of these ranks travel over wires, which signals cut, or hold for ever.
BEHIND_WIRE = Path(__file__).parents[2] / "benchmarks" / "rank_behind_wire.py"
CUT, HOLD = signal.SIGUSR1, signal.SIGUSR2
DEADLINE_SECONDS = 3.0  # a chunk of a prompt takes a second on a machine that does much else
MAX_TOKENS = 24
WITH_DEADLINE = ENVIRONMENT | {
    "SPECD_TARGET_WORKER_RANK_DEADLINE_SECONDS": str(DEADLINE_SECONDS),
    "SPECD_TARGET_WORKER_CALIBRATION_SECONDS": "0.5",
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target with heads that two ranks divide, and a draft that is often right."""
    from tests.worker.divisible_models import save_divisible

    directory = tmp_path_factory.mktemp("pair")
    return save_divisible(directory / "target", "llama"), save_divisible(directory / "draft", "llama", noise=0.02)


@pytest.fixture(scope="module")
async def divided(pair: tuple[str, str]) -> AsyncIterator[Stack]:
    target, draft = pair
    stack = Stack(target=target, draft=draft, num_ranks=RANKS, environment=WITH_DEADLINE)
    for child in (stack.target, *stack.target.followers):
        child.command[1:4] = [str(BEHIND_WIRE)]
    async with stack:
        yield stack


@pytest.fixture
async def client(divided: Stack) -> AsyncIterator[RawClient]:
    """A client of the stack, with all of its processes."""
    await eventually(lambda: is_whole(divided))
    async with RawClient(divided.address) as connected:
        yield connected


def rank(stack: Stack, number: int) -> Child:
    return [stack.target, *stack.target.followers][number]


async def texts(client: RawClient, prompts: list[str], k: int | None, temperature: float = 0.7) -> list[Completion]:
    """Generate for all prompts at once."""
    options = {"max_tokens": MAX_TOKENS, "num_draft_tokens": k, "temperature": temperature}
    return [*await asyncio.gather(*(complete(client, prompt, **options) for prompt in prompts))]  # type: ignore[arg-type]


@pytest.mark.parametrize("ks", examples([((1, 4, 8, None),), ((2, 3, 5, 6, 7),)], 1))
async def test_texts_do_not_depend_on_the_proposal_or_on_other_sessions(
    client: RawClient, prompts: list[str], ks: tuple[int | None, ...]
) -> None:
    alone = [(await texts(client, [prompt], k=0))[0] for prompt in prompts[:4]]
    assert len({completion.text for completion in alone}) == 4
    accepted = 0
    for k in ks:
        for completion, expected in zip(await texts(client, prompts[:4], k), alone, strict=True):
            assert_same(completion, expected)
            accepted += sum(response.round.accepted for response in completion.responses)
    assert accepted > 0


async def test_a_long_prompt_is_read_in_chunks_and_kept(client: RawClient, prompts: list[str]) -> None:
    first, again = [await complete(client, prompts[20], max_tokens=8, num_draft_tokens=k) for k in (0, 4)]
    assert_same(again, first)
    assert again.statistics.target_reused_tokens > 1000


@pytest.mark.parametrize(
    ("number", "how", "when"),
    examples(
        [
            (1, signal.SIGKILL, "verify"),
            (1, signal.SIGSTOP, "verify"),
            (0, signal.SIGSTOP, "decode"),
            (1, signal.SIGKILL, "prefill"),
            (0, CUT, "verify"),
            (1, HOLD, "verify"),
            (0, signal.SIGKILL, "verify"),
            (0, signal.SIGKILL, "prefill"),
            (0, signal.SIGKILL, "decode"),
            (1, signal.SIGKILL, "decode"),
            (1, signal.SIGSTOP, "decode"),
            (1, signal.SIGSTOP, "prefill"),
            (0, signal.SIGSTOP, "verify"),
            (0, signal.SIGSTOP, "prefill"),
        ],
        2,
    ),
)
async def test_a_lost_rank_changes_nothing_in_the_text(
    divided: Stack, client: RawClient, prompts: list[str], number: int, how: signal.Signals, when: str
) -> None:
    prompt = prompts[21] + f"# {number} {how} {when}" if when == "prefill" else prompts[3]
    before = [child.pid for child in (divided.target, *divided.target.followers)]
    victim = rank(divided, number).pid

    async def is_prefilling() -> bool:
        [(_, cached_tokens)] = await sessions_and_tokens(divided.target)
        return cached_tokens > 0

    def on_round(count: int) -> None:
        if when != "prefill" and count == 4:
            os.kill(victim, how)

    k = 0 if when == "decode" else 4
    completing = asyncio.create_task(
        complete(client, prompt, max_tokens=MAX_TOKENS, num_draft_tokens=k, temperature=0.7, on_round=on_round)
    )
    if when == "prefill":
        await eventually(is_prefilling, every_seconds=0.005)
        os.kill(victim, how)
    completion = await completing

    assert completion.statistics.target_replays >= 1
    await eventually(lambda: is_whole(divided))
    assert_same(
        completion, (await complete(client, prompt, max_tokens=MAX_TOKENS, num_draft_tokens=0, temperature=0.7))
    )
    assert not [pid for pid in before if psutil.pid_exists(pid)]


@pytest.mark.thorough
async def test_an_idle_rank_that_ends_or_hangs_is_replaced(divided: Stack, client: RawClient) -> None:
    for number, how in ((1, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGSTOP)):
        before = [child.pid for child in (divided.target, *divided.target.followers)]
        os.kill(rank(divided, number).pid, how)
        await eventually(lambda before=before: are_gone(before))  # type: ignore[misc]
        await eventually(lambda: is_whole(divided))


async def are_gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) for pid in pids)


async def test_a_stop_leaves_no_process_and_no_port(pair: tuple[str, str]) -> None:
    target, _ = pair
    async with Stack(target=target, draft="", num_ranks=3, environment=WITH_DEADLINE) as stack:
        processes = [psutil.Process(child.pid) for child in (stack.target, *stack.target.followers)]
        ports = {
            connection.laddr.port
            for process in processes
            for connection in process.net_connections()
            if connection.status == psutil.CONN_LISTEN
        }
        async with RawClient(stack.address) as client:
            assert len((await complete(client, "def", max_tokens=4, num_draft_tokens=0)).token_ids) == 4
    assert not any(process.is_running() for process in processes)
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
    assert [child.process.returncode for child in (stack.target, *stack.target.followers) if child.process] == [0] * 3
