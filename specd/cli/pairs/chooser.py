"""Choosing the draft of a target: the remembered choice, the models on this machine, and the trials of new ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from specd.cli.models.places import ModelPlace, State, all_places, directory_here, hub_cache, place_named
from specd.cli.models.summary import ModelSummary, summary_of
from specd.cli.pairs.candidates import Candidate, Candidates, candidates_for
from specd.cli.pairs.choice import DraftChoice, choose
from specd.cli.pairs.listing import listing_of
from specd.cli.pairs.record import PairRecord, record_path
from specd.cli.pairs.trial import tried
from specd.pair_worth import TargetTrial
from specd.settings import DraftWorkerSettings, TargetWorkerSettings, load_settings
from specd.startup_error import StartupError
from specd.worker.model.fingerprint import quick_fingerprint
from specd.worker.model.outline import Outline, outline_of


class DraftChooser:
    """Chooses the draft of one target, among the hub's cache, further directories and what comes with specd."""

    def __init__(self, target: str, directories: Sequence[Path] = (), *, targets: int = 1, heads: bool = True) -> None:
        """Choose for a target, a directory or a repository; `targets` processes hold it.

        Without `heads`, only the head in its own files is a candidate.
        """
        self.target = target
        self._directories, self._targets, self._heads = directories, targets, heads
        self._record = PairRecord()

    def recall(self) -> DraftChoice | None:
        """Return the remembered choice; None without one, or after a change of the models on this machine.

        It loads nothing, and reads no more than samples of the target's weights.
        """
        record = self._record = PairRecord.kept_in(self._path)
        if not record.listing or record.listing != self._listing:
            return None
        return None if self._needs_trial(record, record.fitting) else choose(record.fitting, record)

    def find(self) -> Candidates:
        """Look for candidates. Raises StartupError if the target is not on this machine, or cannot be served."""
        return candidates_for(self._summary, self._places, targets=self._targets, heads=self._heads)

    def choose(
        self,
        candidates: Sequence[Candidate],
        tell: Callable[[str], object] = lambda _: None,
        *,
        always: bool = False,
        again: bool = False,
    ) -> DraftChoice:
        """Return the choice among candidates, after trials of the untried ones, and remember it.

        The target's own head needs no trial without a rival, unless it is `always` wanted. With `again`, all are
        measured again. Raises StartupError if the target cannot be measured.
        """
        record = replace(PairRecord.kept_in(self._path), listing=self._listing, fitting=tuple(candidates))
        if again:
            record = replace(record, target={}, drafts={})
        if always or self._needs_trial(record, candidates):
            record = tried(record, str(self._summary.place.directory), record.missing(candidates), self._threads, tell)
        record.keep(self._path)
        self._record = record
        return choose(candidates, record)

    @property
    def target_trial(self) -> TargetTrial | None:
        """The measurements of the target alone; None before its trial."""
        return self._record.target_trial

    @property
    def is_here(self) -> bool:
        """Whether all of the target's files are on this machine, so that it can be measured without a download."""
        return self._directory is not None and self._summary.state is State.COMPLETE

    def has_tokens_of(self, target: Outline) -> bool:
        """Return whether a model on this machine has the tokens of a target that is still to be downloaded."""
        places = [each for each in self._places if each.directory is not None and each.name != self.target]
        served = [summary for summary in map(summary_of, places) if summary.served and not summary.is_head]
        return bool(target.vocabulary) and any(_vocabulary(each) == target.vocabulary for each in served)

    @staticmethod
    def _needs_trial(record: PairRecord, candidates: Sequence[Candidate]) -> bool:
        return any(not each.is_own_head for each in candidates) and bool(record.missing(candidates))

    @cached_property
    def _threads(self) -> dict[str, int]:
        target, draft = load_settings(TargetWorkerSettings, {}), load_settings(DraftWorkerSettings, {})
        return {"target": target.blas_threads, "draft": draft.blas_threads}

    @cached_property
    def _listing(self) -> str:
        return listing_of(self._directories, self._targets, self._heads)

    @cached_property
    def _places(self) -> list[ModelPlace]:
        return all_places(hub_cache(), self._directories)

    @cached_property
    def _summary(self) -> ModelSummary:
        return summary_of(place_named(self.target, self._places))

    @cached_property
    def _directory(self) -> Path | None:
        """The target's files, if they are on this machine."""
        return directory_here(self.target)

    @cached_property
    def _path(self) -> Path | None:
        try:
            return record_path(quick_fingerprint(self._directory), self._threads) if self._directory else None
        except OSError:  # the files are not complete
            return None


def _vocabulary(summary: ModelSummary) -> Mapping[str, int]:
    try:
        return outline_of(str(summary.place.directory)).vocabulary
    except StartupError:  # its tokenizer is damaged
        return {}
