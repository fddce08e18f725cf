"""Throughput of concurrent sessions, of specd and of mlx-lm's batches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from specd.bench.environment import new_table
from specd.bench.setup import MLX_LM, SPECD, Setup
from specd.client import AsyncClient
from specd.worker.model.loader import LoadedModel

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Load:
    """A setup and a number of concurrent sessions."""

    setup: Setup
    concurrency: int


@dataclass(frozen=True)
class Run:
    """Measurements of a list of requests under a load. Times in seconds.

    `num_tokens` came in the first `seconds`, while at least `concurrency` requests were left.
    `drafted_per_round` is the mean number of tokens that the draft proposed, which shows the mean of an adaptive k.
    """

    load: Load
    seconds: float
    num_tokens: int
    token_ids: tuple[tuple[int, ...], ...]
    seconds_to_first_token: float = 0.0
    seconds_per_output_token: float = 0.0
    drafted_per_round: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all sessions together under full load."""
        return self.num_tokens / self.seconds


class _FullLoad:
    """Counts tokens while enough prompts are left to keep `concurrency` sessions busy."""

    def __init__(self, num_prompts: int, concurrency: int) -> None:
        self._ends_left = max(num_prompts - concurrency, 0) + 1
        self._started_at = time.perf_counter()
        self.num_tokens = 0
        self.seconds = 0.0

    def came(self, num_tokens: int) -> None:
        """Count tokens."""
        if self._ends_left > 0:
            self.num_tokens += num_tokens

    def ended(self) -> None:
        """Count the end of a text."""
        self._ends_left -= 1
        if self._ends_left == 0:
            self.seconds = time.perf_counter() - self._started_at


class LoadContender(Protocol):
    """A decoder of concurrent prompts to measure."""

    setup: Setup

    async def prepare(self, prompts: Prompts) -> None:
        """Fill the prompt caches."""

    async def decode(self, prompts: Prompts, concurrency: int, max_tokens: int) -> Run:
        """Decode all prompts, `concurrency` at a time, and measure it."""


class SpecdClients:
    """Clients of a running specd system. Each sends the next prompt when its last is complete."""

    def __init__(self, client: AsyncClient, setup: Setup, *, ignore_eos: bool = False) -> None:
        self.setup = setup
        self._client = client
        self._ignore_eos = ignore_eos

    async def prepare(self, prompts: Prompts) -> None:
        """Fill the prefix caches of the workers."""
        for prompt in prompts:
            await self._client.generate(prompt, max_tokens=3, num_draft_tokens=1).completion()

    async def decode(self, prompts: Prompts, concurrency: int, max_tokens: int) -> Run:
        """Decode all prompts."""
        waiting = list(enumerate(prompts))[::-1]
        texts: dict[int, tuple[int, ...]] = {}
        firsts: list[float] = []
        rates: list[float] = []
        drafted: list[int] = []
        load = _FullLoad(len(prompts), concurrency)

        async def keep_asking() -> None:
            while waiting:
                number, prompt = waiting.pop()
                token_ids: list[int] = []
                asked_at = first_at = last_at = time.perf_counter()
                stream = self._client.generate(
                    prompt,
                    max_tokens=max_tokens,
                    num_draft_tokens=self.setup.num_draft_tokens,
                    ignore_eos=self._ignore_eos,
                )
                async for response in stream.messages():
                    last_at = time.perf_counter()
                    if token_ids:
                        drafted.append(response.round.proposed)
                    else:  # the first round, which has no proposal
                        first_at = last_at
                    token_ids.extend(token.id for token in response.tokens)
                    load.came(len(response.tokens))
                load.ended()
                texts[number] = tuple(token_ids)
                firsts.append(first_at - asked_at)
                rates.append((last_at - first_at) / max(len(token_ids) - 1, 1))

        await asyncio.gather(*(keep_asking() for _ in range(concurrency)))
        return Run(
            Load(self.setup, concurrency),
            load.seconds,
            load.num_tokens,
            tuple(texts[number] for number in sorted(texts)),
            median(firsts),
            median(rates),
            fmean(drafted or [0]),
        )


class MlxLmBatch:
    """mlx-lm's continuous batching, as in `batch_generate` and its server: the target alone, in this process."""

    setup = Setup(MLX_LM)

    def __init__(self, target: LoadedModel) -> None:
        self._target = target
        self._caches: dict[tuple[int, ...], list[Any]] = {}

    async def prepare(self, prompts: Prompts) -> None:
        """Compute the caches of the prompts."""
        for prompt in map(tuple, prompts):
            if prompt not in self._caches:
                layers = make_prompt_cache(self._target.network)
                self._target.network(mx.array(prompt[:-1])[None], cache=layers)
                mx.eval([layer.state for layer in layers])
                self._caches[prompt] = layers

    async def decode(self, prompts: Prompts, concurrency: int, max_tokens: int) -> Run:
        """Decode all prompts."""
        network, stop_tokens = self._target.network, [[token_id] for token_id in self._target.info.eos_token_ids]
        load = _FullLoad(len(prompts), concurrency)
        generator = BatchGenerator(
            network, stop_tokens=stop_tokens, completion_batch_size=concurrency, prefill_batch_size=concurrency
        )
        if self._caches:
            caches = [self._caches[tuple(prompt)] for prompt in prompts]
            ids = generator.insert(
                [list(prompt[-1:]) for prompt in prompts], [max_tokens] * len(prompts), caches=caches
            )
        else:
            ids = generator.insert([list(prompt) for prompt in prompts], [max_tokens] * len(prompts))
        texts: dict[int, list[int]] = {number: [] for number in ids}
        while responses := generator.next_generated():
            load.came(len(responses))
            for response in responses:
                texts[response.uid].append(response.token)
                if response.finish_reason is not None:
                    load.ended()
        generator.close()
        tokens = tuple(tuple(texts[number]) for number in ids)
        return Run(Load(self.setup, concurrency), load.seconds, load.num_tokens, tokens)


