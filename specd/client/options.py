"""What can be asked for besides the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from specd.client.schema import Schema
from specd.grammar import Grammar
from specd.sampling import Acceptance
from specd.vocabulary import DraftSource, DraftSourceName


class GenerationOptions(TypedDict, total=False):
    """Keyword arguments of `generate` and `chat`. generation.proto and sampling.proto explain them with their ranges.

    Left out, a field has the server's default: 256 tokens, chosen greedily, with k and source chosen each round.
    """

    # The target or one of its adapters, by its name in `models()`; "" is the model of the session, or else the target.
    model: str
    # Fail at once if a model is not loaded, which then begins to load. Otherwise events of Loading come first.
    refuse_unloaded: bool
    max_tokens: int | None
    cut_max_tokens: bool
    # How tokens are chosen. A temperature of 0 is greedy; a seed makes sampling repeatable.
    temperature: float
    top_k: int
    top_p: float | None
    min_p: float
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    penalty_context_size: int | None
    logit_bias: Mapping[int, float]
    seed: int | None
    acceptance: Acceptance | Literal["coupled", "rejection"]
    lenience: float
    # What ends the text, and from where on it may.
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    min_tokens: int
    ignore_eos: bool
    # The markers before and after the reasoning of a reply, in which stop strings do not count.
    reasoning: tuple[str, str] | None
    # The form of the text, behind the reasoning. With a JSON schema, `Completion.parsed` is the text's value.
    schema: Schema | None
    grammar: Grammar | None
    # Who proposes tokens, and what is expected to come. Neither changes the text.
    num_draft_tokens: int | None
    draft_source: DraftSource | DraftSourceName
    prediction: str | Sequence[int] | None
    # For a model with an encoder: what the answer begins with.
    answer_start: str | Sequence[int] | None
    # Return the log-probabilities of tokens, and of so many most likely ones.
    top_log_probabilities: int | None
    # Return the prompt's tokens, in the first Delta.
    echo: bool
    # The W3C trace that the generation is part of, and the token of its caller, for a client without one of its own.
    traceparent: str
    token: str
    # Time for all of it, retries included; after it, CallError with DEADLINE_EXCEEDED.
    timeout_seconds: float | None
