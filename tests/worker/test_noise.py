"""Noise: the same for a seed, a position and a purpose, and of the right distribution."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from specd.worker.sampling.noise import Noise, Purpose

seeds = st.integers(0, 2**64 - 1)


@settings(max_examples=50)
@given(seeds, st.integers(0, 2**40), st.integers(1, 20), st.data())
def test_the_noise_of_a_position_does_not_depend_on_the_block_it_is_drawn_in(
    seed: int, position: int, count: int, data: st.DataObject
) -> None:
    skipped = data.draw(st.integers(0, count - 1))
    for purpose in Purpose:
        block = np.array(Noise(seed, 13).gumbel(purpose, position, count))
        part = np.array(Noise(seed, 13).gumbel(purpose, position + skipped, 1))
        assert block.dtype == np.float32
        assert block[skipped].tobytes() == part.tobytes()
        uniforms = np.array(Noise(seed, 13).uniform(purpose, position, count))
        assert uniforms[skipped] == np.array(Noise(seed, 13).uniform(purpose, position + skipped, 1))


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.sampled_from(Purpose), st.integers(0, 12), st.integers(1, 8), st.booleans()),
        min_size=1,
        max_size=8,
    )
)
def test_the_noise_of_a_position_does_not_depend_on_what_was_drawn_before(
    draws: list[tuple[Purpose, int, int, bool]],
) -> None:
    noise = Noise(5, 13)
    for purpose, position, count, only_prepare in draws:
        if only_prepare:
            noise.prepare(purpose, position, count)
            continue
        drawn, fresh = (np.array(source.gumbel(purpose, position, count)) for source in (noise, Noise(5, 13)))
        assert drawn.shape == (count, 13)
        assert drawn.tobytes() == fresh.tobytes()


def test_draws_for_different_things_are_uncorrelated() -> None:
    size, count = 16, 20_000
    first = Noise(1, size)
    draws = {
        "reference": first.gumbel(Purpose.SAMPLE, 0, count),
        "next positions": first.gumbel(Purpose.SAMPLE, 1, count),
        "far positions": first.gumbel(Purpose.SAMPLE, 2**32, count),
        "for a proposal": first.gumbel(Purpose.PROPOSE, 0, count),
        "for acceptance": first.gumbel(Purpose.ACCEPT, 0, count),
        "next seed": Noise(2, size).gumbel(Purpose.SAMPLE, 0, count),
        "far seed": Noise(1 + 2**32, size).gumbel(Purpose.SAMPLE, 0, count),
        "further seed": Noise(1 + 2**63, size).gumbel(Purpose.SAMPLE, 0, count),
    }
    columns = {name: np.array(values) for name, values in draws.items()}
    columns["next tokens"] = np.roll(columns["reference"], 1, axis=1)
    flat = np.array([values.ravel() for values in columns.values()])
    correlations = np.corrcoef(flat) - np.eye(len(flat))
    assert np.abs(correlations).max() < 5 / np.sqrt(flat.shape[1]), list(columns)
    uniforms = np.array([np.array(first.uniform(purpose, 0, count)) for purpose in Purpose])
    # A draw for acceptance is also independent of the tokens about which it decides.
    both = np.vstack([uniforms, columns["reference"].T, columns["for a proposal"].T])
    assert np.abs(np.corrcoef(both) - np.eye(len(both))).max() < 5.5 / np.sqrt(count)


def test_draws_have_their_distributions() -> None:
    noise = Noise(3, 16)
    for purpose in Purpose:
        gumbel = np.array(noise.gumbel(purpose, 0, 20_000), np.float64)
        assert stats.kstest(gumbel.ravel(), stats.gumbel_r.cdf).pvalue > 1e-6
        # Each position has its own value, and each token.
        assert stats.kstest(gumbel.max(axis=1) - np.log(16), stats.gumbel_r.cdf).pvalue > 1e-6
        uniform = np.array(noise.uniform(purpose, 0, 20_000), np.float64)
        assert 0 <= uniform.min() <= uniform.max() < 1
        assert stats.kstest(uniform, stats.uniform.cdf).pvalue > 1e-6


def test_unlikely_tokens_have_their_chance() -> None:
    """Large noise is as fine as small: it lets even tokens of probability 2^-32 win."""
    noise = np.array(Noise(0, 2**20).gumbel(Purpose.SAMPLE, 0, 8), np.float64).ravel()
    uniform = -np.expm1(-np.exp(-noise[noise > 9]))  # P(noise > 9) is 1.2e-4
    assert stats.kstest(uniform / -np.expm1(-np.exp(-9)), stats.uniform.cdf).pvalue > 1e-6
    steps = uniform * 2**24
    assert np.mean(np.abs(steps - np.round(steps)) < 0.05) < 0.2, "these come in steps of 2^-24"


def test_noise_is_finite_whatever_the_generator_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    extremes = np.array([0, 2**-32, 2**-24, 0.5, 1 - 2**-24, 1], np.float32)

    def uniform(shape: Sequence[int], key: mx.array) -> mx.array:
        return mx.array(extremes) + 0 * key[0].astype(mx.float32)

    monkeypatch.setattr(mx.random, "uniform", uniform)
    noise = np.array(Noise(0, extremes.size).gumbel(Purpose.SAMPLE, 0, 1))[0]
    assert np.isfinite(noise).all()
    assert (np.diff(noise[:-1]) < 0).all()
    assert noise[0] == pytest.approx(33 * np.log(2), rel=1e-6)
    assert noise[-1] == pytest.approx(-np.log(24 * np.log(2)), rel=1e-5)


def test_the_noise_is_what_it_has_always_been() -> None:
    """A session can be repeated later and elsewhere only as long as the bits stay: this fails when they change.

    Then either MLX draws other bits for a key, or the key is made in another way. The logarithms may differ in the
    last place from machine to machine.
    """
    noise = Noise(42, 16)
    assert noise.uniform(Purpose.ACCEPT, 7, 4).tolist() == GOLDEN_UNIFORM
    np.testing.assert_allclose(np.array(noise.gumbel(Purpose.SAMPLE, 7, 1))[0], GOLDEN_GUMBEL, atol=2e-6)


GOLDEN_UNIFORM = [0.5088357925415039, 0.9106941223144531, 0.7890845537185669, 0.9153603911399841]
GOLDEN_GUMBEL = [
    *(0.080295, 1.738588, -1.163581, 0.578288, 1.439733, 0.091156, 0.422476, 0.420597),
    *(1.186819, -0.096245, 0.166623, -1.313748, 0.904714, 0.634444, 0.282299, -0.392713),
]
