"""Runs of the contenders on the prompts, and their reports."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from rich.table import Table

from specd.bench import throughput
from specd.bench.comparison import compare
from specd.bench.contenders import Contender, MlxLm, Specd
from specd.bench.environment import console, environment, new_table, say
from specd.bench.plot import save_plot
from specd.bench.prompts import encode, load_prompts, short, spread
from specd.bench.replay import record, replaying
from specd.bench.sample import Sample, SetupResult, have_same_tokens, summarise, whole_turns
from specd.bench.setup import MLX_LM, SPECD, Setup, setups
from specd.bench.turns import take_turns
from specd.client import NO_RETRIES, AsyncClient
from specd.sampling import Acceptance
from specd.supervisor import NO_PREFIX_CACHE, Stack
from specd.worker.model.loader import LoadedModel, load

_STAGES = {
    "draft": "draft\nms",
    "verify": "verify\nms",
    "queue": "queue\nms",
    "wire_and_coordinator": "wire+\ncoord.",
    "total": "round\nms",
}


_INTERRUPTED = "interrupted: these are the results so far"


@dataclass(frozen=True)
class Options:
    """Options of a run. `lenience` is for REJECTION only; `adaptive` adds contenders whose k the service chooses.

    With `draft_in_target`, the target worker computes the draft. Without `prompts`, `num_prompts` of specd's own for
    the kind of model are used.

    `replay` is the acceptance of a draft that replays the target's texts; None without such a draft. A replayed token
    takes `step_seconds` or, if there is a `draft` too, a pass of that model.
    """

    target: str
    draft: str
    prompts: dict[str, str]
    num_draft_tokens: Sequence[int]
    max_tokens: int
    repeats: int
    blas: str
    temperatures: Sequence[float] = (0.0,)
    acceptance: Sequence[Acceptance] = (Acceptance.COUPLED,)
    lenience: Sequence[float] = (0.0,)
    num_prompts: int = 8
    adaptive: bool = False
    concurrency: Sequence[int] = ()
    cached_prompts: bool = False
    replay: float | None = None
    step_seconds: float = 0.0
    draft_in_target: bool = False

    def stack(self, environment: Mapping[str, str]) -> Stack:
        """Return the processes to measure, with variables of theirs."""
        if not self.draft_in_target:
            return Stack(target=self.target, draft=self.draft, environment=environment)
        own = {"target-worker": {"self_draft": self.draft}}
        return Stack(target=self.target, draft="", environment=environment, options=own)


def run_bench(options: Options, json_path: Path | None, plot_path: Path | None) -> bool:
    """Measure, print a table for each temperature, write JSON and PNG. Returns whether the tokens are right.

    The contenders take turns prompt by prompt: specd is idle while mlx-lm computes, and the reverse. After Ctrl-C it
    reports what it has, and raises KeyboardInterrupt.
    """
    say("loading the models for mlx-lm")
    target = load(options.target, blas=options.blas)
    options = _with_prompts(options, target)
    draft = None if options.replay is not None else load(options.draft, blas=options.blas)
    prompt_ids = encode(options.prompts, target.tokenizer_json)
    measured: dict[float, dict[Setup, list[Sample]]] = {}
    try:
        asyncio.run(_measure(target, draft, prompt_ids, options, measured))
    except KeyboardInterrupt:
        say(_INTERRUPTED)
        _report({temperature: whole_turns(own) for temperature, own in measured.items()}, options, json_path, plot_path)
        raise
    return _report(measured, options, json_path, plot_path)


def _report(
    measured: Mapping[float, Mapping[Setup, list[Sample]]],
    options: Options,
    json_path: Path | None,
    plot_path: Path | None,
) -> bool:
    """Print the tables, write JSON and PNG, and return whether the tokens are right."""
    output = console()
    all_results: list[SetupResult] = []
    report: dict[str, Any] = {
        "environment": environment(**_facts(options)),
        "results": [],
        "comparison": {},
        "same_tokens": True,
        "samples": {},
    }
    for temperature, samples in measured.items():
        if not samples:
            continue
        baseline = next(iter(samples.values()))
        results = [summarise(setup, own, baseline) for setup, own in samples.items()]
        same = have_same_tokens(own for setup, own in samples.items() if setup.repeats_target)
        verdicts = compare(results) if any(setup.speculates and setup.system == SPECD for setup in samples) else {}

        alone = list(measured) == [0]
        output.print(_table(results, "medians" if alone else f"medians, T = {temperature:g}"))
        for name, value in verdicts.items():
            output.print(f"{name}: [bold]{value:.2f}[/]", highlight=False)
        output.print(_say_who_gave_the_same_tokens(list(samples), same) + "\n" * (not alone), highlight=False)

        all_results += results
        report["results"] += [result.as_record() for result in results]
        suffix = f", T = {temperature:g}" if temperature else ""
        report["comparison"] |= {name + suffix: value for name, value in verdicts.items()}
        report["same_tokens"] &= same
        report["samples"] |= {setup.name: [sample.as_record() for sample in own] for setup, own in samples.items()}
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=1) + "\n")
    if plot_path is not None and all_results:
        models = f"{Path(options.target).name} with draft {_draft_name(options)}"
        title = f"{models}, {len(options.prompts)} prompts, up to {options.max_tokens} tokens each"
        save_plot(all_results, title, plot_path)
    return bool(report["same_tokens"])


async def _measure(
    target: LoadedModel,
    draft: LoadedModel | None,
    prompt_ids: dict[str, list[int]],
    options: Options,
    measured: dict[float, dict[Setup, list[Sample]]],
) -> None:
    """Add the samples by temperature and contender, specd with the target alone first, all in the same order.

    mlx-lm takes part if there is a draft and mlx-lm has the target's class.
    """
    takes_mlx_lm = draft is not None and not target.info.has_encoder
    async with AsyncExitStack() as running:
        # All contenders get the same prompts, and mlx-lm computes each prompt again.
        say("starting specd, which measures the speed of models that it sees first")
        stack = await running.enter_async_context(options.stack(NO_PREFIX_CACHE))
        client = await running.enter_async_context(AsyncClient(stack.address, retries=NO_RETRIES))
        if options.replay is not None:
            client = await _replay(running, stack, client, prompt_ids, options)
        for temperature in options.temperatures:
            contenders: dict[Setup, Contender] = {
                setup: MlxLm(target, draft, setup) if draft and setup.system == MLX_LM else Specd(client, setup)
                for setup in (
                    setups(
                        temperature,
                        options.num_draft_tokens,
                        options.acceptance,
                        options.lenience,
                        adaptive=options.adaptive,
                    )
                )
                if takes_mlx_lm or setup.system == SPECD
            }
            say(f"warming up {len(contenders)} contenders")
            warm_up = next(iter(prompt_ids.values()))
            for contender in contenders.values():
                await contender.decode("", 0, warm_up, 16)
            samples = measured.setdefault(temperature, {})
            await take_turns(
                contenders, prompt_ids, repeats=options.repeats, max_tokens=options.max_tokens, samples=samples
            )


async def _replay(
    running: AsyncExitStack,
    stack: Stack,
    client: AsyncClient,
    prompt_ids: Mapping[str, Sequence[int]],
    options: Options,
    environment: Mapping[str, str] | None = None,
) -> AsyncClient:
    """Record the target's answers, and return a client of a coordinator with a draft that replays them."""
    assert options.replay is not None
    say("recording the target's texts")
    texts = await record(client, prompt_ids, max_tokens=options.max_tokens)
    replayed = replaying(
        stack,
        texts,
        acceptance=options.replay,
        step_seconds=options.step_seconds,
        computes=bool(options.draft),
        environment=environment,
    )
    return await running.enter_async_context(replayed)


