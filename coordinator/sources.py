"""The sources that may propose tokens for a request, and their numbers of tokens: the one place that decides it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specd.coordinator_settings import CoordinatorSettings
from specd.errors import InvalidRequestError
from specd.vocabulary import PROPOSERS, DraftSource, TokenSource


def available_sources(settings: CoordinatorSettings, *, target_drafts: bool) -> tuple[TokenSource, ...]:
    """Return the sources that a coordinator has: all but those that its settings turn off, and but FORCED.

    Forced tokens belong to a request with a grammar (`Sources.of`). A new source needs its setting here.
    `target_drafts` is whether the target worker proposes tokens, which it does instead of a draft worker.
    """
    has = {
        TokenSource.DRAFT: bool(settings.draft) or target_drafts,
        TokenSource.LOOKUP: settings.lookup,
        TokenSource.PREDICTION: settings.lookup,
    }
    return tuple(source for source in PROPOSERS if has.get(source))


@dataclass(frozen=True)
class Sources:
    """The sources that may propose tokens. `Generation._open` makes them, in the order of their tokens in a proposal.

    With `k`, a round has k draft tokens: the draft model's, or those of the other sources where it may not propose.
    Otherwise the planner chooses the numbers.
    """

    allowed: tuple[TokenSource, ...] = PROPOSERS
    k: int | None = None

    @classmethod
    def of(
        cls,
        draft_source: DraftSource,
        num_draft_tokens: int | None,
        available: Sequence[TokenSource],
        *,
        default_k: int | None,
        predicts: bool,
        forces: bool = False,
    ) -> Sources:
        """Return the sources of a request, which `predicts` if it has a prediction, and `forces` if it has a grammar.

        Raises InvalidRequestError.
        """
        k = default_k if num_draft_tokens is None else num_draft_tokens
        available = (*available, TokenSource.FORCED) if forces else available
        allowed = tuple(source for source in draft_source.sources if source in available)
        _check(draft_source, num_draft_tokens, allowed, predicts=predicts)
        if k == 0 or not allowed:
            return cls((), 0)
        if k is not None and TokenSource.DRAFT in allowed:
            return cls((TokenSource.DRAFT,), k)
        return cls(allowed, k)


def _check(draft_source: DraftSource, k: int | None, allowed: tuple[TokenSource, ...], *, predicts: bool) -> None:
    """Raise InvalidRequestError if no source can propose tokens as the request wants it."""
    if draft_source is DraftSource.NONE and k:
        raise InvalidRequestError(
            "CONTRADICTION",
            f"draft_source is NONE, but num_draft_tokens is {k}, which nothing proposes: leave one of them out",
        )
    asked = draft_source.sources
    if asked and draft_source is not DraftSource.AUTO and asked[0] not in allowed:
        raise InvalidRequestError(
            "CONTRADICTION",
            f"draft_source is {draft_source.name}, but this coordinator has no {asked[0].label}: leave it out",
        )
    if predicts and (TokenSource.PREDICTION not in allowed or k == 0):
        why = "num_draft_tokens is 0" if k == 0 else f"draft_source is {draft_source.name}"
        if TokenSource.PREDICTION in asked and k != 0:
            why = f"this coordinator has no {TokenSource.LOOKUP.label}"
        raise InvalidRequestError(
            "CONTRADICTION", f"the request has a prediction, which no source would read, because {why}: leave one out"
        )
