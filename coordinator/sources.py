"""Who may propose tokens for a request, and how many: the one place that decides it."""

from __future__ import annotations

from dataclasses import dataclass

from specd.errors import InvalidRequestError
from specd.settings import CoordinatorSettings
from specd.vocabulary import DraftSource, TokenSource

_ALL = (TokenSource.DRAFT, TokenSource.LOOKUP)
# The sources that a request may ask, by its `draft_source`.
_ASKED = {
    DraftSource.AUTO: _ALL,
    DraftSource.MODEL: (TokenSource.DRAFT,),
    DraftSource.LOOKUP: (TokenSource.LOOKUP,),
    DraftSource.NONE: (),
}


@dataclass(frozen=True)
class Sources:
    """The sources that may propose tokens, in the order of their tokens in a proposal.

    With `k`, the first of them proposes k tokens in each round; otherwise the planner chooses the numbers.
    """

    allowed: tuple[TokenSource, ...] = _ALL
    k: int | None = None

    @classmethod
    def of(
        cls, draft_source: DraftSource, num_draft_tokens: int | None, settings: CoordinatorSettings, *, predicts: bool
    ) -> Sources:
        """Return the sources of a request, which `predicts` if it has a prediction. Raises InvalidRequestError."""
        has = {TokenSource.DRAFT: bool(settings.draft), TokenSource.LOOKUP: settings.lookup}
        _check(draft_source, num_draft_tokens, has, predicts=predicts)
        k = settings.given_num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        allowed = tuple(source for source in _ASKED[draft_source] if has[source])
        if k == 0 or not allowed:
            return cls((), 0)
        return cls(allowed, None) if k is None else cls(allowed[:1], k)


def _check(draft_source: DraftSource, k: int | None, has: dict[TokenSource, bool], *, predicts: bool) -> None:
    """Raise InvalidRequestError if no source can propose tokens as the request wants it."""
    if draft_source is DraftSource.NONE and k:
        raise InvalidRequestError(
            "CONTRADICTION",
            f"draft_source is NONE, but num_draft_tokens is {k}, which nothing proposes: leave one of them out",
        )
    asked = _ASKED[draft_source]
    if asked and draft_source is not DraftSource.AUTO and not has[asked[0]]:
        missing = "draft model (--draft)" if draft_source is DraftSource.MODEL else "look-up (--lookup)"
        raise InvalidRequestError(
            "CONTRADICTION", f"draft_source is {draft_source.name}, but this coordinator has no {missing}: leave it out"
        )
    if predicts and (TokenSource.LOOKUP not in asked or k == 0 or not has[TokenSource.LOOKUP]):
        why = "num_draft_tokens is 0" if k == 0 else f"draft_source is {draft_source.name}"
        why = why if has[TokenSource.LOOKUP] else "this coordinator has no look-up (--lookup)"
        raise InvalidRequestError(
            "CONTRADICTION", f"the request has a prediction, which only look-up reads, but {why}: leave one out"
        )