def run_throughput(options: Options, json_path: Path | None) -> bool:
    """Measure concurrent sessions, print a table, write JSON. Returns whether specd always gave the same tokens.

    After Ctrl-C it reports what it has, and raises KeyboardInterrupt.
    """
    say("loading the target for mlx-lm")
    target = load(options.target, blas=options.blas)
    options = _with_prompts(options, target)
    prompts = encode(options.prompts, target.tokenizer_json)
    prompts = short(prompts) or prompts
    # The same number at each concurrency, enough to keep the largest busy for a while.
    requests = list(islice(cycle(prompts.values()), max(len(prompts), 2 * max(options.concurrency))))
    runs: list[throughput.Run] = []
    try:
        asyncio.run(_measure_throughput(target, requests, options, runs))
    except KeyboardInterrupt:
        say(_INTERRUPTED)
        if runs:
            _report_throughput(runs, len(requests), options, json_path)
        raise
    return _report_throughput(runs, len(requests), options, json_path)


def _report_throughput(
    runs: Sequence[throughput.Run], num_requests: int, options: Options, json_path: Path | None
) -> bool:
    results = throughput.summarise(runs)
    cached = ", prompts cached" if options.cached_prompts else ""
    output = console()
    output.print(throughput.table(results, f"{num_requests} requests{cached}"))
    same = all(result.same_tokens for result in results if result.load.setup.system == SPECD)
    who = "specd, for every k and concurrency,"
    output.print(f"{who} gave {'the same' if same else '[bold red]DIFFERENT[/]'} tokens", highlight=False)
    if json_path is not None:
        facts = {**_facts(options), "requests": num_requests, "cached_prompts": options.cached_prompts}
        report = {
            "environment": environment(**facts),
            "results": [result.as_record() for result in results],
            "same_tokens": same,
        }
        json_path.write_text(json.dumps(report, indent=1) + "\n")
    return same


