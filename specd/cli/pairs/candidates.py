"""The models on this machine that may draft for a target, and the reasons why the others may not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specd.cli.models.places import ModelPlace, printable
from specd.cli.models.summary import ModelSummary, summary_of
from specd.cli.pairs.memory import ModelMemory, PairMemory, in_gigabytes, memory_of
from specd.startup_error import StartupError
from specd.vocabulary import OWN_HEAD
from specd.worker.model.files import WEIGHTS, read_config
from specd.worker.model.fingerprint import quick_fingerprint
from specd.worker.model.outline import Outline, check_draft, outline_of

# A draft with more than this part of the target's weights is too slow to gain.
_LARGEST_PART = 0.5
# The size of a target's states, in the config of an assistant, of an EAGLE-3 head, and of all others. Configs of
# several parts nest it, and those of vLLM's speculators.
_SIZES = ("backbone_hidden_size", "target_hidden_size", "hidden_size")
_PARTS = ("text_config", "transformer_layer_config")


@dataclass(frozen=True)
class Candidate:
    """A model or a head that may draft for a target.

    `key` is its fingerprint, or OWN_HEAD for the head in the target's own files. Only another one has a `directory`.
    """

    key: str
    name: str
    directory: str = ""
    weights: int = 0
    is_head: bool = False

    @property
    def is_own_head(self) -> bool:
        """Whether it is the head in the target's own files."""
        return self.key == OWN_HEAD


@dataclass(frozen=True)
class Unfit:
    """A model that cannot draft for a target, or should not, with the reason for people."""

    name: str
    reason: str


@dataclass(frozen=True)
class Candidates:
    """The drafts that fit a target: its own head, other heads, then models, the smallest first; and the others."""

    fitting: Sequence[Candidate]
    unfit: Sequence[Unfit] = ()


def candidates_for(
    target: ModelSummary, places: Iterable[ModelPlace], *, targets: int = 1, heads: bool = True
) -> Candidates:
    """Look for the drafts of a target among the models on this machine. Raises StartupError if it cannot be served.

    It reads configs, headers of weights, and the tokenizers of the models that are small enough. Without `heads`, only
    the target's own head is one.
    """
    directory = target.place.directory
    if directory is None or not target.served or target.is_head:
        reason = target.reason or "it is a head: name its model"
        raise StartupError(f"specd cannot serve the target {target.name}: {reason}")
    outline, memory = _outline(target.name, directory), memory_of(target.name, directory)
    size = _size_of_states(read_config(directory))
    found: dict[str, Candidate] = {}
    unfit: list[Unfit] = []
    for place in places:
        if place.directory is None or place.directory.resolve() == directory.resolve():
            continue
        try:
            candidate = _candidate(place, outline, size, memory, targets, heads=heads)
        except StartupError as error:
            unfit.append(Unfit(printable(place.name), str(error)))
        else:
            found.setdefault(candidate.key, candidate)
    own = [Candidate(OWN_HEAD, f"head of {target.name}", is_head=True)] if target.heads else []
    others = sorted(found.values(), key=lambda each: (not each.is_head, each.weights, each.name))
    return Candidates([*own, *others], unfit)


def _candidate(
    place: ModelPlace, outline: Outline, size: int | None, memory: ModelMemory, targets: int, *, heads: bool
) -> Candidate:
    """Return a model or a head as a candidate. Raises StartupError, with the reason why it cannot be one."""
    summary = summary_of(place)
    if not summary.served or place.directory is None:
        raise StartupError(f"specd cannot serve it: {summary.reason}")
    if summary.is_head and not heads:
        raise StartupError("it is a head, and a head does not draft beside adapters")
    own = memory_of(summary.name, place.directory)
    if own.weights > _LARGEST_PART * memory.weights:
        raise StartupError(
            f"its weights take {in_gigabytes(own.weights)}, and a draft that gains has half of the target's "
            f"{in_gigabytes(memory.weights)} at most"
        )
    if summary.is_head:
        own_size = _size_of_states(read_config(place.directory))
        if size is not None and own_size is not None and size != own_size:
            raise StartupError(f"it is a head for states of size {own_size}, and the target's have size {size}")
    else:
        _check_tokenizers(outline, _outline(summary.name, place.directory))
    pair = PairMemory.on_this_machine(memory, own, targets)
    if pair.problem:
        raise StartupError(f"it does not fit beside the target: {pair.problem}")
    key = quick_fingerprint(place.directory, "*.safetensors" if summary.is_head else WEIGHTS)
    return Candidate(key, summary.name, str(place.directory), own.weights, summary.is_head)


def _size_of_states(config: Mapping[str, Any]) -> int | None:
    """Return the size of a model's hidden states, or of the states that a head reads; None if its config has no size.

    Whether a head of the right size was trained for the target, its trial shows.
    """
    parts = (config, *(config.get(name) or {} for name in _PARTS))
    sizes = (part.get(name) for name in _SIZES for part in parts if isinstance(part, Mapping))
    return next((size for size in sizes if type(size) is int), None)


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
