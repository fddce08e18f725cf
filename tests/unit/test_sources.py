"""The sources that may propose tokens for a request, and their numbers of tokens."""

from __future__ import annotations

import itertools

import pytest

from coordinator.sources import Sources, available_sources
from specd.coordinator_settings import CoordinatorSettings
from specd.errors import InvalidRequestError
from specd.vocabulary import DraftSource, TokenSource

DRAFT, LOOKUP, PREDICTION = TokenSource.DRAFT, TokenSource.LOOKUP, TokenSource.PREDICTION
AUTO, MODEL, LOOK_UP, NONE = DraftSource


def settings(*, draft: str = "127.0.0.1:1", lookup: bool = True, k: str = "auto") -> CoordinatorSettings:
    return CoordinatorSettings.model_validate({"draft": draft, "lookup": lookup, "num_draft_tokens": k})


def sources(
    draft_source: DraftSource = AUTO,
    k: int | None = None,
    given: CoordinatorSettings | None = None,
    *,
    predicts: bool = False,
) -> Sources:
    own = given or settings()
    available = available_sources(own, target_drafts=False)
    return Sources.of(draft_source, k, available, default_k=own.given_num_draft_tokens, predicts=predicts)


@pytest.mark.parametrize(
    ("draft_source", "k", "given", "expected"),
    [
        (AUTO, None, settings(), Sources((DRAFT, LOOKUP, PREDICTION), None)),
        (AUTO, None, settings(draft="none"), Sources((LOOKUP, PREDICTION), None)),
        (AUTO, None, settings(lookup=False), Sources((DRAFT,), None)),
        (MODEL, None, settings(), Sources((DRAFT,), None)),
        (LOOK_UP, None, settings(), Sources((LOOKUP, PREDICTION), None)),
        # A given k is the draft model's, or look-up's where the model is not asked.
        (AUTO, 4, settings(), Sources((DRAFT,), 4)),
        (AUTO, 4, settings(draft="none"), Sources((LOOKUP, PREDICTION), 4)),
        (LOOK_UP, 4, settings(), Sources((LOOKUP, PREDICTION), 4)),
        (AUTO, None, settings(k="3"), Sources((DRAFT,), 3)),
        (AUTO, 5, settings(k="3"), Sources((DRAFT,), 5)),
        # No source proposes.
        (NONE, None, settings(), Sources((), 0)),
        (NONE, None, settings(k="3"), Sources((), 0)),
        (NONE, 0, settings(), Sources((), 0)),
        (AUTO, 0, settings(), Sources((), 0)),
        (MODEL, 0, settings(), Sources((), 0)),
        (AUTO, None, settings(k="0"), Sources((), 0)),
        (AUTO, 4, settings(draft="none", lookup=False), Sources((), 0)),
    ],
)
def test_request_and_settings_decide(
    draft_source: DraftSource, k: int | None, given: CoordinatorSettings, expected: Sources
) -> None:
    assert sources(draft_source, k, given) == expected


@pytest.mark.parametrize(
    ("draft_source", "k", "given", "predicts", "said"),
    [
        (NONE, 1, settings(), False, "draft_source is NONE, but num_draft_tokens is 1"),
        (NONE, 4, settings(), False, "draft_source is NONE, but num_draft_tokens is 4"),
        (MODEL, None, settings(draft="none"), False, "has no draft model"),
        (LOOK_UP, None, settings(lookup=False), False, "has no look-up"),
        (AUTO, 0, settings(), True, "num_draft_tokens is 0"),
        (MODEL, None, settings(), True, "draft_source is MODEL"),
        (NONE, None, settings(), True, "draft_source is NONE"),
        (AUTO, None, settings(lookup=False), True, "has no look-up"),
    ],
)
def test_contradictions_are_refused(
    draft_source: DraftSource, k: int | None, given: CoordinatorSettings, predicts: bool, said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=said) as refused:
        sources(draft_source, k, given, predicts=predicts)
    assert refused.value.reason == "CONTRADICTION"


def test_a_given_k_is_the_draft_models_alone_and_no_source_means_no_tokens() -> None:
    for draft_source, k, draft, lookup in itertools.product(DraftSource, (None, 0, 3), ("none", "127.0.0.1:1"), (0, 1)):
        try:
            got = sources(draft_source, k, settings(draft=draft, lookup=bool(lookup)))
        except InvalidRequestError:
            continue
        assert got.k is None or DRAFT not in got.allowed or got.allowed == (DRAFT,)
        assert bool(got.allowed) == (got.k != 0)


def test_a_target_that_proposes_tokens_is_a_source_without_a_draft_worker() -> None:
    own = settings(draft="none")
    assert DRAFT in available_sources(own, target_drafts=True)
    assert DRAFT not in available_sources(own, target_drafts=False)
