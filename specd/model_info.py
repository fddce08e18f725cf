"""What is known of a model without loading it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelInfo:
    """What a worker says about its model; the fields are those of the message `Model` in model.proto."""

    name: str
    architecture: str
    fingerprint: str
    vocabulary_fingerprint: str
    vocabulary_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    precision: str
    device: str

    def decodes_like(self, other: ModelInfo) -> bool:
        """Whether the sessions of one can go on with the other: same weights, same tokenizer, same end tokens."""
        return (self.fingerprint, self.vocabulary_fingerprint, self.eos_token_ids) == (
            other.fingerprint,
            other.vocabulary_fingerprint,
            other.eos_token_ids,
        )
