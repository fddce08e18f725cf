"""The start and end tokens of an answer, from a model's configs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeGuard

import structlog

from specd.worker.model.files import read_object

log = structlog.get_logger()


def end_tokens(token_ids: Iterable[Any], vocabulary_size: int) -> tuple[int, ...]:
    """Return the end tokens that are in the vocabulary: no others can be chosen or masked."""
    found = list(token_ids)
    tokens = [token for token in found if _is_token(token, vocabulary_size)]
    if len(tokens) < len(found):
        log.warning(
            "ignoring end tokens that are not in the model's vocabulary",
            left_out=[repr(token) for token in found if not _is_token(token, vocabulary_size)],
            vocabulary_size=vocabulary_size,
        )
    return tuple(sorted(tokens))


def start_token(directory: Path, config: dict[str, Any], vocabulary_size: int) -> int:
    """Return the first token of an encoder-decoder's answer, from generation_config.json or config.json."""
    path = directory / "generation_config.json"
    own = read_object(path) if path.is_file() else {}
    known = (own.get("decoder_start_token_id"), config.get("decoder_start_token_id"), config.get("pad_token_id"))
    if left_out := [repr(token) for token in known if token is not None and not _is_token(token, vocabulary_size)]:
        log.warning("ignoring start tokens that are not in the model's vocabulary", left_out=left_out)
    return next((token for token in known if _is_token(token, vocabulary_size)), 0)


def _is_token(value: Any, vocabulary_size: int) -> TypeGuard[int]:
    """Return whether a value in a config is the id of a token."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocabulary_size
