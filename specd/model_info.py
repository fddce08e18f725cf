"""Description of a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

# The largest ones have 35 MB.
MAX_TOKENIZER_BYTES = 128 * 2**20


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

    @property
    def public_name(self) -> str:
        """The name by which clients know the model: a repository's own, and of a directory its last part."""
        path = PurePath(self.name)
        is_path = path.is_absolute() or self.name.startswith((".", "~")) or len(path.parts) > 2
        return path.name if is_path else self.name

    @property
    def short_name(self) -> str:
        """The name in errors: without the directories, which are no business of clients."""
        return PurePath(self.name).name

    @property
    def has_encoder(self) -> bool:
        """Whether sessions have a source, which the model answers, besides their tokens."""
        return self.decoder_start_token_id is not None

    def decodes_like(self, other: ModelInfo) -> bool:
        """Whether a session can continue on the other model, as far as is known at once.

        That is same config, samples of the weights, tokenizer and end tokens. `whole_fingerprint` tells for sure.
        """
        return (self.fingerprint, self.vocabulary_fingerprint, self.eos_token_ids) == (
            other.fingerprint,
            other.vocabulary_fingerprint,
            other.eos_token_ids,
        )