async def _measure_throughput(
    target: LoadedModel, requests: throughput.Prompts, options: Options, runs: list[throughput.Run]
) -> None:
    say("starting specd, which measures the speed of models that it sees first")
    variables = {} if options.cached_prompts else NO_PREFIX_CACHE
    limits = {"SPECD_COORDINATOR_MAX_SESSIONS": str(max(options.concurrency))}
    async with AsyncExitStack() as running:
        stack = await running.enter_async_context(options.stack(variables | limits))
        client = await running.enter_async_context(AsyncClient(stack.address, retries=NO_RETRIES))
        if options.replay is not None:
            prompt_ids = {f"request {number}": ids for number, ids in enumerate(dict.fromkeys(map(tuple, requests)))}
            client = await _replay(running, stack, client, prompt_ids, options, limits)
        contenders: list[throughput.LoadContender] = [
            *(throughput.SpecdClients(client, Setup(SPECD, k)) for k in dict.fromkeys([0, *options.num_draft_tokens])),
            *([throughput.SpecdClients(client, Setup(SPECD, None))] if options.adaptive else []),
            *([] if target.info.has_encoder else [throughput.MlxLmBatch(target)]),
        ]
        await throughput.measure(
            contenders,
            requests,
            concurrency=options.concurrency,
            max_tokens=options.max_tokens,
            repeats=options.repeats,
            cached_prompts=options.cached_prompts,
            runs=runs,
        )


def _with_prompts(options: Options, target: LoadedModel) -> Options:
    own = spread(load_prompts(for_encoder=target.info.has_encoder), options.num_prompts)
    return replace(options, prompts=options.prompts or own)


def _say_who_gave_the_same_tokens(contenders: Sequence[Setup], same: bool) -> str:
    others = []
    if contenders[0].temperature and any(setup.rejects and setup.is_faithful for setup in contenders):
        others.append("REJECTION")
    if any(not setup.is_faithful for setup in contenders):
        others.append("lenience")
    if contenders[0].temperature:
        others.append("mlx-lm")
    who = "specd with COUPLED, for every k," if contenders[0].temperature else "all contenders"
    but = f" ({', '.join(others)} {'give' if len(others) > 1 else 'gives'} other texts)" if others else ""
    return f"{who} gave {'the same' if same else '[bold red]DIFFERENT[/]'} tokens{but}"


def _table(results: Sequence[SetupResult], title: str) -> Table:
    measures = ("tokens\n/s", "speed\n-up", "limit\n/s", "accepted", "per\ntry", "tokens\n/round", "first\ntoken")
    table = new_table(title, (*measures, *_STAGES.values(), "kB a\nround"))
    for result in results:
        stages = result.round_milliseconds
        table.add_row(
            result.setup.label,
            f"{result.tokens_per_second:.1f}",
            f"{result.speedup:.2f}",
            _cell(result.limit_tokens_per_second, ".1f"),
            _cell(result.acceptance_rate, ".1%"),
            _cell(result.acceptance_per_try, ".3f"),
            _cell(result.acceptance_length, ".2f"),
            f"{1000 * result.time_to_first_token_seconds:.0f}",
            *(_cell(stages.get(name), ".2f") for name in _STAGES),
            _cell(result.round_kilobytes, ".1f"),
        )
    return table


def _cell(value: float | None, layout: str) -> str:
    return format(value, layout) if value is not None else ""


def _draft_name(options: Options) -> str:
    name = Path(options.draft).name
    if options.replay is None:
        return f"{name} in the target" if options.draft_in_target else name
    return f"replayed text, {options.replay:g} accepted" + (f", passes of {name}" if name else "")


def _facts(options: Options) -> dict[str, object]:
    return {
        "blas": options.blas,
        "target": Path(options.target).name,
        "draft": _draft_name(options),
        "temperatures": list(options.temperatures),
        "max_tokens": options.max_tokens,
        "repeats": options.repeats,
        "prompts": list(options.prompts),
    }
