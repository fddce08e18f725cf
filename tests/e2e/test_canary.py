"""A draft on trial, on real processes: a worse one is taken back, a better one is kept, and no text changes.

Sessions run one after the other where the better draft must win: on two cores, several at once hardly gain by a draft.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from tests.e2e.canary_stacks import KEPT, TAKEN_BACK, UNDECIDED, CanaryStack, canary_stack
from tests.e2e.completions import complete
from tests.e2e.faults import PATIENT
from tests.e2e.processes import RunningSpecd, draft_of, read_metric, start_specd
from tests.raw_client import RawClient
from tests.worker.models import save_foreign_draft, save_noisy_draft


@pytest.fixture(scope="module")
def noisy_draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A draft that is accepted about half as often as the embedded one, and takes as long."""
    return save_noisy_draft(tmp_path_factory.mktemp("noisy") / "draft", noise=0.2)


@pytest.fixture
async def worse(noisy_draft: str, tmp_path: Path) -> AsyncIterator[tuple[str, RunningSpecd]]:
    """A draft worker with the noisy draft: its address, and the process."""
    address = f"unix:{tmp_path}/worse"
    options = ["--model", noisy_draft, "--listen", address, "--metrics-listen", "none", "--blas-threads", "1"]
    async with start_specd("draft-worker", *options) as worker:
        await worker.next_event("ready")
        yield address, worker


def acceptance_in(path: Path) -> float:
    """Return the part of the tried tokens that were accepted, in the memory of a planner."""
    pools = [pool for client in json.loads(path.read_text())["clients"].values() for pool in client.items()]
    counts = [(sum(tried), sum(passed)) for kind, (_, tried, passed) in pools if "accepted" in kind]
    return sum(passed for _, passed in counts) / sum(tried for tried, _ in counts)


@pytest.mark.thorough
async def test_a_worse_canary_is_taken_back(
    stack: Stack, worse: tuple[str, RunningSpecd], tmp_path: Path, prompts: list[str]
) -> None:
    address, worker = worse
    good = draft_of(stack).facts["address"]
    async with canary_stack(stack, tmp_path, prompts, draft=good, canary=address) as trial:
        await trial.run_until_decided()
        decided = trial.read()
        assert decided["state"] == TAKEN_BACK
        assert 0 < decided["rounds"] <= 200
        event = await trial.coordinator.next_event("the canary draft is taken back")
        assert event["canary_tokens_per_second"] < event["present_tokens_per_second"]
        await trial.run(range(4))
        after = trial.read()
        assert (after["canary"], after["rounds"]) == (decided["canary"], decided["rounds"])
        # Its connection closes, so that it can be stopped without a trace.
        os.kill(worker.pid, signal.SIGKILL)
        await trial.run(range(4, 6))
        assert all(completion.statistics.rounds_without_draft == 0 for _, completion in trial.completions)
        await trial.check_texts()
    # Each draft has taught a planner of its own.
    low, high = sorted(map(acceptance_in, (tmp_path / "cache").rglob("planner-*.json")))
    assert low < high - 0.1


@pytest.mark.thorough
async def test_a_better_canary_is_kept_and_serves_all_sessions(
    stack: Stack, worse: tuple[str, RunningSpecd], tmp_path: Path, prompts: list[str]
) -> None:
    address, worker = worse
    good = draft_of(stack).facts["address"]
    # On a busy machine no draft may pay for a while, and a canary that gains nothing is taken back.
    for attempt in range(3):
        (directory := tmp_path / str(attempt)).mkdir()
        async with canary_stack(stack, directory, prompts, draft=address, canary=good) as trial:
            await trial.run_until_decided(greedily=True)  # where the difference is largest
            decided = trial.read()
            if decided["state"] == TAKEN_BACK:
                continue
            await check_kept(trial, decided, worker)
            return
    raise AssertionError("it was taken back three times")


async def check_kept(trial: CanaryStack, decided: dict[str, Any], worker: RunningSpecd) -> None:
    """Check that a canary that was kept serves all sessions without the other draft."""
    assert decided["state"] == KEPT
    assert 0 < decided["rounds"] <= 200
    event = await trial.coordinator.next_event("the canary draft is kept")
    assert event["canary_tokens_per_second"] > event["present_tokens_per_second"]
    assert (await trial.client.model_info()).draft.name == Path(event["canary_model"]).name
    os.kill(worker.pid, signal.SIGKILL)  # which nothing needs any more
    num_before = len(trial.completions)
    await trial.run(range(6))
    after = trial.read()
    assert (after["canary"] - decided["canary"], after["present"] - decided["present"]) == (6, 0)
    assert all(completion.statistics.rounds_without_draft == 0 for _, completion in trial.completions[num_before:])
    await trial.check_texts()


