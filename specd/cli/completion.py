"""Completions on the terminal: tokens by their source, and numbers."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from specd.client.events import CompletionToken, Retrying
from specd.client.statistics import GenerationStatistics
from specd.draft_source import TokenSource

_STYLES = {TokenSource.DRAFT: "green", TokenSource.LOOKUP: "cyan"}
LEGEND = Text.assemble("colour: ", ("the draft's", "green"), ", ", ("looked up", "cyan"), ", the rest target's")


def print_tokens(console: Console, tokens: Sequence[CompletionToken]) -> None:
    """Print tokens in the colours of their sources."""
    for token in tokens:  # with `out`, since `print` would turn tabs into spaces
        console.out(token.text, style=_STYLES.get(token.source), highlight=False, end="")


def print_retrying(console: Console, retrying: Retrying) -> None:
    """Say in a line that a generation waits."""
    console.print(f"\n{retrying.error}; trying again in {retrying.after_seconds:.1f} s", style="yellow", markup=False)


def summary(statistics: GenerationStatistics) -> str:
    """Return the numbers of a generation in a line."""
    parts = [
        f"{statistics.generated_tokens} tokens",
        f"{statistics.tokens_per_second:.1f} tokens/s",
        f"first after {statistics.time_to_first_token_seconds * 1000:.0f} ms",
        f"{statistics.rounds} rounds",
    ]
    if statistics.proposed_tokens:
        parts.append(f"acceptance rate {statistics.acceptance_rate:.1%}")
        parts.append(f"mean acceptance length {statistics.round_averages.tokens:.2f}")
    if statistics.lookup_proposed_tokens:
        parts.append(f"{statistics.lookup_accepted_tokens} looked up")
    if judged := statistics.prediction_accepted_tokens + statistics.prediction_rejected_tokens:
        parts.append(f"prediction {statistics.prediction_accepted_tokens / judged:.0%} accepted")
    if statistics.draft_fault:
        parts.append(f"{statistics.rounds_without_draft} rounds without draft: {statistics.draft_fault}")
    if statistics.num_resumptions:
        parts.append(f"resumed {statistics.num_resumptions} times")
    return " · ".join(parts)
