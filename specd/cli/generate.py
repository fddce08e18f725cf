"""Completions on the terminal."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from google.protobuf.json_format import MessageToJson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specd.client import Client
from specd.v1 import generation_pb2

DEMO_PROMPT = '''\
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Vector:
    """A vector in the plane."""

    x: float
    y: float

    def __add__(self, other):
        return Vector(self.x + other.x, self.y + other.y)

    def __sub__(self, other):'''

_DRAFTED_STYLE = "green"


async def show_completion(address: str, prompt: str | generation_pb2.Chat, *, as_json: bool, **fields: Any) -> None:
    """Stream a completion to standard output, and a line of its statistics to standard error.

    `fields` are those of GenerateRequest.
    """
    async with Client(address) as client:
        responses = client.generate(prompt, **fields)
        if as_json:
            async for response in responses:
                print(MessageToJson(response, indent=None, preserving_proto_field_name=True), flush=True)  # noqa: T201
            return
        last = generation_pb2.GenerateResponse()
        console = Console(highlight=False, soft_wrap=True)
        async for last in responses:
            _print_tokens(console, last)
        console.print()
        sampled = [f"seed {last.seed}"] if fields["sampling"].temperature else []
        summary = " · ".join([_summary(last.statistics), *sampled, f"session {last.session_id}"])
        Console(stderr=True, style="dim", highlight=False, soft_wrap=True).print(summary)


async def show_comparison(address: str, prompt: str, *, max_tokens: int = 200) -> None:
    """Stream a completion, generate it again with the target alone, and print the numbers of both."""
    console = Console(highlight=False, soft_wrap=True)
    async with Client(address) as client:
        console.print(Text(prompt, style="dim"), end="")
        speculative = [response async for response in _echo(console, client.generate(prompt, max_tokens=max_tokens))]
        console.print("\n")
        console.print(Text.assemble("colour: ", ("proposed by the draft", _DRAFTED_STYLE), ", the rest by the target"))
        console.print("the same again with the target alone …", style="dim")
        alone = [r async for r in client.generate(prompt, max_tokens=max_tokens, num_draft_tokens=0)]

    fast, slow = speculative[-1].statistics, alone[-1].statistics
    table = Table("", "speculative", "target alone", box=None, pad_edge=False, header_style="bold")
    table.add_row("tokens/s", f"{_tokens_per_second(fast):.1f}", f"{_tokens_per_second(slow):.1f}")
    table.add_row("generated tokens", str(fast.generated_tokens), str(slow.generated_tokens))
    table.add_row("rounds", str(fast.rounds), str(slow.rounds))
    table.add_row("acceptance rate", f"{_acceptance_rate(fast):.1%}", "")
    table.add_row("mean acceptance length", f"{fast.round_averages.tokens:.2f}", f"{slow.round_averages.tokens:.2f}")
    table.add_row(
        "time to first token",
        f"{fast.time_to_first_token_seconds * 1000:.0f} ms",
        f"{slow.time_to_first_token_seconds * 1000:.0f} ms",
    )
    console.print(table)
    same = [t.id for r in speculative for t in r.tokens] == [t.id for r in alone for t in r.tokens]
    speedup = _tokens_per_second(fast) / _tokens_per_second(slow)
    console.print(f"[bold]{speedup:.2f} times as fast[/], {'the same' if same else '[red]NOT the same[/]'} tokens")


async def _echo(
    console: Console, responses: AsyncIterator[generation_pb2.GenerateResponse]
) -> AsyncIterator[generation_pb2.GenerateResponse]:
    async for response in responses:
        _print_tokens(console, response)
        yield response


def _print_tokens(console: Console, response: generation_pb2.GenerateResponse) -> None:
    for token in response.tokens:  # with `out`, since `print` would turn tabs into spaces
        console.out(token.text, style=_DRAFTED_STYLE if token.drafted else None, highlight=False, end="")


def _summary(statistics: generation_pb2.SessionStatistics) -> str:
    parts = [
        f"{statistics.generated_tokens} tokens",
        f"{_tokens_per_second(statistics):.1f} tokens/s",
        f"first after {statistics.time_to_first_token_seconds * 1000:.0f} ms",
        f"{statistics.rounds} rounds",
    ]
    if statistics.proposed_tokens:
        parts.append(f"acceptance rate {_acceptance_rate(statistics):.1%}")
        parts.append(f"mean acceptance length {statistics.round_averages.tokens:.2f}")
    if statistics.draft_fault:
        parts.append(f"{statistics.rounds_without_draft} rounds without draft: {statistics.draft_fault}")
    return " · ".join(parts)


def _tokens_per_second(statistics: generation_pb2.SessionStatistics) -> float:
    return (statistics.generated_tokens - 1) / statistics.decode_seconds if statistics.decode_seconds else 0.0


def _acceptance_rate(statistics: generation_pb2.SessionStatistics) -> float:
    return statistics.accepted_tokens / statistics.proposed_tokens if statistics.proposed_tokens else 0.0
