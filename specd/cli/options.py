"""Options of commands that generate."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, cast, get_type_hints

import typer

from specd.client.options import GenerationOptions
from specd.errors import InvalidRequestError
from specd.sampling import Acceptance, Sampling
from specd.setting_types import MAX_NUM_DRAFT_TOKENS
from specd.startup_error import StartupError
from specd.vocabulary import DraftSource


@dataclass(frozen=True)
class RequestOptions:
    """The options of a request that `generate` and `chat` have, by their names in GenerationOptions."""

    model: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="The model, or an adapter of one. (default: the target, or the first one of several)",
            show_default=False,
        ),
    ] = ""
    num_draft_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-draft-tokens",
            "-k",
            min=0,
            max=MAX_NUM_DRAFT_TOKENS,
            help="Draft tokens per round; 0 decodes with the target alone. (default: the coordinator's setting)",
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", "-n", min=1, max=2**32 - 1, help="Maximum number of tokens to generate."),
    ] = None
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 (greedy) or 0.01 to 100.")] = 0.0
    top_k: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Sample from the k most likely tokens; 0 for all.")
    ] = 0
    top_p: Annotated[float, typer.Option(help="Sample from the most likely tokens with this total probability.")] = 1.0
    min_p: Annotated[
        float, typer.Option(help="Sample from tokens with this share of the largest probability or more.")
    ] = 0.0
    seed: Annotated[int | None, typer.Option(min=0, max=2**64 - 1, help="Seed that makes sampling repeatable.")] = None
    acceptance: Annotated[Acceptance, typer.Option(help="Acceptance rule for draft tokens.")] = Acceptance.COUPLED
    lenience: Annotated[
        float, typer.Option(help="Added to the acceptance probability of rejection, which is then not exact.")
    ] = 0.0
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; can be repeated.")] = None
    draft_source: Annotated[DraftSource, typer.Option(help="Who may propose tokens; auto: every source.")] = (
        DraftSource.AUTO
    )

    def checked(self) -> GenerationOptions:
        """Return the options for a client. Raises StartupError if no coordinator would accept the sampling."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        check_sampling(Sampling(**{each.name: given[each.name] for each in fields(Sampling) if each.name in given}))
        return cast(GenerationOptions, given)


def with_request_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command all options of RequestOptions, where it has one parameter, `options`."""
    hints = get_type_hints(RequestOptions, include_extras=True)
    shared = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=hints[each.name])
        for each in fields(RequestOptions)
    ]

    def run(**given: Any) -> None:
        options = RequestOptions(**{each.name: given.pop(each.name) for each in shared})
        command(options=options, **given)

    parameters: list[inspect.Parameter] = []
    for each in inspect.signature(command, eval_str=True).parameters.values():
        parameters += shared if each.name == "options" else [each.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def check_sampling(sampling: Sampling) -> None:
    """Raise StartupError if no coordinator would take the sampling of a generation."""
    try:
        sampling.check(vocabulary_size=1, model_name="")
    except InvalidRequestError as error:
        raise StartupError(str(error)) from error
