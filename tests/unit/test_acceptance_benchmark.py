"""The number of proposed tokens that each rule accepts, by formula."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from benchmarks.acceptance import METHODS, coupled, estimate, rounds

if TYPE_CHECKING:
    pass


RANDOM = np.random.default_rng(0)
P, Q = RANDOM.dirichlet([0.3] * 6, 20), RANDOM.dirichlet([0.3] * 6, 20)


def test_coupled_is_the_formula_of_the_paper() -> None:
    expected = [
        [1 / sum(max(p[y] / p[x], q[y] / q[x]) for y in range(6)) for x in range(6)] for p, q in zip(P, Q, strict=True)
    ]
    np.testing.assert_allclose(coupled(P, Q), expected, rtol=1e-9)


def test_coupled_is_what_the_same_noise_gives() -> None:
    noise = RANDOM.gumbel(size=(20000, 1, 6))
    target, draft = (np.argmax(np.log(distributions) + noise, axis=-1) for distributions in (P, Q))
    np.testing.assert_allclose(coupled(P, Q).sum(-1), (target == draft).mean(0), atol=0.015)


def test_a_draft_that_is_the_target_is_always_accepted_unless_they_sample_independently() -> None:
    np.testing.assert_allclose(coupled(P, P), P)
    np.testing.assert_allclose(METHODS["rejection"](P, P), P)
    assert (METHODS["independent"](P, P).sum(-1) < 1).all()


def test_rounds_of_a_text() -> None:
    # Places 1, 4, 7 and 10 begin rounds; the one at 10 could reach past the end.
    assert rounds(np.ones(12), 2) == (3, 6, 6)
    assert rounds(np.zeros(12), 2) == (9, 9, 0)
    # Two tries in a quarter of the rounds that accept the first.
    num_rounds, num_tries, num_accepted = rounds(np.full(5000, 0.25), 2)
    assert num_tries / num_rounds == pytest.approx(1.25)
    assert num_accepted / num_tries == pytest.approx(0.25)
    assert (5000 - 3) / num_rounds == pytest.approx(1 + num_accepted / num_rounds, rel=1e-3)


def test_standard_error_of_a_mean_and_of_a_ratio_that_does_not_vary() -> None:
    values = np.array([1.0, 2.0, 4.0])
    mean, error = estimate(lambda weights: float(weights @ values / weights.sum()), 3)
    assert mean == pytest.approx(7 / 3)
    assert error == pytest.approx(np.std(values, ddof=1) / np.sqrt(3))
    assert estimate(lambda weights: float((weights @ values) / (weights @ (2 * values))), 3) == (0.5, 0)
