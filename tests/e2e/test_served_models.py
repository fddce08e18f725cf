"""Several models of one coordinator, on real processes: loaded on demand, unloaded, replaced, lost and found again."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from specd import AsyncClient
from specd.child import Child
from specd.client import NO_RETRIES, Delta, Loading
from specd.errors import InvalidRequestError, NotFoundError, UnavailableError
from specd.model_entries import ModelEntries, ModelEntry
from specd.model_processes import ModelPlan, ModelPlans
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_T5_TARGET, EMBEDDED_TARGET
from specd.supervisor import Stack
from specd.worker_group import WorkerModels
from tests.e2e.faults import PATIENT, eventually, kill
from tests.e2e.processes import PATIENCE_SECONDS, read_metrics, run_specd, start_specd
from tests.worker.models import save_odd_draft

PROMPT = "class Stack:\n    def push(self, item):\n        self.items.append(item)\n\n    def"
MIB = 2**20
# Caches with known limits, so that the memory of a worker has one, too.
SMALL_CACHES = {
    worker: {"cache_bytes": "32MiB", "prefix_cache_bytes": "4MiB"} for worker in ("target-worker", "draft-worker")
}


def plan(name: str, target: str, draft: str = "", *, num_mib: int = 300, **fields: Any) -> ModelPlan:
    return ModelPlan(WorkerModels(target, draft, name=name, options=SMALL_CACHES), num_bytes=num_mib * MIB, **fields)


CODER = plan("coder", EMBEDDED_TARGET, EMBEDDED_DRAFT, num_mib=800)
SMALL = plan("small", EMBEDDED_DRAFT)
T5 = plan("t5", EMBEDDED_T5_TARGET, num_mib=500)
BUDGET = 1300 * MIB  # for coder and t5, or for coder and small


@asynccontextmanager
async def serving(*plans: ModelPlan, budget_bytes: int | None = None, **options: Any) -> AsyncIterator[Stack]:
    models = ModelPlans(plans, budget_bytes)
    async with Stack(models=models, environment=PATIENT, **options) as stack:
        yield stack


async def text_of(client: AsyncClient, model: str, prompt: str = PROMPT, **options: Any) -> str:
    completion = await client.generate(prompt, model=model, **{"max_tokens": 24, **options}).completion()
    return completion.text


async def states(client: AsyncClient) -> dict[str, str]:
    return {status.name: status.state for status in await client.statuses()}


async def eventually_states(client: AsyncClient, wanted: dict[str, str]) -> None:
    async def are_there() -> bool:
        return await states(client) == wanted

    await eventually(are_there)


def resident_bytes(stack: Stack) -> int:
    """Return the resident memory of all workers that run."""
    assert stack.models is not None
    pages = 0
    for child in stack.models.children:
        if child.process is not None and child.process.returncode is None:
            try:
                pages += int(Path(f"/proc/{child.pid}/statm").read_text().split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
async def alone() -> dict[str, str]:
    """The text of each model, by a stack of its own without a draft."""
    texts = {}
    for each in (CODER, SMALL, T5):
        async with (
            Stack(target=each.workers.target, draft="", environment=PATIENT) as stack,
            AsyncClient(stack.address) as client,
        ):
            texts[each.name] = await text_of(client, "", num_draft_tokens=0)
    return texts


@pytest.mark.thorough
async def test_two_hundred_mixed_requests_within_a_budget_for_two_models(alone: dict[str, str]) -> None:
    random, most_bytes, counts = Random(0), 0, Counter[str]()
    async with serving(CODER, SMALL, T5, budget_bytes=BUDGET) as stack, AsyncClient(stack.address) as client:
        is_done = asyncio.Event()

        async def watch() -> None:
            nonlocal most_bytes
            while not is_done.is_set():
                most_bytes = max(most_bytes, await asyncio.to_thread(resident_bytes, stack))
                loaded = {name for name, state in (await states(client)).items() if state != "unloaded"}
                counts.update(loaded)
                await asyncio.sleep(0.1)

        watching = asyncio.ensure_future(watch())
        # A model at a time has most requests, as people use them: each change costs seconds.
        names = [random.choices(["coder", "small", "t5"], weights)[0] for weights in _phases() for _ in range(40)]
        gate = asyncio.Semaphore(8)

        async def request(name: str) -> None:
            async with gate:
                assert await text_of(client, name) == alone[name]

        await asyncio.gather(*map(request, names))
        is_done.set()
        await watching
        assert len(names) == 200
        assert set(names) == {"coder", "small", "t5"}
        final = await states(client)
    assert most_bytes <= BUDGET
    assert min(counts[name] for name in ("coder", "small", "t5")) > 0
    assert [*final.values()].count("ready") == 2


def _phases() -> list[tuple[float, float, float]]:
    return [(1, 0, 0), (0.9, 0.1, 0), (0, 0.95, 0.05), (0, 0, 1), (1, 0, 0)]


async def test_a_request_sees_the_progress_of_its_model_or_is_refused_at_once(alone: dict[str, str]) -> None:
    async with serving(CODER, SMALL) as stack, AsyncClient(stack.address, retries=NO_RETRIES) as client:
        assert await states(client) == {"coder": "unloaded", "small": "unloaded"}
        with pytest.raises(UnavailableError, match="the model 'small' is not loaded") as refused:
            await text_of(client, "small", refuse_unloaded=True)
        assert refused.value.reason == "MODEL_LOADING"
        events = [event async for event in client.generate(PROMPT, model="coder", max_tokens=24)]
        loading = [event for event in events if isinstance(event, Loading)]
        assert {event.process for event in loading} & {"target-worker coder", "draft-worker coder"}
        assert "".join(event.text for event in events if isinstance(event, Delta)) == alone["coder"]
        assert await text_of(client, "small", refuse_unloaded=True) == alone["small"]
        assert await states(client) == {"coder": "ready", "small": "ready"}
        with pytest.raises(NotFoundError, match="model is 'nope': those that are served are 'coder', 'small'"):
            await text_of(client, "nope")
        described = await client.describe("small")
        assert (described.target.name, described.draft) == ("small", None)
        assert [model.name for model in await client.models()] == ["coder", "small"]


@pytest.mark.thorough
async def test_a_session_outlives_the_workers_of_its_model() -> None:
    async with (
        serving(CODER, SMALL, budget_bytes=900 * MIB) as stack,
        AsyncClient(stack.address) as client,
        client.session() as session,
    ):
        first = await session.generate(PROMPT, model="small", max_tokens=8).completion()
        await text_of(client, "coder")
        assert await states(client) == {"coder": "ready", "small": "unloaded"}
        with pytest.raises(InvalidRequestError, match="began with the model 'small'"):
            await session.generate(" more", model="coder", max_tokens=8).completion()
        second = await session.generate(" more", max_tokens=8).completion()
        assert await states(client) == {"coder": "unloaded", "small": "ready"}
        whole = await text_of(client, "small", PROMPT + first.text + " more", max_tokens=8)
        assert second.text == whole


@pytest.mark.thorough
async def test_a_hot_swap_under_eight_streams_fails_none_and_changes_no_running_text(tmp_path: Path) -> None:
    """The new target has the same tokenizer, so sessions continue with it."""
    other = save_odd_draft("random", tmp_path / "other")
    before, after = plan("coder", EMBEDDED_TARGET, EMBEDDED_DRAFT), plan("coder", other)
    options: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True}
    async with serving(before, budget_bytes=700 * MIB) as stack, AsyncClient(stack.address) as client:
        prompts = [f"{PROMPT} pop{i}(self" for i in range(8)]
        expected = [await text_of(client, "coder", prompt, **options) for prompt in prompts]
        is_swapped = asyncio.Event()
        waits: list[float] = []

        async def stream(prompt: str, text: str) -> int:
            """Generate again and again; return how many texts are those of the first model."""
            num_before = 0
            while True:
                last, began_at = is_swapped.is_set(), time.monotonic()
                completion = client.generate(prompt, model="coder", max_tokens=100, ignore_eos=True)
                async for event in completion:
                    if isinstance(event, Delta) and event.text:
                        waits.append(time.monotonic() - began_at)
                        break
                async for _ in completion:
                    pass
                num_before += completion.text == text
                if last:
                    assert completion.text != text
                    return num_before

        async with client.session() as session:
            await session.generate(PROMPT, max_tokens=8).completion()
            streams = [asyncio.ensure_future(stream(*each)) for each in zip(prompts, expected, strict=True)]
            await asyncio.sleep(1)
            assert stack.models is not None
            stack.models.replace(ModelPlans((after,), 700 * MIB))
            described = (await client.describe()).target.fingerprint

            async def is_replaced() -> bool:
                return (await client.describe()).target.fingerprint != described

            await eventually(is_replaced)
            is_swapped.set()
            assert min(await asyncio.gather(*streams)) >= 1
            continued = await session.generate(" more", max_tokens=8).completion()
            assert continued.statistics.prompt_tokens > 10

        async def is_alone() -> bool:
            return stack.models is not None and len(stack.models.children) == 1

        await eventually(is_alone)
    print(f"the longest wait for a first token: {max(waits):.2f} s")


async def test_a_model_that_cannot_be_loaded_is_an_error_with_its_reason_and_harms_no_other(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(EMBEDDED_DRAFT, broken)
    weights = next(broken.glob("*.safetensors"))
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    async with (
        serving(SMALL, plan("broken", str(broken))) as stack,
        AsyncClient(stack.address, retries=NO_RETRIES) as client,
    ):
        text = await text_of(client, "small")
        for _ in range(2):
            with pytest.raises(UnavailableError, match="the target-worker broken did not start") as refused:
                await text_of(client, "broken")
            assert refused.value.reason == "MODEL_NOT_LOADED"
        assert await text_of(client, "small") == text
        weights.write_bytes(whole)
        assert await text_of(client, "broken") == text


async def test_deaths_of_processes_lose_no_generation(alone: dict[str, str]) -> None:
    async with AsyncExitStack() as running:
        stack = await running.enter_async_context(serving(CODER, SMALL))
        client = await running.enter_async_context(AsyncClient(stack.address))
        assert stack.models is not None
        assert await text_of(client, "coder") == alone["coder"]
        for kind in ("target-worker", "draft-worker", "coordinator"):
            generating = asyncio.ensure_future(text_of(client, "coder", max_tokens=200, ignore_eos=True))
            await asyncio.sleep(0.2)
            children = [*stack.models.children, stack.coordinator]
            pids = {child.name: child.pid for child in children}
            kill(next(child for child in children if child.name.startswith(kind)))
            text = await asyncio.wait_for(generating, PATIENCE_SECONDS)
            assert text.startswith(alone["coder"])
            assert await text_of(client, "coder") == alone["coder"]
            if kind == "coordinator":  # which uses the workers that run
                assert {child.name: child.pid for child in stack.models.children} == {
                    name: pid for name, pid in pids.items() if name != "coordinator"
                }
                assert await states(client) == {"coder": "ready", "small": "unloaded"}


@pytest.mark.thorough
async def test_an_idle_model_is_unloaded_and_a_pinned_one_stays() -> None:
    plans = plan("a", EMBEDDED_DRAFT, pinned=True), plan("b", EMBEDDED_DRAFT, idle_seconds=1.0)
    async with serving(*plans) as stack, AsyncClient(stack.address) as client:
        assert await states(client) == {"a": "ready", "b": "unloaded"}
        await text_of(client, "b")
        assert await states(client) == {"a": "ready", "b": "ready"}
        await eventually_states(client, {"a": "ready", "b": "unloaded"})


async def test_specd_up_serves_a_file_of_models_and_reads_it_again(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    caches = 'target-worker = { cache_bytes = "32MiB", prefix_cache_bytes = "4MiB" }\n'
    small = f'[models.small]\ntarget = "{EMBEDDED_DRAFT}"\ndraft = "lookup"\n{caches}'
    file.write_text(f'budget = "1GB"\n{small}')
    address = f"unix:{tmp_path}/specd"
    options = ["--models", str(file), "--listen", address, "--no-metrics"]
    # Without memory of an earlier run, the second model has its draft measured.
    async with start_specd("up", *options, XDG_CACHE_HOME=str(tmp_path / "cache")) as running:
        await running.next_line(lambda line: "specd is ready" in line)
        async with AsyncClient(address) as client:
            assert await text_of(client, "small")
            done = await asyncio.to_thread(
                run_specd, "generate", "--address", address, "--model", "small", "--max-tokens", "4", PROMPT
            )
            assert done.returncode == 0, done.stderr
            file.write_text("budget = 7 7")
            running.process.send_signal(signal.SIGHUP)
            await running.next_event("the models stay as they are")
            file.write_text(f'budget = "1GB"\n{small}[models.other]\ntarget = "{EMBEDDED_DRAFT}"\n{caches}')
            running.process.send_signal(signal.SIGHUP)
            await running.next_event("the file of models was read again")
            await eventually_states(client, {"small": "ready", "other": "unloaded"})
            assert await text_of(client, "other") == await text_of(client, "small")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "models is missing"),
        ("[models]", "has no model"),
        ("[models.a]", "target is missing"),
        ('[models.a]\ntarget = "TARGET"\nidle_second = 3', "has no 'idle_second': did you mean 'idle_seconds'"),
        ('budget = "8GB"\n[models.a]\ntarget = "TARGET"\ntarget-worker = { kv_bit = 4 }', "did you mean 'kv_bits'"),
        ('budget = "1MB"\n[models.a]\ntarget = "TARGET"', "and the budget is 1.0 MB: raise the budget"),
        (
            'budget = "1GB"\n[models.a]\npinned = true\ntarget = "TARGET"\ntarget-worker = { cache_bytes = "600MB" }\n'
            '[models.b]\ntarget = "TARGET"\ntarget-worker = { cache_bytes = "600MB" }',
            "beside the pinned models, ",
        ),
        (
            '[models."a b"]\ntarget = "TARGET"',
            "'a b' is not a name of a model: write at most 200 characters without spaces",
        ),
        ('[models.a]\ntarget = "/nowhere/at/all"', "the model a: "),
        ('[models.a]\ntarget = "TARGET"\ntargets = 0', "--targets is 0: it must be greater than or equal to 1"),
        ('budget = "much"\n[models.a]\ntarget = "TARGET"', "budget is 'much': it must be a number of bytes"),
    ],
)
def test_a_wrong_file_of_models_is_an_error_at_once(tmp_path: Path, content: str, complaint: str) -> None:
    file = tmp_path / "models.toml"
    file.write_text(content.replace("TARGET", EMBEDDED_DRAFT))
    done = run_specd("up", "--models", str(file), "--listen", f"unix:{tmp_path}/specd")
    assert done.returncode == 2
    assert complaint.lower() in done.stderr.lower()
    assert "Traceback" not in done.stderr


def test_one_model_and_several_contradict_each_other(tmp_path: Path) -> None:
    done = run_specd("up", "--models", str(tmp_path), "--target", EMBEDDED_DRAFT)
    assert "--models and --target contradict each other" in done.stderr


async def test_a_coordinator_without_a_supervisor_serves_targets_that_run(
    tmp_path: Path, alone: dict[str, str]
) -> None:
    """In containers. Metrics and sessions are those of a model, and a target that is away holds up no other one."""
    addresses = {each.name: f"unix:{tmp_path}/{each.name}" for each in (CODER, SMALL)}
    children = [
        Child(f"target {each.name}", worker("target-worker", each.workers.target, addresses[each.name]), PATIENT)
        for each in (CODER, SMALL)
    ]
    file, sessions = tmp_path / "models.json", tmp_path / "sessions.sqlite"
    entries = ModelEntries(tuple(ModelEntry(name, address) for name, address in addresses.items()))
    file.write_text(entries.to_json())
    options = ["--models", str(file), "--listen", f"unix:{tmp_path}/c", "--metrics-listen", "127.0.0.1:0"]
    coordinator = Child(
        "coordinator",
        [sys.executable, "-m", "specd", "coordinator", *options, "--session-file", str(sessions)],
        PATIENT,
    )
    children.append(coordinator)
    elsewhere = f"unix:{tmp_path}/elsewhere"
    try:
        await asyncio.gather(children[0].start(), coordinator.start())
        async with AsyncClient(coordinator.facts["address"], retries=NO_RETRIES) as client:
            assert await text_of(client, "coder") == alone["coder"]
            with pytest.raises(UnavailableError, match="the target worker of the model 'small'"):
                await text_of(client, "small")
        await children[1].start()
        async with AsyncClient(coordinator.facts["address"]) as client, client.session() as session:
            for name in ("coder", "small"):
                assert await text_of(client, name) == alone[name]
            assert (await session.generate(PROMPT, model="small", max_tokens=8).completion()).text
            kill(coordinator)
            await coordinator.process.wait()  # type: ignore[union-attr]
            await coordinator.start()
            more = await session.generate(" more", max_tokens=8).completion()
            assert more.statistics.prompt_tokens > 30
            samples = await asyncio.to_thread(read_metrics, coordinator)
            generated = {
                sample.labels["model"]: sample.value
                for sample in samples
                if sample.name == "specd_generated_tokens_total"
            }
            assert generated == {"coder": 0, "small": 8}
            file.write_text(entries.to_json().replace(addresses["small"], elsewhere))
            coordinator.process.send_signal(signal.SIGHUP)  # type: ignore[union-attr]
            assert await text_of(client, "small") == alone["small"], "from the address before"
            children.insert(0, Child("moved", worker("target-worker", SMALL.workers.target, elsewhere), PATIENT))
            await children[0].start()
            await asyncio.sleep(0.5)
            await children[2].stop()
            assert await text_of(client, "small") == alone["small"]
    finally:
        for child in children:
            await child.stop()


def worker(process: str, model: str, address: str) -> list[str]:
    return [sys.executable, "-m", "specd", process, "--model", model, "--listen", address, "--metrics-listen", "none"]
