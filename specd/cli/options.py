"""Options of commands that generate."""

from __future__ import annotations

from typing import Annotated

import typer

from specd.errors import InvalidRequestError
from specd.sampling import Acceptance, Sampling
from specd.settings import MAX_NUM_DRAFT_TOKENS
from specd.startup_error import StartupError
from specd.vocabulary import DraftSource

Address = Annotated[str, typer.Option(envvar="SPECD_ADDRESS", metavar="ADDRESS", help="Address of the coordinator.")]
NumDraftTokens = Annotated[
    int | None,
    typer.Option(
        "--num-draft-tokens",
        "-k",
        min=0,
        max=MAX_NUM_DRAFT_TOKENS,
        help="Draft tokens per round; 0: target alone. (default: the coordinator's setting)",
    ),
]
MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", "-n", min=1, max=2**32 - 1, help="Maximum number of tokens to generate.")
]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy, else 0.01 to 100.")]
TopK = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Sample from the k most likely tokens; 0: all.")]
TopP = Annotated[float, typer.Option(help="Sample from the most likely tokens with this total probability.")]
MinP = Annotated[float, typer.Option(help="Sample from tokens at least this likely, relative to the most likely one.")]
Seed = Annotated[int | None, typer.Option(min=0, max=2**64 - 1, help="Makes sampling repeatable.")]
AcceptanceRule = Annotated[Acceptance, typer.Option("--acceptance", help="Acceptance rule for draft tokens.")]
Lenience = Annotated[float, typer.Option(help="Added to the acceptance probability of rejection; not exact.")]
Stop = Annotated[list[str] | None, typer.Option(help="Stop before this text; can be repeated.")]
Source = Annotated[
    DraftSource,
    typer.Option("--draft-source", help="Who may propose tokens: the draft model, look-up, either, or nobody."),
]


def check_sampling(sampling: Sampling) -> None:
    """Raise StartupError if no coordinator would take the sampling of a generation."""
    try:
        sampling.check(vocabulary_size=1, model_name="")
    except InvalidRequestError as error:
        raise StartupError(str(error)) from error
