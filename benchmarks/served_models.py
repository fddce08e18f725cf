"""A pair of models in running processes, with drafts that replay the target's texts, for `accelerator.py`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from specd.bench.contenders import Specd
from specd.bench.replay import record, replaying
from specd.bench.sample import Sample, summarise
from specd.bench.setup import SPECD, Setup
from specd.bench.throughput import SpecdClients
from specd.client import NO_RETRIES, AsyncClient
from specd.step_costs import interpolate
from specd.supervisor import NO_PREFIX_CACHE, Stack

_TOKENS = 96
_TURNS = 2
_PROMPT_TOKENS = 64  # so that eight prefills take no great part of eight sessions' time
_LONG_PROMPT_TOKENS = 200  # as those of the raw passes


class ServedModels:
    """The processes of a pair, and a coordinator for each replayed draft, by acceptance and by whether it computes."""

    client: AsyncClient
    target_address: str
    draft_address: str

    def __init__(self, target: str, draft: str, prompts: Mapping[str, list[int]], *, needs_replays: bool) -> None:
        self._target = target
        self._draft = draft
        self._prompts = {name: ids[:_PROMPT_TOKENS] for name, ids in prompts.items()}
        self.long_prompt = next(iter(prompts.values()))[:_LONG_PROMPT_TOKENS]
        self._needs_replays = needs_replays
        self.replayed: dict[tuple[float, bool], AsyncClient] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the processes."""
        async with AsyncExitStack() as running:
            stack = Stack(target=self._target, draft=self._draft, environment=NO_PREFIX_CACHE)
            await running.enter_async_context(stack)
            assert stack.draft is not None
            self.target_address, self.draft_address = stack.target.facts["address"], stack.draft.facts["address"]
            self.client = await running.enter_async_context(AsyncClient(stack.address, retries=NO_RETRIES))
            if self._needs_replays:
                texts = await self._texts()

                async def replay(acceptance: float, computes: bool) -> None:
                    self.replayed[acceptance, computes] = await running.enter_async_context(
                        replaying(stack, texts, acceptance=acceptance, computes=computes)
                    )

                await asyncio.gather(*(replay(rate, computes) for rate in (0.8, 0.6) for computes in (False, True)))
            yield

    async def _texts(self) -> dict[tuple[int, ...], Sequence[int]]:
        """Return the target's answers. Those of the prompts of `contest` are recorded alone, as they are repeated."""
        names = [*self._prompts]
        groups = [{name: self._prompts[name]} for name in names[_TURNS:]]
        alone = await record(
            self.client,
            {name: self._prompts[name] for name in names[:_TURNS]},
            max_tokens=_TOKENS,
            ignore_eos=True,
        )
        others = await asyncio.gather(
            *(record(self.client, group, max_tokens=_TOKENS, ignore_eos=True) for group in groups)
        )
        return {prompt: text for texts in (alone, *others) for prompt, text in texts.items()}

    async def contest(
        self, client: AsyncClient, ks: Sequence[int | None], rows: dict[str, Any], *, raw: Mapping[int, float]
    ) -> None:
        """Let the target alone, which comes first, and specd with these k take turns, and fill a row for each.

        `raw` are the milliseconds of a raw pass by width.
        """
        contenders = {k: Specd(client, Setup(SPECD, k), ignore_eos=True) for k in ks}
        prompts = [*self._prompts.items()]
        for k, contender in contenders.items():
            # The planner learns the acceptance from one whole session.
            await contender.decode("", 0, prompts[0][1], _TOKENS if k is None else 16)
        samples: dict[int | None, list[Sample]] = {k: [] for k in ks}
        for turn in range(_TURNS):
            for k, contender in contenders.items():
                name, ids = prompts[turn]
                samples[k].append(await contender.decode(name, turn, ids, _TOKENS))
                label = contender.setup.draft_label if k != 0 else "target alone"
                rows[label] = _row(contender.setup, samples[k], samples[ks[0]][: turn + 1], raw)
        for label, row in rows.items():
            print(f"    {label}: {_shown(row)}", flush=True)

    async def throughput(self, client: AsyncClient, k: int | None, sessions: int) -> float:
        """Return the tokens per second of all sessions together."""
        clients = SpecdClients(client, Setup(SPECD, k), ignore_eos=True)
        prompts = [*self._prompts.values()][:sessions]
        await clients.decode(prompts, sessions, 16)
        return (await clients.decode(prompts, sessions, _TOKENS)).tokens_per_second


def _row(setup: Setup, own: Sequence[Sample], baseline: Sequence[Sample], raw: Mapping[int, float]) -> dict[str, Any]:
    result = summarise(setup, own, baseline)
    row = {
        "speculates": setup.speculates,
        "tokens_per_second": result.tokens_per_second,
        "speedup": result.speedup,
        "acceptance_per_try": result.acceptance_per_try,
        "tokens_per_round": result.acceptance_length,
        "proposed_per_round": sum(s.proposed_tokens for s in own) / max(sum(len(s.rounds) for s in own), 1),
        "same_text": [s.token_ids for s in own] == [s.token_ids for s in baseline],
        "round_ms": result.round_milliseconds,
        "longest_verify_ms": 1000 * max(round_.verify_seconds for s in own for round_ in s.rounds),
    }
    if raw:
        tokens = sum(len(s.token_ids) - 1 for s in own)
        limit = 1000 * tokens / sum(interpolate(raw, 1 + round_.proposed) for s in own for round_ in s.rounds)
        row |= {"raw_limit_tokens_per_second": limit, "of_raw_limit": result.tokens_per_second / limit}
    return row


def _shown(row: Mapping[str, Any]) -> str:
    stages = ", ".join(f"{name} {value:.2f}" for name, value in row["round_ms"].items())
    limit = f", {row['of_raw_limit']:.2f} of the raw limit" if "of_raw_limit" in row else ""
    return (
        f"{row['tokens_per_second']:.1f} tokens/s, {row['speedup']:.2f} x target only{limit}, "
        f"{row['proposed_per_round']:.1f} proposed and {row['tokens_per_round']:.2f} tokens a round, "
        f"{'same' if row['same_text'] else 'ANOTHER'} text; ms: {stages}"
    )
