"""Distributions on the wire: the same after it, and refused if broken."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_strategies
from numpy.typing import NDArray

from specd.errors import InvalidRequestError
from specd.sampling import (
    TokenDistribution,
)
from specd.worker.sampling.distribution import decode_distributions, encode_distributions
from tests.worker.models import TINY_VOCABULARY_SIZE

tokens = st.integers(0, TINY_VOCABULARY_SIZE - 1)

rows = numpy_strategies.arrays(
    np.float32,
    st.tuples(st.integers(0, 4), st.just(16)),
    elements=st.floats(0, 1, width=32),
    fill=st.just(np.float32(0)),
)


@given(rows, st.sampled_from([0, 3, 7, 8, 15]))
def test_distributions_come_back_as_they_were(rows: NDArray[np.float32], num_kept: int) -> None:
    for row in rows:
        row[num_kept:] = 0
        if not row.any():
            row[0] = 1
    encoded = encode_distributions(rows)
    decoded = decode_distributions(encoded, 16)
    assert decoded.dtype == np.float32
    assert decoded.tobytes() == rows.tobytes()
    for row, distribution in zip(rows, encoded, strict=True):
        num_bytes = len(distribution.token_ids) + len(distribution.probabilities)
        assert num_bytes == min(8 * np.count_nonzero(row), 4 * row.size)


@given(st.lists(tokens, min_size=1, max_size=16, unique=True), st.data())
def test_a_distribution_says_the_same_either_way(token_ids: list[int], data: st.DataObject) -> None:
    values = data.draw(st.lists(st.floats(0, 1, width=32), min_size=len(token_ids), max_size=len(token_ids)))
    dense = np.zeros(16, "<f4")
    dense[token_ids] = values
    sparse = TokenDistribution(np.array(token_ids, "<u4").tobytes(), np.array(values, "<f4").tobytes())
    both = decode_distributions([sparse, TokenDistribution(b"", dense.tobytes())], 16)
    assert (both == dense).all()


def f4(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def u4(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


BROKEN = {
    "nothing": (b"", b""),
    "more than the vocabulary": (b"", f4(*[1 / 17] * 17)),
    "a byte less": (b"", f4(*[1 / 16] * 16)[:-1]),
    "a byte more": (b"", f4(*[1 / 16] * 16) + b"\0"),
    "a byte of an id less": (b"\0\0\0", f4(1)),
    "one for two ids": (u4(1, 2), f4(1)),
    "two for one id": (u4(1), f4(0.5, 0.5)),
    "two for three ids": (u4(1, 2, 3), f4(0.5, 0.5)),
    "none for two ids": (u4(1, 2), b""),
    "none for one id": (u4(1), b""),
    "id after the last": (u4(16), f4(1)),
    "largest id": (u4(3, 2**32 - 1), f4(0.5, 0.5)),
    "id that is negative as an int32": (u4(3, 2**31), f4(0.5, 0.5)),
    "NaN": (u4(3, 4), f4(0.5, float("nan"))),
    "infinite": (u4(3, 4), f4(0.5, float("inf"))),
    "negative": (u4(3, 4), f4(0.5, -0.5)),
    "NaN in all": (b"", f4(*[1 / 16] * 15, float("nan"))),
    "negative in all": (b"", f4(*[1 / 16] * 15, -1)),
}


@pytest.mark.parametrize(("token_ids", "probabilities"), BROKEN.values(), ids=BROKEN)
def test_bytes_that_are_no_distribution_are_refused(token_ids: bytes, probabilities: bytes) -> None:
    good = TokenDistribution(u4(1, 2), f4(0.5, 0.5))
    with pytest.raises(InvalidRequestError, match=r"distributions\[1\]") as error:
        decode_distributions([good, TokenDistribution(token_ids, probabilities)], 16)
    assert error.value.reason == "BROKEN_DISTRIBUTION"


@given(st.lists(st.tuples(st.binary(max_size=80), st.binary(max_size=80)), max_size=3))
def test_any_bytes_are_a_distribution_or_refused(messages: list[tuple[bytes, bytes]]) -> None:
    try:
        decoded = decode_distributions([TokenDistribution(*message) for message in messages], 16)
    except InvalidRequestError:
        return
    assert decoded.shape == (len(messages), 16)
    assert np.isfinite(decoded).all()
    assert (decoded >= 0).all()
