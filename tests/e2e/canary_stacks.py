"""A coordinator with a draft on trial, on real processes, and the load that decides the trial."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specd.supervisor import Stack
from specd.v1.generation_pb2 import StopConditions
from specd.v1.sampling_pb2 import SamplingParameters
from tests.e2e.completions import Completion, complete
from tests.e2e.processes import RunningSpecd, read_metrics, start_specd
from tests.raw_client import RawClient

MAX_TOKENS = 40
UNDECIDED, KEPT, TAKEN_BACK = "undecided", "kept", "taken back"


@dataclass
class CanaryStack:
    """A coordinator, its client, and the completions that it gave."""

    coordinator: RunningSpecd
    client: RawClient
    facts: dict[str, str]
    prompts: Sequence[str]
    completions: list[tuple[int, Completion]] = field(default_factory=list)  # by number of prompt and temperature

    def read(self) -> dict[str, Any]:
        """Return the metrics of the trial: the state, its rounds, and sessions by the draft that they began with."""
        found = {sample.name + "".join(sample.labels.values()): sample.value for sample in read_metrics(self)}  # type: ignore[arg-type]
        state = next((each for each in (UNDECIDED, KEPT, TAKEN_BACK) if found.get(f"specd_canary_state{each}")), "")
        return {
            "state": state,
            "rounds": found["specd_canary_rounds"],
            "present": found["specd_sessions_by_draft_totalpresent"],
            "canary": found["specd_sessions_by_draft_totalcanary"],
        }

    @property
    def state(self) -> str:
        """The state of the trial; "" without any."""
        return str(self.read()["state"])

    async def ask(self, number: int, **fields: Any) -> Completion:
        """Complete a prompt; every other one is sampled."""
        sampling = SamplingParameters(temperature=0.0 if number % 2 else 0.6, seed=number)
        stop = StopConditions(ignore_eos=True)
        options = {"max_tokens": MAX_TOKENS, "sampling": sampling, "stop": stop, **fields}
        completion = await complete(self.client, self.prompts[number % len(self.prompts)], **options)
        if not fields:
            self.completions.append((number, completion))
        return completion

    async def run(self, numbers: Sequence[int], *, at_once: int = 1) -> None:
        """Complete prompts, some of them at the same time."""
        for i in range(0, len(numbers), at_once):
            await asyncio.gather(*map(self.ask, numbers[i : i + at_once]))

    async def run_until_decided(self, *, greedily: bool = False) -> None:
        """Complete prompts until the trial is decided, which takes 200 rounds of the canary at most."""
        number = 0
        while self.state == UNDECIDED:
            assert number < 800, self.read()
            await self.run((number + 1, number + 3) if greedily else (number, number + 1))
            number += 4 if greedily else 2

    async def check_texts(self) -> None:
        """Compare each text with the target's own."""
        own: dict[int, list[int]] = {}
        for number, completion in self.completions:
            if number not in own:
                own[number] = (await self.ask(number, num_draft_tokens=0)).token_ids
            assert completion.token_ids == own[number], number


@contextlib.asynccontextmanager
async def canary_stack(
    stack: Stack, directory: Path, prompts: Sequence[str], *, draft: str, canary: str, share: float = 0.5
) -> AsyncIterator[CanaryStack]:
    """Run a coordinator at a stack's target, with the draft workers at these addresses."""
    own = f"unix:{directory}/coordinator"
    options = ["--target", stack.target.facts["address"], "--draft", draft, "--canary-draft", canary]
    options += ["--canary-share", str(share), "--listen", own, "--metrics-listen", "127.0.0.1:0", "--no-lookup"]
    options += ["--draft-timeout-seconds", "60"]
    places = {"XDG_CACHE_HOME": str(directory / "cache")}  # what the planner learns here stays here
    async with start_specd("coordinator", *options, **places) as coordinator, RawClient(own) as client:
        facts = await coordinator.next_event("ready")
        yield CanaryStack(coordinator, client, facts, prompts)
