"""The checks that every request to a worker must pass."""

from __future__ import annotations

from collections.abc import Sequence

from specd.errors import InvalidRequestError, about
from specd.model_info import ModelInfo
from specd.sampling import check_token_ids
from specd.setting_types import MAX_NUM_DRAFT_TOKENS

_MAX_NAMESPACE_BYTES = 64


def check_namespace(namespace: bytes) -> None:
    """Check the namespace in the first request of a stream. Raises InvalidRequestError."""
    if len(namespace) > _MAX_NAMESPACE_BYTES:
        raise InvalidRequestError(
            "OUT_OF_RANGE",
            f"namespace has {len(namespace)} bytes: send at most {_MAX_NAMESPACE_BYTES}",
            metadata=about("namespace", len(namespace), _MAX_NAMESPACE_BYTES),
        )


def check_adapter(model: ModelInfo, adapter: str) -> None:
    """Check the adapter in the first request of a stream, "" for none. Raises InvalidRequestError."""
    names = [each.name for each in model.adapters]
    if adapter and adapter not in names:
        raise InvalidRequestError(
            "OUT_OF_RANGE",
            f"adapter is {adapter[:200]!r}: this worker has {', '.join(names) or 'no adapters'} (--adapters)",
            metadata=about("adapter", adapter[:200], ", ".join(names)),
        )


def check_source(model: ModelInfo, source: Sequence[int]) -> None:
    """Check the source in the first request of a stream against the worker's model. Raises InvalidRequestError."""
    if source and not model.has_encoder:
        raise InvalidRequestError(
            "CONTRADICTION", f"source_token_ids is set, but {model.name} has no encoder: leave it out"
        )
    if model.has_encoder and not source:
        raise InvalidRequestError(
            "EMPTY_TOKEN_IDS", f"source_token_ids is empty, but {model.name} has an encoder: send a source"
        )
    check_token_ids("source_token_ids", source, vocabulary_size=model.vocabulary_size, model_name=model.name)


def check_request(
    model: ModelInfo,
    position: int,
    token_ids: Sequence[int],
    *,
    num_draft_tokens: int = 0,
    proposal: Sequence[int] = (),
) -> None:
    """Check the fields of a request to a worker against its model.

    MLX does not check the bounds of an embedding's rows: an id outside the vocabulary reads foreign memory.
    Raises InvalidRequestError, which names the field and the value.
    """
    if not token_ids:
        raise InvalidRequestError("EMPTY_TOKEN_IDS", "token_ids is empty: send at least one token")
    for field, ids in (("token_ids", token_ids), ("proposal", proposal)):
        check_token_ids(field, ids, vocabulary_size=model.vocabulary_size, model_name=model.name)
    check_count("num_draft_tokens", num_draft_tokens)
    check_count("proposal", len(proposal))
    total = position + len(token_ids) + max(num_draft_tokens, len(proposal))
    if total > model.context_length:
        raise InvalidRequestError(
            "CONTEXT_EXCEEDED",
            f"position {position}, {len(token_ids)} token_ids and the draft tokens make {total} tokens, "
            f"but the context of {model.name} has {model.context_length}: send fewer",
            metadata=about("token_ids", total, model.context_length),
        )


def check_count(field: str, count: int) -> None:
    """Check a number of draft tokens. Raises InvalidRequestError."""
    if count > MAX_NUM_DRAFT_TOKENS:
        raise InvalidRequestError(
            "OUT_OF_RANGE",
            f"{field} asks for {count} draft tokens: it must be at most {MAX_NUM_DRAFT_TOKENS}",
            metadata=about(field, count, MAX_NUM_DRAFT_TOKENS),
        )


def check_confidences(min_confidences: Sequence[float]) -> None:
    """Check the confidences at which a proposal ends early. Raises InvalidRequestError."""
    if len(min_confidences) > MAX_NUM_DRAFT_TOKENS:
        raise InvalidRequestError(
            "OUT_OF_RANGE",
            f"min_confidences has {len(min_confidences)} entries: the most is {MAX_NUM_DRAFT_TOKENS}",
            metadata=about("min_confidences", len(min_confidences), MAX_NUM_DRAFT_TOKENS),
        )
    for value in min_confidences:
        if not 0 <= value <= 1:
            raise InvalidRequestError(
                "OUT_OF_RANGE",
                f"min_confidences has {value:g}: it must be in [0, 1]",
                metadata=about("min_confidences", f"{value:g}", "in [0, 1]"),
            )