async def measure(
    contenders: Sequence[LoadContender],
    prompts: Prompts,
    *,
    concurrency: Sequence[int],
    max_tokens: int,
    repeats: int,
    cached_prompts: bool,
    runs: list[Run],
) -> None:
    """Let the contenders take turns at each concurrency; each repeat starts with another one.

    It adds each run to `runs` when it is done, and prints its speed.
    """
    console = Console(stderr=True)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("warming up", total=repeats * len(concurrency) * len(contenders))
        for contender in contenders:
            await contender.decode(prompts[:2], 2, 8)
        for repeat in range(repeats):
            for count in concurrency:
                first = repeat % len(contenders)
                for contender in [*contenders[first:], *contenders[:first]]:
                    progress.update(task, advance=1, description=f"{contender.setup.label}, {count} at once")
                    if cached_prompts:
                        await contender.prepare(prompts)
                    runs.append(await contender.decode(prompts, count, max_tokens))
                    done = f"{contender.setup.label}, {count} at once: {runs[-1].tokens_per_second:.1f} tokens/s"
                    console.print(done, style="dim", highlight=False)


@dataclass(frozen=True)
class LoadResult:
    """Medians of the runs under one load, and their ratios to other loads."""

    load: Load
    tokens_per_second: float
    to_mlx_lm: float | None  # which does not have every target
    to_one_session: float
    milliseconds_to_first_token: float
    milliseconds_per_output_token: float
    drafted_per_round: float
    same_tokens: bool

    def as_record(self) -> dict[str, object]:
        """Return the fields for JSON."""
        record = asdict(self)
        del record["load"]
        setup = self.load.setup
        return {
            "system": setup.system,
            "num_draft_tokens": setup.num_draft_tokens,
            "concurrency": self.load.concurrency,
            **record,
        }


def summarise(runs: Sequence[Run]) -> list[LoadResult]:
    """Return medians over the repeats, with ratios to mlx-lm at the same concurrency and to one session of specd."""
    by_load: dict[Load, list[Run]] = {}
    for run in runs:
        by_load.setdefault(run.load, []).append(run)
    speeds = {load: median(run.tokens_per_second for run in own) for load, own in by_load.items()}
    alone = min(load.concurrency for load in speeds)
    one = max(speed for load, speed in speeds.items() if load.setup.system == SPECD and load.concurrency == alone)
    reference = next(run for run in runs if run.load == Load(Setup(SPECD), alone)).token_ids
    return [
        LoadResult(
            load,
            speed,
            speed / speeds[other] if (other := Load(Setup(MLX_LM), load.concurrency)) in speeds else None,
            speed / one,
            1000 * median(run.seconds_to_first_token for run in by_load[load]),
            1000 * median(run.seconds_per_output_token for run in by_load[load]),
            median(run.drafted_per_round for run in by_load[load]),
            all(run.token_ids == reference for run in by_load[load]),
        )
        for load, speed in speeds.items()
    ]


def table(results: Sequence[LoadResult], title: str) -> Table:
    """Return the table by concurrency, specd's fastest in bold."""
    headers = (
        "at once",
        "drafted\n/round",
        "tokens\n/s",
        "/ mlx-lm\nbatch",
        "/ one\nsession",
        "first\ntoken ms",
        "ms per\ntoken",
        "same\ntokens",
    )
    layout = new_table(title, headers)
    for result in sorted(results, key=lambda result: result.load.concurrency):
        load, is_specd = result.load, result.load.setup.system == SPECD
        fastest = best(results, load.concurrency)
        layout.add_row(
            load.setup.label if is_specd else "mlx-lm, batch, target alone",
            str(load.concurrency),
            f"{result.drafted_per_round:.1f}" if is_specd else "",
            f"{result.tokens_per_second:.1f}",
            f"{result.to_mlx_lm:.2f}" if result.to_mlx_lm is not None else "",
            f"{result.to_one_session:.2f}",
            f"{result.milliseconds_to_first_token:.0f}" if is_specd else "",
            f"{result.milliseconds_per_output_token:.1f}" if is_specd else "",
            "yes" if result.same_tokens else "no",
            style="bold" if result is fastest else "",
        )
    return layout


def best(results: Sequence[LoadResult], concurrency: int) -> LoadResult:
    """Return specd's fastest result at a concurrency."""
    own = [r for r in results if r.load.setup.system == SPECD and r.load.concurrency == concurrency]
    return max(own, key=lambda result: result.tokens_per_second)
