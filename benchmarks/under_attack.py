"""A well-behaved client while others attack: its seconds a token, and the memory of the processes.

    python -m benchmarks.under_attack [--seconds 6] [--rounds 2] [--attacks rapid_reset ping_flood ...]
                                      [--attackers another same nobody] [--json FILE]

Clients have tokens. The calls of an attack carry the token of another client, that of the well-behaved client itself,
or none: `--attackers`.

Undisturbed and attacked periods take turns, so that both see the same machine. Attackers are processes of their own, at
a lower priority and a fixed rate, because they share the cores with their victim. Token times are those of a round by
its tokens, as a client sees them, over all rounds of a period.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles

from rich.table import Table

from specd.bench.environment import console, environment, new_table
from specd.client import NO_RETRIES, AsyncClient
from specd.errors import SpecdError
from specd.rpc.credentials import ClientCredentials
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from tests.e2e.guarded import make_tokens
from tests.e2e.processes import resident_mib
from tests.security.attacks import attacking

UNDISTURBED = "undisturbed"
# Whose token the calls of an attack carry.
ATTACKERS = ("another", "same", "nobody")
# Operations a second and connections of each attack. A rate is what leaves the machine some time for the rest.
ATTACKS = {
    "rapid_reset": (5000, 20),
    "continuation_flood": (4000, 8),
    "hpack_bomb": (20, 8),
    "large_metadata": (50, 8),
    "ping_flood": (20_000, 8),
    "settings_flood": (20_000, 8),
    "priority_flood": (20_000, 8),
    "empty_data_flood": (20_000, 8),
    "idle_streams": (2000, 4),
    "idle_connections": (200, 4),
    "zero_window_generate": (40, 2),
    "one_byte_generate": (40, 2),
    "zero_window_verify": (40, 2),
}


@dataclass
class Period:
    """A client's times under one attack, over all turns."""

    seconds_per_token: list[float] = field(default_factory=list)
    seconds_to_first_token: list[float] = field(default_factory=list)
    most_mib: list[float] = field(default_factory=list)  # of coordinator, draft worker and target worker
    num_failed: int = 0


@dataclass(frozen=True)
class Result:
    """The numbers of one attack; ratios are to the undisturbed client."""

    num_tokens: int
    p50_milliseconds: float
    p99_milliseconds: float
    p99_ratio: float
    first_token_milliseconds: float
    failed_requests: int
    most_mib: list[float]


async def observe(stack: Stack, client: AsyncClient, seconds: float, period: Period) -> None:
    """Generate for some seconds, request after request."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        last = time.monotonic()
        is_first = True
        try:
            async with asyncio.timeout(60):
                stream = client.generate("class Stack:\n    def", max_tokens=48, ignore_eos=True)
                async for response in stream.messages():
                    now = time.monotonic()
                    if is_first:
                        period.seconds_to_first_token.append(now - last)
                    elif response.tokens:
                        period.seconds_per_token += [(now - last) / len(response.tokens)] * len(response.tokens)
                    last, is_first = now, False
        except (SpecdError, TimeoutError):
            period.num_failed += 1
            await asyncio.sleep(0.1)
        memory = [resident_mib(child.pid) for child in stack.children]
        period.most_mib = [max(pair) for pair in zip(memory, period.most_mib or memory, strict=True)]


async def measure(options: argparse.Namespace) -> dict[str, Period]:
    """Take turns between no attack and each of them."""
    attacks = [(name, attacker) for name in options.attacks for attacker in options.attackers]
    periods = {UNDISTURBED: Period()} | {title(*attack): Period() for attack in attacks}
    async with AsyncExitStack() as running:
        tokens = Path(running.enter_context(tempfile.TemporaryDirectory())) / "tokens"
        own_text, other_text = make_tokens(tokens, "own", "other")
        texts = {"another": other_text, "same": own_text, "nobody": ""}
        settings = {"SPECD_LOG_LEVEL": "error", "SPECD_COORDINATOR_TOKENS": str(tokens)}
        stack = await running.enter_async_context(
            Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, environment=settings)
        )
        client = await running.enter_async_context(
            AsyncClient(stack.address, credentials=ClientCredentials(token=own_text), retries=NO_RETRIES)
        )
        await observe(stack, client, 3, Period())
        for _ in range(options.rounds):
            for name, attacker in attacks:
                await observe(stack, client, options.seconds, periods[UNDISTURBED])
                rate, connections = ATTACKS[name]
                address = stack.target.facts["address"] if name.endswith("verify") else stack.address
                period = periods[title(name, attacker)]
                async with attacking(
                    name, address, connections=connections, rate=rate, seconds=600, token=texts[attacker]
                ):
                    await observe(stack, client, options.seconds, period)
                console().print(title(name, attacker), len(period.seconds_per_token), "tokens")
                await asyncio.sleep(1)
    return periods


def title(name: str, attacker: str) -> str:
    """Return how results name an attack."""
    return f"{name} as {attacker}"


def summarise(periods: dict[str, Period]) -> dict[str, Result]:
    """Return the numbers of each attack."""
    p99 = {name: percentile(period.seconds_per_token, 99) for name, period in periods.items()}
    return {
        name: Result(
            num_tokens=len(period.seconds_per_token),
            p50_milliseconds=percentile(period.seconds_per_token, 50) * 1e3,
            p99_milliseconds=p99[name] * 1e3,
            p99_ratio=p99[name] / p99[UNDISTURBED],
            first_token_milliseconds=median(period.seconds_to_first_token or [float("nan")]) * 1e3,
            failed_requests=period.num_failed,
            most_mib=period.most_mib,
        )
        for name, period in periods.items()
    }


def percentile(values: list[float], percent: int) -> float:
    """Return a percentile, or NaN of too few values."""
    return quantiles(values, n=100)[percent - 1] if len(values) > 1 else float("nan")


def table_of(results: dict[str, Result]) -> Table:
    """Return the results as a table."""
    table = new_table("attack", ("tokens", "p50 ms", "p99 ms", "ratio", "first token ms", "failed", "MiB"))
    for name, result in results.items():
        table.add_row(
            name,
            str(result.num_tokens),
            f"{result.p50_milliseconds:.1f}",
            f"{result.p99_milliseconds:.1f}",
            f"{result.p99_ratio:.2f}",
            f"{result.first_token_milliseconds:.0f}",
            str(result.failed_requests),
            " / ".join(f"{mib:.0f}" for mib in result.most_mib),
        )
    return table


def main() -> None:
    """Measure from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6, help="Length of each period. (default: 6)")
    parser.add_argument("--rounds", type=int, default=2, help="Turns of each attack. (default: 2)")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--attackers", nargs="+", choices=ATTACKERS, default=["another"], help="Whose token.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = summarise(asyncio.run(measure(options)))
    console().print(table_of(results))
    if options.json:
        attacks = {name: {"rate": rate, "connections": count} for name, (rate, count) in ATTACKS.items()}
        content = {
            "environment": environment(),
            "seconds": options.seconds,
            "rounds": options.rounds,
            "attacks": attacks,
            "results": {name: asdict(result) for name, result in results.items()},
        }
        options.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
