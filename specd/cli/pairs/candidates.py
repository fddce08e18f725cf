"""The models on this machine that may draft for a target, and the reasons why the others may not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specd.cli.models.places import ModelPlace, printable
from specd.cli.models.summary import ModelSummary, summary_of
from specd.cli.pairs.memory import ModelMemory, PairMemory, in_gigabytes, memory_of
from specd.startup_error import StartupError
from specd.vocabulary import OWN_HEAD
from specd.worker.model.fingerprint import quick_fingerprint
from specd.worker.model.outline import Outline, check_draft, outline_of

# A draft with more than this part of the target's weights is too slow to gain.
_LARGEST_PART = 0.5


@dataclass(frozen=True)
class Candidate:
    """A model that may draft for a target. `key` is its fingerprint, or OWN_HEAD for the target's own head."""

    key: str
    name: str
    directory: str = ""
    weights: int = 0

    @property
    def is_head(self) -> bool:
        """Whether it is the head in the target's own files."""
        return self.key == OWN_HEAD


@dataclass(frozen=True)
class Unfit:
    """A model that cannot draft for a target, or should not, with the reason for people."""

    name: str
    reason: str


@dataclass(frozen=True)
class Candidates:
    """The models that may draft for a target, its own head first and then the smallest first, and the others."""

    fitting: Sequence[Candidate]
    unfit: Sequence[Unfit] = ()


def candidates_for(target: ModelSummary, places: Iterable[ModelPlace], *, targets: int = 1) -> Candidates:
    """Look for the drafts of a target among the models on this machine. Raises StartupError if it cannot be served.

    It reads configs, headers of weights, and the tokenizers of the models that are small enough.
    """
    directory = target.place.directory
    if directory is None or not target.served or target.is_head:
        reason = target.reason or "it is a head: name its model"
        raise StartupError(f"specd cannot serve the target {target.name}: {reason}")
    outline, memory = _outline(target.name, directory), memory_of(target.name, directory)
    found: dict[str, Candidate] = {}
    unfit: list[Unfit] = []
    for place in places:
        if place.directory is None or place.directory.resolve() == directory.resolve():
            continue
        try:
            candidate = _candidate(place, target, outline, memory, targets)
        except StartupError as error:
            unfit.append(Unfit(printable(place.name), str(error)))
        else:
            found.setdefault(candidate.key, candidate)
    heads = [Candidate(OWN_HEAD, f"head of {target.name}")] if target.heads else []
    return Candidates([*heads, *sorted(found.values(), key=lambda each: (each.weights, each.name))], unfit)


def _candidate(
    place: ModelPlace, target: ModelSummary, outline: Outline, memory: ModelMemory, targets: int
) -> Candidate:
    """Return a model as a candidate. Raises StartupError, with the reason why it cannot be one."""
    summary = summary_of(place)
    if not summary.served or place.directory is None:
        raise StartupError(f"specd cannot serve it: {summary.reason}")
    if summary.is_head:
        raise StartupError("it is a head: name it with --draft and --draft-in-target")
    own = memory_of(summary.name, place.directory)
    if own.weights > _LARGEST_PART * memory.weights:
        raise StartupError(
            f"its weights take {in_gigabytes(own.weights)}, and a draft that gains has half of the target's "
            f"{in_gigabytes(memory.weights)} at most"
        )
    _check_tokenizers(outline, _outline(summary.name, place.directory))
    pair = PairMemory.on_this_machine(memory, own, targets)
    if pair.problem:
        raise StartupError(f"it does not fit beside the target: {pair.problem}")
    return Candidate(quick_fingerprint(place.directory), summary.name, str(place.directory), own.weights)


def _outline(name: str, directory: Path) -> Outline:
    return replace(outline_of(str(directory)), name=name)


def _check_tokenizers(target: Outline, draft: Outline) -> None:
    """Raise StartupError unless a model certainly has the target's tokens, the added ones too, with the same ids."""
    check_draft(target, draft, in_target=False)
    if not (target.vocabulary and draft.vocabulary):
        raise StartupError("its tokenizer can be compared only when it is loaded: name it with --draft")
    if target.vocabulary != draft.vocabulary:
        other = next(iter(sorted({*target.vocabulary.items()} ^ {*draft.vocabulary.items()})))
        raise StartupError(f"its tokenizer differs from the target's in the added token {other[0]!r}")
