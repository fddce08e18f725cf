"""What a request took, in the words of OpenAI and of llama.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specd.client import GenerationStatistics
from specd.vocabulary import SourceCounts, TokenSource


def usage_of(
    statistics: Sequence[GenerationStatistics],
    *,
    has_prediction: bool = False,
    reasoning_tokens: int = 0,
    prompts: int = 1,
) -> dict[str, Any]:
    """Return the `usage` of generations; those of one prompt follow one another, and count it once."""
    firsts = statistics[:: max(len(statistics) // prompts, 1)]
    prompt_tokens = sum(each.prompt_tokens for each in firsts)
    completion_tokens = sum(each.generated_tokens for each in statistics)
    details: dict[str, int] = {"reasoning_tokens": reasoning_tokens}
    if has_prediction:  # clients are billed by them, so they never count what the draft proposed
        predicted = [each.sources.get(TokenSource.PREDICTION, SourceCounts()) for each in statistics]
        details["accepted_prediction_tokens"] = sum(counts.accepted for counts in predicted)
        details["rejected_prediction_tokens"] = sum(counts.proposed - counts.accepted for counts in predicted)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(each.target_reused_tokens for each in firsts)},
        "completion_tokens_details": details,
    }


def timings_of(statistics: Sequence[GenerationStatistics]) -> dict[str, Any]:
    """Return the `timings` of generations that ran beside one another, with llama.cpp's names; milliseconds."""
    prompt_tokens = sum(each.prompt_tokens for each in statistics)
    cached = sum(each.target_reused_tokens for each in statistics)
    generated = sum(each.generated_tokens for each in statistics)
    prompt_ms = max(each.time_to_first_token_seconds for each in statistics) * 1e3
    predicted_ms = max(each.decode_seconds for each in statistics) * 1e3
    # The first token of each comes with the prompt.
    decoded = generated - len(statistics)
    return {
        "cache_n": cached,
        "prompt_n": prompt_tokens - cached,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / max(prompt_tokens - cached, 1),
        "prompt_per_second": 1e3 * (prompt_tokens - cached) / prompt_ms if prompt_ms else 0.0,
        "predicted_n": generated,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / max(decoded, 1),
        "predicted_per_second": 1e3 * decoded / predicted_ms if predicted_ms else 0.0,
        "draft_n": sum(each.proposed_tokens for each in statistics),
        "draft_n_accepted": sum(each.accepted_tokens for each in statistics),
        "rounds": sum(each.rounds for each in statistics),
        "speedup": statistics[0].speedup if len(statistics) == 1 else 0.0,
        "near_ties": sum(each.near_ties for each in statistics),
        **_smallest_margin(statistics),
    }


def _smallest_margin(statistics: Sequence[GenerationStatistics]) -> dict[str, Any]:
    """Return the smallest margin of a token, and its position if there is one generation; None without a margin."""
    margins = [each.smallest_margin for each in statistics if each.smallest_margin is not None]
    return {
        "smallest_margin": min(margins, default=None),
        "smallest_margin_position": statistics[0].smallest_margin_position if len(statistics) == 1 else None,
    }
