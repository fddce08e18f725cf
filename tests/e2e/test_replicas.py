"""Several targets on real processes: sessions are spread, and survive the death, the stop and the return of each."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from specd.child import Child
from specd.client import AsyncClient, Delta
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_T5_DRAFT, EMBEDDED_T5_TARGET, EMBEDDED_TARGET
from specd.supervisor import Stack
from tests.e2e.faults import ENVIRONMENT
from tests.e2e.processes import draft_of, eventually, read_metric, read_metrics, run_specd, start_specd
from tests.e2e.test_upgrades import PROMPTS as LOADED
from tests.e2e.test_upgrades import Load
from tests.thorough import examples

PROMPTS = [f"def function_{i}(values, limit):\n    " for i in range(6)]
NAMES = ("target", "target-2")
MAX_TOKENS = 96


@pytest.fixture(scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, num_targets=2, environment=ENVIRONMENT) as running:
        yield running


async def texts_of(address: str, k: int | None = None, prompts: Sequence[str] = PROMPTS) -> list[list[int]]:
    """Return the tokens of a generation for each prompt, all at once."""

    async def generate(client: AsyncClient, i: int) -> list[int]:
        stream = client.generate(
            prompts[i],
            max_tokens=MAX_TOKENS,
            temperature=0.8,
            seed=i,
            num_draft_tokens=k,
            ignore_eos=True,
        )
        events = [event async for event in stream]
        return [token.id for event in events if isinstance(event, Delta) for token in event.tokens]

    async with AsyncClient(address) as client:
        return list(await asyncio.gather(*(generate(client, i) for i in range(len(prompts)))))


def running_at(stack: Stack) -> list[float]:
    """Return the number of running sessions at each target."""
    return [read_metric(stack.coordinator, "specd_target_sessions", target=name) for name in NAMES]


async def are_ready(stack: Stack) -> None:
    """Wait until both targets are ready."""

    def ready() -> bool:
        return all(read_metric(stack.coordinator, "specd_target_ready", target=name) == 1 for name in NAMES)

    await eventually(ready)


async def while_generating(
    stack: Stack, happen: Callable[[], Awaitable[None]], prompts: Sequence[str] = PROMPTS
) -> list[list[int]]:
    """Let something happen while all prompts are answered, and return the answers."""
    generating = asyncio.ensure_future(texts_of(stack.address, prompts=prompts))

    def are_both_in_use() -> bool:
        nonlocal generating
        if generating.done():  # before both were seen
            generating = asyncio.ensure_future(texts_of(stack.address, prompts=prompts))
        return min(running_at(stack)) > 0

    await eventually(are_both_in_use)
    await happen()
    return await generating


async def test_sessions_are_spread_and_the_texts_are_those_of_the_target_alone(stack: Stack) -> None:
    alone = await texts_of(stack.address, k=0)
    most = [0.0, 0.0]

    async def watch() -> None:
        for _ in range(20):
            most[:] = map(max, most, running_at(stack))
            await asyncio.sleep(0.02)

    assert await while_generating(stack, watch) == alone
    assert min(most) >= 2, most


async def test_top_shows_each_target(stack: Stack) -> None:
    shown = await asyncio.to_thread(run_specd, "top", stack.coordinator.facts["metrics_address"], "--once")
    assert shown.returncode == 0, shown.stderr
    for name in NAMES:
        assert re.search(rf"at {name} +0 of 32", shown.stdout), shown.stdout


@pytest.mark.parametrize("number", examples([0, 1], 1))
@pytest.mark.parametrize("how", examples([signal.SIGKILL, signal.SIGTERM], 1))
async def test_sessions_move_when_a_target_dies_or_stops(stack: Stack, number: int, how: signal.Signals) -> None:
    await are_ready(stack)
    alone = await texts_of(stack.address, k=0)
    moves = read_metric(stack.coordinator, "specd_session_moves_total")

    async def end() -> None:
        os.kill(stack.targets[number].pid, how)

    assert await while_generating(stack, end) == alone
    assert read_metric(stack.coordinator, "specd_session_moves_total") > moves
    await are_ready(stack)


@pytest.mark.thorough
async def test_the_answers_of_an_encoder_decoder_move_with_their_sources() -> None:
    sources = [f"implement: def function_{i}(values, limit):\n    " for i in range(6)]
    async with Stack(
        target=EMBEDDED_T5_TARGET, draft=EMBEDDED_T5_DRAFT, num_targets=2, environment=ENVIRONMENT
    ) as stack:
        await are_ready(stack)
        alone = await texts_of(stack.address, k=0, prompts=sources)

        async def end() -> None:
            os.kill(stack.targets[0].pid, signal.SIGKILL)

        assert await while_generating(stack, end, sources) == alone
        assert read_metric(stack.coordinator, "specd_session_moves_total") > 0


@pytest.mark.thorough
async def test_targets_and_drafts_can_be_replaced_under_load_without_an_error(stack: Stack, tmp_path: Path) -> None:
    """A rolling update of two targets and two drafts."""
    await are_ready(stack)
    drafts = [draft_of(stack), await started("draft-worker", "--listen", f"unix:{tmp_path}/draft")]
    addresses = {
        "target": ",".join(target.facts["address"] for target in stack.targets),
        "draft": ",".join(draft.facts["address"] for draft in drafts),
    }
    options = [f"--{name}={value}" for name, value in addresses.items()]
    coordinator = await started("coordinator", *options, "--listen", f"unix:{tmp_path}/coordinator")
    watching = asyncio.create_task(drafts[1].run())
    try:
        async with AsyncClient(coordinator.facts["address"]) as client, asyncio.TaskGroup() as clients:
            load = Load(client)
            await load.begin()
            for number in range(len(LOADED)):
                clients.create_task(load.keep_asking(number))
            for child in (*drafts, *stack.targets):
                await load.some_more()
                pid = child.pid
                os.kill(pid, signal.SIGTERM)
                await eventually(lambda child=child, pid=pid: child.pid != pid)  # type: ignore[misc]
                await eventually(lambda: are_all_ready(coordinator))
            await load.some_more()
            load.end()
        assert load.errors == []
        moved = read_metric(coordinator, "specd_session_moves_total")
        lost = read_metric(coordinator, "specd_sessions_total", outcome="failed")
        assert (moved > 0, lost) == (True, 0)
    finally:
        watching.cancel()
        await coordinator.stop()
        await drafts[1].stop()


@pytest.mark.thorough
async def test_a_name_leads_to_its_workers(stack: Stack, tmp_path: Path) -> None:
    target = await started("target-worker", "--listen", "127.0.0.1:0")
    port = target.facts["address"].rpartition(":")[2]
    options = (f"--target=dns:localhost:{port}", "--draft=none", f"--listen=unix:{tmp_path}/coordinator")
    coordinator = await started("coordinator", *options)
    try:
        assert await texts_of(coordinator.facts["address"]) == await texts_of(stack.address, k=0)
    finally:
        await coordinator.stop()
        await target.stop()


@pytest.mark.skipif(shutil.which("unshare") is None, reason="no file of names can be mounted here")
@pytest.mark.thorough
async def test_a_name_gains_and_loses_workers(stack: Stack, tmp_path: Path) -> None:
    """A process of its own sees the names in a file, over /etc/hosts, which the test changes."""
    first = await started("target-worker", "--listen", "127.0.0.2:0")
    port = first.facts["address"].rpartition(":")[2]
    second = await started("target-worker", "--listen", f"127.0.0.3:{port}")
    names = tmp_path / "hosts"
    names.write_text("127.0.0.2 targets.test\n")
    coordinator = Child(
        "coordinator",
        [
            *(
                "unshare",
                "--map-root-user",
                "--mount",
                "sh",
                "-c",
                f'mount --bind {names} /etc/hosts && exec "$@"',
                "sh",
            ),
            *(sys.executable, "-m", "specd", "coordinator", f"--target=dns:targets.test:{port}", "--draft=none"),
            *(f"--listen=unix:{tmp_path}/coordinator", "--metrics-listen=127.0.0.1:0"),
        ],
        ENVIRONMENT,
    )

    def targets() -> dict[str, float]:
        found = (each for each in read_metrics(coordinator) if each.name == "specd_target_ready")
        return {each.labels["target"]: each.value for each in found}

    one, other = f"127.0.0.2:{port}", f"127.0.0.3:{port}"
    try:
        await coordinator.start()
        alone = await texts_of(stack.address, k=0)
        assert targets() == {one: 1}
        names.write_text("127.0.0.2 targets.test\n127.0.0.3 targets.test\n")
        await eventually(lambda: targets() == {one: 1, other: 1})
        names.write_text("127.0.0.3 targets.test\n")
        generating = asyncio.ensure_future(texts_of(coordinator.facts["address"]))
        await first.stop()  # as in a cluster: a pod that ends loses its address and its process
        assert await generating == alone
        await eventually(lambda: targets() == {other: 1})
        assert await texts_of(coordinator.facts["address"]) == alone
    finally:
        await coordinator.stop()
        await first.stop()
        await second.stop()


async def test_a_target_with_another_model_is_refused_and_the_others_serve(stack: Stack, tmp_path: Path) -> None:
    other = await started("target-worker", "--model", EMBEDDED_DRAFT, "--listen", f"unix:{tmp_path}/other")
    addresses = ",".join((stack.target.facts["address"], other.facts["address"]))
    options = (f"--target={addresses}", "--draft=none", "--listen", f"unix:{tmp_path}/coordinator")
    async with start_specd("coordinator", *options, "--metrics-listen", "none") as coordinator:
        event = await coordinator.next_event("refused a worker")
        assert "with other weights or another tokenizer" in event["error"]
        if not any('"event": "ready"' in line for line in coordinator.lines):  # the first target is enough for it
            await coordinator.next_event("ready")
    await other.stop()


async def started(command: str, *arguments: str) -> Child:
    child = Child(
        command, [sys.executable, "-m", "specd", command, *arguments, "--metrics-listen", "127.0.0.1:0"], ENVIRONMENT
    )
    await child.start()
    return child


def are_all_ready(coordinator: Child) -> bool:
    ready = [sample.value for sample in read_metrics(coordinator) if sample.name == "specd_target_ready"]
    return ready == [1, 1] and read_metric(coordinator, "specd_draft_available") == 1
