"""Distributions over the vocabulary, as messages and as arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specd.errors import InvalidRequestError
from specd.sampling import TokenDistribution

Rows = NDArray[np.float32]

_SUM_TOLERANCE = 1e-3  # far more than the rounding of a sum of 150,000 float32


def encode_distributions(rows: Rows) -> list[TokenDistribution]:
    """Serialise distributions [n, vocabulary_size], with only their nonzero entries where that is shorter."""
    encoded = []
    for row in rows:
        token_ids = np.flatnonzero(row)
        if 2 * token_ids.size < row.size:
            probabilities = row[token_ids].astype("<f4").tobytes()
            encoded.append(TokenDistribution(token_ids.astype("<u4").tobytes(), probabilities))
        else:
            encoded.append(TokenDistribution(b"", row.astype("<f4").tobytes()))
    return encoded


def decode_distributions(distributions: Sequence[TokenDistribution], vocabulary_size: int) -> Rows:
    """Read distributions into an array [n, vocabulary_size].

    Raises InvalidRequestError for invalid ones. `check_samples` checks that they sum to 1.
    """
    rows = np.zeros((len(distributions), vocabulary_size), np.float32)
    for i, distribution in enumerate(distributions):
        try:
            probabilities = np.frombuffer(distribution.probabilities, "<f4")
            # A draft can have fewer rows than its target has tokens.
            dense = np.arange(probabilities.size)
            token_ids = np.frombuffer(distribution.token_ids, "<u4") if distribution.token_ids else dense
            if token_ids.size != probabilities.size or not token_ids.size:
                raise ValueError(f"it has {token_ids.size} tokens and {probabilities.size} probabilities")
            rows[i, token_ids] = probabilities
        except (ValueError, IndexError) as error:
            raise InvalidRequestError(
                "BROKEN_DISTRIBUTION",
                f"distributions[{i}] does not fit a vocabulary of {vocabulary_size} tokens: {error}",
            ) from error
        if not (np.isfinite(probabilities).all() and (probabilities >= 0).all()):
            raise InvalidRequestError(
                "BROKEN_DISTRIBUTION",
                f"distributions[{i}] has probabilities that are negative, NaN or infinite: they must be in [0, 1]",
            )
    return rows


def check_samples(rows: Rows, token_ids: Sequence[int]) -> None:
    """Raise InvalidRequestError unless each row [vocabulary_size] sums to 1, and its token can be a sample of it.

    Otherwise rejection would accept wrong tokens, because it divides by the probability of the token.
    """
    for i, (row, token_id) in enumerate(zip(rows, token_ids, strict=True)):
        total = float(row.sum(dtype=np.float64))
        if abs(total - 1) > _SUM_TOLERANCE or row[token_id] <= 0:
            raise InvalidRequestError(
                "BROKEN_DISTRIBUTION",
                f"distributions[{i}] sums to {total:.6g} and gives its token {row[token_id]:.6g}: it must sum to 1, "
                "and the token must be a sample of it",
            )