@pytest.mark.thorough
async def test_a_canary_that_never_comes_harms_nothing(stack: Stack, tmp_path: Path, prompts: list[str]) -> None:
    good = draft_of(stack).facts["address"]
    async with canary_stack(stack, tmp_path, prompts, draft=good, canary=f"unix:{tmp_path}/absent") as trial:
        await trial.run(range(6))
        assert trial.read() == {"state": UNDECIDED, "rounds": 0, "present": 6, "canary": 0}
        assert all(completion.statistics.rounds_without_draft == 0 for _, completion in trial.completions)
        assert sum(completion.statistics.accepted_tokens for _, completion in trial.completions) > 0
        await trial.check_texts()


async def test_a_canary_with_another_tokenizer_is_refused_with_a_warning(
    stack: Stack, tmp_path: Path, prompts: list[str]
) -> None:
    foreign, good = f"unix:{tmp_path}/foreign", draft_of(stack).facts["address"]
    options = ["--model", save_foreign_draft(tmp_path / "model"), "--listen", foreign]
    async with (
        start_specd("draft-worker", *options, "--metrics-listen", "none") as worker,
        canary_stack(stack, tmp_path, prompts, draft=good, canary=foreign) as trial,
    ):
        await worker.next_event("ready")
        event = await trial.coordinator.next_event("the canary draft is refused, the present one serves all")
        assert event["level"] == "warning"
        assert "different tokenizers" in event["why"]
        await trial.run(range(4), at_once=2)
        assert trial.read() == {"state": UNDECIDED, "rounds": 0, "present": 4, "canary": 0}
        await trial.check_texts()


async def test_a_canary_that_is_killed_harms_nothing(
    stack: Stack, worse: tuple[str, RunningSpecd], tmp_path: Path, prompts: list[str]
) -> None:
    """It dies in the middle of sessions, which continue with the present draft, as do those after them."""
    (address, worker), good = worse, draft_of(stack).facts["address"]
    async with canary_stack(stack, tmp_path, prompts, draft=good, canary=address) as trial:
        num_killed_in = 0
        while not num_killed_in:
            before = trial.read()
            sessions = asyncio.ensure_future(trial.run(range(4), at_once=4))
            while not sessions.done() and trial.read()["rounds"] < before["rounds"] + 2:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            num_killed_in = int(not sessions.done())
            if num_killed_in:
                os.kill(worker.pid, signal.SIGKILL)
            await sessions
        assert trial.state == UNDECIDED
        before, num_before = trial.read(), len(trial.completions)
        await trial.run(range(4))
        after = trial.read()
        assert (after["canary"], after["present"] - before["present"]) == (before["canary"], 4)
        assert all(completion.statistics.rounds_without_draft == 0 for _, completion in trial.completions[num_before:])
        await trial.check_texts()


@pytest.mark.thorough
async def test_a_stack_with_a_canary_serves_with_both_and_without_one_that_cannot_start(
    noisy_draft: str, tmp_path: Path
) -> None:
    """Its worker is a process of the stack; a model that cannot be loaded ends neither the stack nor its start."""
    broken = save_foreign_draft(tmp_path / "broken")
    (Path(broken) / "model.safetensors").write_bytes(b"no weights")
    for canary, is_there in ((noisy_draft, True), (broken, False)):
        options = {"coordinator": {"canary_share": "0.5"}}
        async with (
            Stack(
                target=EMBEDDED_TARGET,
                draft=EMBEDDED_DRAFT,
                canary_draft=canary,
                options=options,
                environment=PATIENT | {"OPENBLAS_NUM_THREADS": "1"},
            ) as stack,
            RawClient(stack.address) as client,
        ):
            name = "specd_sessions_by_draft_total"
            for _ in range(1000):
                completion = await complete(client, max_tokens=8)
                assert completion.statistics.rounds_without_draft == 0
                if not is_there or read_metric(stack.coordinator, name, draft="canary"):
                    break
            assert bool(read_metric(stack.coordinator, name, draft="canary")) == is_there
            assert "draft-worker canary" in [child.name for child in stack.children]
