"""Description of a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import PurePath
from typing import Protocol

# The largest tokenizer.json files have 35 MB.
MAX_TOKENIZER_BYTES = 128 * 2**20


@dataclass(frozen=True)
class AdapterInfo:
    """An adapter of a model: its name, and a digest of its config and all its weights."""

    name: str
    fingerprint: str


@dataclass(frozen=True)
class ModelInfo:
    """Description of a worker's model; the fields are those of the message `Model` in model.proto."""

    name: str
    architecture: str
    fingerprint: str
    vocabulary_fingerprint: str
    vocabulary_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    precision: str
    device: str
    decoder_start_token_id: int | None = None
    trained_source_length: int = 0
    whole_fingerprint: str = ""
    adapters: tuple[AdapterInfo, ...] = ()
    parent: str = ""

    @property
    def public_name(self) -> str:
        """The name by which clients know the model."""
        return public_name_of(self.name)

    @property
    def short_name(self) -> str:
        """The name in errors, without directories, which clients should not learn."""
        return short_name_of(self.name)

    @property
    def has_encoder(self) -> bool:
        """Whether sessions have a source, which the model answers, in addition to their tokens."""
        return self.decoder_start_token_id is not None

    def decodes_like(self, other: ModelInfo) -> bool:
        """Return whether a session can probably continue on the other model.

        Both must have the same config, samples of the weights, tokenizer and end tokens, and the same adapters. Only
        `whole_fingerprint`, which takes longer, is certain of the weights.
        """
        return self._decoding == other._decoding

    @property
    def _decoding(self) -> tuple[object, ...]:
        return self.fingerprint, self.vocabulary_fingerprint, self.eos_token_ids, frozenset(self.adapters)

    def adapter(self, name: str) -> AdapterInfo | None:
        """Return the adapter of this name, None without one."""
        return next((adapter for adapter in self.adapters if adapter.name == name), None)

    def with_adapter(self, adapter: AdapterInfo) -> ModelInfo:
        """Return the description of this model with one of its adapters, by the adapter's name."""
        short, whole = (
            known and sha256(f"{known} {adapter.fingerprint}".encode()).hexdigest()
            for known in (self.fingerprint, self.whole_fingerprint)
        )
        return replace(
            self,
            name=adapter.name,
            fingerprint=short[:32],
            whole_fingerprint=whole,
            adapters=(),
            parent=self.public_name,
        )


def public_name_of(name: str) -> str:
    """Return the name by which clients know a model: the repository's name, or the last part of a directory."""
    path = PurePath(name)
    if repository := _repository_of(path):
        return repository
    is_path = path.is_absolute() or name.startswith((".", "~")) or len(path.parts) > 2
    return path.name if is_path else name


def short_name_of(name: str) -> str:
    """Return the name of a model for people: the last part of its repository or directory."""
    path = PurePath(name)
    return PurePath(_repository_of(path) or path).name


def _repository_of(path: PurePath) -> str:
    """Return the repository of a directory in the cache of the Hugging Face hub; "" for other paths.

    Its last part is a revision: models--OWNER--NAME/snapshots/REVISION.
    """
    repository = path.parent.parent.name
    is_snapshot = path.parent.name == "snapshots" and repository.startswith("models--")
    return repository.removeprefix("models--").replace("--", "/") if is_snapshot else ""


class OfAPair(Protocol):
    """A target or a draft: a ModelInfo, or the outline of a model that is not loaded."""

    @property
    def name(self) -> str:
        """The name for people."""
        ...

    @property
    def has_encoder(self) -> bool:
        """Whether sessions have a source."""
        ...


def encoder_conflict(target: OfAPair, draft: OfAPair) -> str:
    """Return, for people, why a draft cannot propose for a target because only one has an encoder; "" if it can."""
    if target.has_encoder == draft.has_encoder:
        return ""
    has, lacks = (draft, target) if draft.has_encoder else (target, draft)
    return f"{has.name} has an encoder and {lacks.name} is a plain decoder: use a draft of the target's family"


def tokenizer_conflict(target: OfAPair, draft: OfAPair, difference: str) -> str:
    """Return, for people, that a draft and a target have different tokenizers, and a `difference` between them."""
    return (
        f"the draft {draft.name} and the target {target.name} have different tokenizers ({difference}): "
        "use a draft of the target's family"
    )


def pair_conflict(target: ModelInfo, draft: ModelInfo) -> str:
    """Return, for people, why a loaded draft cannot propose for a loaded target; "" if it can."""
    if conflict := encoder_conflict(target, draft):
        return conflict
    if target.vocabulary_fingerprint != draft.vocabulary_fingerprint:
        return tokenizer_conflict(target, draft, "their tokens have other ids")
    return ""
