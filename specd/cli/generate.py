"""The command `specd generate`, and completions on the terminal."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import typer
from google.protobuf.json_format import MessageToJson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specd.cli.connection import Insecure, TlsCa, TlsCert, TlsKey, TlsName, Token, grpc_errors
from specd.draft_source import DraftSource
from specd.errors import StartupError
from specd.rpc.client import Client
from specd.rpc.credentials import PLAIN, ClientCredentials
from specd.rpc.messages import acceptance_message, draft_source_message
from specd.sampling import Acceptance
from specd.settings import MAX_NUM_DRAFT_TOKENS
from specd.v1 import generation_pb2, sampling_pb2

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

DEMO_SOURCE = """\
summarize: def read_records(path, delimiter=","):
    with open(path, newline="") as file:
        reader = csv.reader(file, delimiter=delimiter)
        header = next(reader)
        return [dict(zip(header, row)) for row in reader]
"""

_STYLES = {generation_pb2.TOKEN_SOURCE_DRAFT: "green", generation_pb2.TOKEN_SOURCE_LOOKUP: "cyan"}


def generate(
    prompt: Annotated[
        str, typer.Argument(help="Text to continue, or for T5 the source to answer; - reads standard input.")
    ],
    num_draft_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-draft-tokens",
            "-k",
            min=0,
            max=MAX_NUM_DRAFT_TOKENS,
            help="Draft tokens per round; 0: target alone. (default: the coordinator's setting)",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", "-n", min=1, max=2**32 - 1, help="Maximum number of tokens to generate."),
    ] = None,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy, else 0.01 to 100.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Sample from the k most likely tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the most likely tokens with this total probability.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Sample from tokens at least this likely, relative to the most likely one.")
    ] = 0.0,
    seed: Annotated[int | None, typer.Option(min=0, max=2**64 - 1, help="Makes sampling repeatable.")] = None,
    acceptance: Annotated[Acceptance, typer.Option(help="Acceptance rule for draft tokens.")] = Acceptance.COUPLED,
    lenience: Annotated[float, typer.Option(help="Added to the acceptance probability of rejection; not exact.")] = 0.0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; can be repeated.")] = None,
    answer_start: Annotated[
        str, typer.Option(metavar="TEXT", help="Of a model with an encoder: what the answer begins with.")
    ] = "",
    draft_source: Annotated[
        DraftSource, typer.Option(help="Who may propose tokens: the draft model, look-up, either, or nobody.")
    ] = DraftSource.AUTO,
    prediction: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="File with what is expected to come, such as one to be edited."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Treat the prompt as a chat message.")] = False,
    session: Annotated[str, typer.Option(metavar="ID", help="Continue this session.", show_default=False)] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON message per line.")] = False,
    address: Annotated[
        str, typer.Option(envvar="SPECD_ADDRESS", metavar="ADDRESS", help="Address of the coordinator.")
    ] = "127.0.0.1:50051",
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = "",
    token: Token = "",
    insecure: Insecure = False,
) -> None:
    """Stream a completion from a running coordinator."""
    credentials = ClientCredentials(tls_ca, tls_cert, tls_key, token, tls_name, insecure)
    text = _read_prompt(prompt)
    message = generation_pb2.ChatMessage(role="user", content=text)
    fields = {
        "max_tokens": max_tokens,
        "num_draft_tokens": num_draft_tokens,
        "session_id": session,
        "draft_source": draft_source_message(draft_source),
        **({"prediction_text": _read_prediction(prediction)} if prediction is not None else {}),
        **({"answer_text": answer_start} if answer_start else {}),
        "stop": generation_pb2.StopConditions(strings=stop or ()),
        "sampling": sampling_pb2.SamplingParameters(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            acceptance=acceptance_message(acceptance),
            lenience=lenience,
        ),
    }
    with grpc_errors(address, credentials):
        asyncio.run(
            show_completion(
                address,
                generation_pb2.Chat(messages=[message]) if chat else text,
                credentials=credentials,
                as_json=as_json,
                **fields,
            )
        )


def _read_prompt(argument: str) -> str:
    data = sys.stdin.buffer.read() if argument == "-" else os.fsencode(argument)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise StartupError(f"the prompt is not UTF-8 text: {error}") from error


def _read_prediction(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"cannot read the prediction {path}: {error}") from error


async def show_completion(
    address: str,
    prompt: str | generation_pb2.Chat,
    *,
    credentials: ClientCredentials = PLAIN,
    as_json: bool,
    **fields: Any,
) -> None:
    """Stream a completion to standard output, and a line of its statistics to standard error.

    `fields` are those of GenerateRequest.
    """
    async with Client(address, credentials) as client:
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
        is_source = (await client.model_info()).target.HasField("decoder_start_token_id")
        console.print(Text(prompt, style="dim"), end="\n" if is_source else "")
        speculative = [response async for response in _echo(console, client.generate(prompt, max_tokens=max_tokens))]
        console.print("\n")
        draft, lookup = _STYLES.values()
        console.print(
            Text.assemble("colour: ", ("the draft's", draft), ", ", ("looked up", lookup), ", the rest target's")
        )
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
        console.out(token.text, style=_STYLES.get(token.source), highlight=False, end="")


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
    if statistics.lookup_proposed_tokens:
        parts.append(f"{statistics.lookup_accepted_tokens} looked up")
    if judged := statistics.prediction_accepted_tokens + statistics.prediction_rejected_tokens:
        parts.append(f"prediction {statistics.prediction_accepted_tokens / judged:.0%} accepted")
    if statistics.draft_fault:
        parts.append(f"{statistics.rounds_without_draft} rounds without draft: {statistics.draft_fault}")
    return " · ".join(parts)


def _tokens_per_second(statistics: generation_pb2.SessionStatistics) -> float:
    return (statistics.generated_tokens - 1) / statistics.decode_seconds if statistics.decode_seconds else 0.0


def _acceptance_rate(statistics: generation_pb2.SessionStatistics) -> float:
    return statistics.accepted_tokens / statistics.proposed_tokens if statistics.proposed_tokens else 0.0
