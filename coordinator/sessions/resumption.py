"""Resumption of generations after their streams broke."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from coordinator.sessions.prompt import EncodedPrompt
from specd.errors import CannotResumeError, InvalidRequestError
from specd.model_info import ModelInfo
from specd.sampling import check_token_ids

_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Resumption:
    """A client's part of a generation, or of a lost session; generation.proto explains the fields."""

    token_ids: Sequence[int] = ()
    prompt_fingerprint: str = ""
    session_token_ids: Sequence[int] = ()

    def check(
        self,
        model: ModelInfo,
        prompt: EncodedPrompt,
        *,
        max_tokens: int,
        min_tokens: int,
        end_tokens: frozenset[int],
    ) -> None:
        """Check that the generation of a model, with its adapter, can continue behind the tokens.

        Raises InvalidRequestError, which names field and value, and CannotResumeError for another model or prompt.
        """
        vocabulary_size = model.vocabulary_size
        check_token_ids(
            "resumption.token_ids", self.token_ids, vocabulary_size=vocabulary_size, model_name=model.short_name
        )
        if len(self.token_ids) >= max_tokens:
            raise InvalidRequestError(
                "CONTRADICTION", f"resumption has {len(self.token_ids)} tokens, but max_tokens is {max_tokens}"
            )
        for i, token_id in enumerate(self.token_ids[min_tokens:], min_tokens):
            if token_id in end_tokens:
                raise InvalidRequestError(
                    "CONTRADICTION", f"resumption has the end token {token_id} at {i}: nothing comes after it"
                )
        if self.prompt_fingerprint and self.prompt_fingerprint != prompt_fingerprint(model, prompt):
            raise CannotResumeError(
                f"the generation began with another model than {model.short_name}, or with another prompt than this one"
            )


def prompt_fingerprint(model: ModelInfo, prompt: EncodedPrompt) -> str:
    """Return a hexadecimal digest of the model and of the tokens that it continues."""
    digest = blake2b(f"{model.fingerprint} {model.vocabulary_fingerprint} ".encode(), digest_size=_DIGEST_BYTES)
    for token_ids in (prompt.source, prompt.token_ids):
        digest.update(f"{len(token_ids)} ".encode())
        digest.update(array("I", token_ids).tobytes())
    return digest.hexdigest()
