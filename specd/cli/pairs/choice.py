"""The choice among measured drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specd.cli.pairs.candidates import Candidate
from specd.cli.pairs.record import PairRecord
from specd.pair_worth import LEAST_GAIN, Worth, worth_of
from specd.vocabulary import LOOKUP_ALONE, OWN_HEAD


@dataclass(frozen=True)
class RankedDraft:
    """A candidate with its measured worth, None if its trial failed, which `failure` explains."""

    candidate: Candidate
    worth: Worth | None
    failure: str = ""


@dataclass(frozen=True)
class DraftChoice:
    """The candidates, the fastest first, and the one to use: None for look-up alone."""

    ranked: Sequence[RankedDraft]
    chosen: RankedDraft | None

    @property
    def in_words(self) -> str:
        """The choice for people, such as "chosen of 3, 1.8x"."""
        number = len(self.ranked)
        if self.chosen is None:
            return f"none of {number} drafts gains"
        if self.chosen.worth is None:
            return "the only one"
        return f"chosen of {number}, {self.chosen.worth.speedup:.1f}x"

    @property
    def setting(self) -> str:
        """The value of `--draft` that stands for the choice: a directory, OWN_HEAD, or LOOKUP_ALONE."""
        if self.chosen is None:
            return LOOKUP_ALONE
        candidate = self.chosen.candidate
        return candidate.key if candidate.is_own_head else candidate.directory

    @property
    def is_in_target(self) -> bool:
        """Whether only the target worker can compute the draft, because it is a head."""
        return self.chosen is not None and self.chosen.candidate.is_head


def choose(candidates: Sequence[Candidate], record: PairRecord) -> DraftChoice:
    """Return the candidate with the most tokens per second, if it is clearly faster than the target alone.

    The earlier one of two with the same speed is chosen, and the target's own head without any trial, if it has no
    rival.
    """
    if len(candidates) == 1 and candidates[0].is_own_head and OWN_HEAD not in record.drafts:
        head = RankedDraft(candidates[0], None, "it was not measured")
        return DraftChoice([head], head)
    target = record.target_trial
    ranked = []
    for each in candidates:
        trial = record.drafts.get(each.key)
        worth = worth_of(target, trial) if target is not None and trial is not None else None
        failure = trial.failure if trial is not None and trial.failure else "" if worth else "its trial was too short"
        ranked.append(RankedDraft(each, worth, failure))
    ranked.sort(key=_speed, reverse=True)  # stable
    best = ranked[0] if ranked else None
    gains = best is not None and best.worth is not None and best.worth.speedup >= LEAST_GAIN
    return DraftChoice(ranked, best if gains else None)


def _speed(draft: RankedDraft) -> float:
    return draft.worth.tokens_per_second if draft.worth is not None else 0.0
