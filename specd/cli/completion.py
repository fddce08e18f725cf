"""Completions on the terminal: tokens by their source, and numbers."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from specd.client.events import CompletionToken, Retrying
from specd.client.statistics import GenerationStatistics
from specd.vocabulary import PROPOSERS, TokenSource

SOURCE_STYLES: dict[TokenSource, str] = dict(
    zip(PROPOSERS, ("green", "cyan", "magenta", "yellow", "blue"), strict=False)
)
LEGEND = Text("colour: ") + Text(", ").join(Text(source.label, style) for source, style in SOURCE_STYLES.items())
LEGEND.append("; the rest is the target's")


def print_tokens(console: Console, tokens: Sequence[CompletionToken]) -> None:
    """Print tokens in the colours of their sources."""
    for token in tokens:  # with `out`, since `print` would turn tabs into spaces
        console.out(token.text, style=SOURCE_STYLES.get(token.source), highlight=False, end="")


def print_retrying(console: Console, retrying: Retrying) -> None:
    """Print a line about a generation that waits for its next attempt."""
    console.print(f"\n{retrying.error}; trying again in {retrying.after_seconds:.1f} s", style="yellow", markup=False)


def summary(statistics: GenerationStatistics) -> str:
    """Return the numbers of a generation in a line."""
    parts = [
        counted(statistics.generated_tokens, "token"),
        f"first after {statistics.time_to_first_token_seconds * 1000:.0f} ms",
        counted(statistics.rounds, "round"),
    ]
    if statistics.generated_tokens > 1:  # the speed is that of the tokens after the first
        parts.insert(1, f"{statistics.tokens_per_second:.1f} tokens/s")
    if statistics.proposed_tokens:
        parts.append(f"acceptance rate {statistics.acceptance_rate:.1%}")
        parts.append(f"mean acceptance length {statistics.round_averages.tokens:.2f}")
        parts += [f"{counts.accepted} by {source.label}" for source, counts in statistics.sources.items()]
    if statistics.near_ties and statistics.smallest_margin is not None:
        parts.append(
            f"{counted(statistics.near_ties, 'near tie')} (smallest margin {statistics.smallest_margin:.2g}, "
            f"token {statistics.smallest_margin_position})"
        )
    if statistics.draft_fault:
        parts.append(f"{counted(statistics.rounds_without_draft, 'round')} without draft: {statistics.draft_fault}")
    if statistics.num_resumptions:
        parts.append(f"resumed {counted(statistics.num_resumptions, 'time')}")
    return " · ".join(parts)


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, which is plural unless it is one."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
