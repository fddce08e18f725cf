"""The benchmark's ratios of its contenders."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from specd.bench.comparison import compare
from specd.bench.sample import SetupResult, summarise
from specd.bench.setup import MLX_LM, SPECD, Setup, setups

if TYPE_CHECKING:
    pass
from tests.unit.test_bench_summary import COUPLED, REJECTION, SAMPLE


def test_comparison_pairs_the_same_k_and_knows_the_best_without_lenience() -> None:
    per_try = {COUPLED: 64, REJECTION: 67}
    samples = {}
    for setup in setups(1.0, [3, 7], [COUPLED, REJECTION], [0.0, 0.5]):
        accepted = 48 if setup.system == MLX_LM else 80 if setup.lenience else per_try[setup.acceptance]
        speed = (1 + setup.lenience) * (1 + (setup.num_draft_tokens or 0) / 10)
        sample = replace(SAMPLE, decode_seconds=1 / speed, accepted_tokens=accepted, rejections=100 - accepted)
        samples[setup] = sample if setup.num_draft_tokens else SAMPLE
    verdicts = compare([summarise(setup, [sample], [SAMPLE]) for setup, sample in samples.items()])

    assert verdicts["best specd (specd, k = 7) / specd with the target alone"] == pytest.approx(1.7)
    assert verdicts["best specd / best mlx-lm (mlx-lm, k = 7)"] == pytest.approx(1)
    for k in (3, 7):
        assert verdicts[f"COUPLED / REJECTION, accepted per try, k = {k}"] == pytest.approx(64 / 67)
        assert verdicts[f"COUPLED / mlx-lm (independent sampling), accepted per try, k = {k}"] == pytest.approx(64 / 48)
        assert verdicts[f"lenience 0.5 / lenience 0, accepted per try, k = {k}"] == pytest.approx(80 / 67)
        assert verdicts[f"lenience 0.5 / lenience 0, speed-up, k = {k}"] == pytest.approx(1.5)


def test_greedy_comparison_is_of_speed_only() -> None:
    results = [summarise(setup, [SAMPLE], [SAMPLE]) for setup in setups(0.0, [3], [COUPLED], [0.0])]
    assert len(compare(results)) == 5


def results_at(speeds: dict[Setup, float]) -> list[SetupResult]:
    """Results of contenders with these speeds, relative to `SAMPLE`."""
    return [summarise(setup, [replace(SAMPLE, decode_seconds=1 / speed)], [SAMPLE]) for setup, speed in speeds.items()]


SPEEDS = {
    Setup(SPECD, 0): 1.0,
    Setup(SPECD, 3): 2.0,
    Setup(SPECD, 5): 2.5,
    Setup(SPECD, None): 2.0,
    Setup(MLX_LM, 0): 1.25,
    Setup(MLX_LM, 3): 3.2,
}


def test_adaptive_is_put_beside_the_target_alone_mlx_lm_and_the_best_fixed_k() -> None:
    verdicts = compare(results_at(SPEEDS))
    assert verdicts["best specd (specd, k = 5) / specd with the target alone"] == pytest.approx(2.5)
    assert verdicts["specd, adaptive / specd with the target alone"] == pytest.approx(2)
    assert verdicts["specd, adaptive / best mlx-lm (mlx-lm, k = 3)"] == pytest.approx(2 / 3.2)
    assert verdicts["specd, adaptive / best fixed k (specd, k = 5)"] == pytest.approx(0.8)


def test_comparison_says_how_near_the_limit_the_best_and_the_adaptive_one_are() -> None:
    verdicts = compare(results_at(SPEEDS))  # the limit of each is 100 tokens/s, ten times the speed of `SAMPLE`
    assert verdicts["best specd, % of its limit"] == pytest.approx(25)
    assert verdicts["specd, adaptive, % of its limit"] == pytest.approx(20)


def test_adaptive_can_be_the_best() -> None:
    verdicts = compare(results_at(SPEEDS | {Setup(SPECD, None): 2.8}))
    assert verdicts["best specd (specd, adaptive) / specd with the target alone"] == pytest.approx(2.8)
    assert verdicts["best specd / best mlx-lm (mlx-lm, k = 3)"] == pytest.approx(2.8 / 3.2)
    assert verdicts["specd, adaptive / best fixed k (specd, k = 5)"] == pytest.approx(2.8 / 2.5)


def test_without_adaptive_nothing_is_said_of_it() -> None:
    verdicts = compare(results_at({setup: speed for setup, speed in SPEEDS.items() if not setup.is_adaptive}))
    assert verdicts["best specd (specd, k = 5) / specd with the target alone"] == pytest.approx(2.5)
    assert not [name for name in verdicts if "adaptive" in name]


def test_without_a_fixed_k_adaptive_is_put_beside_the_others() -> None:
    verdicts = compare(
        results_at(
            {setup: SPEEDS[setup] for setup in SPEEDS if setup.num_draft_tokens not in (3, 5)} | {Setup(MLX_LM, 3): 3.2}
        )
    )
    assert verdicts["specd, adaptive / best mlx-lm (mlx-lm, k = 3)"] == pytest.approx(2 / 3.2)
    assert not [name for name in verdicts if "best fixed k" in name]


def test_a_lenient_adaptive_one_is_not_the_best_of_the_adaptive_ones() -> None:
    setup = Setup(SPECD, None, 0.0, REJECTION, 0.5)
    verdicts = compare(results_at(SPEEDS | {setup: 9.0}))
    assert verdicts["specd, adaptive / specd with the target alone"] == pytest.approx(2)


def test_adaptive_is_compared_with_adaptive_by_acceptance_and_lenience() -> None:
    accepted = {COUPLED: 60, REJECTION: 75}
    results = []
    for setup in setups(1.0, [3], [COUPLED, REJECTION], [0.0, 0.5], adaptive=True):
        count = 90 if setup.lenience else accepted[setup.acceptance] if setup.is_adaptive else 50
        sample = replace(SAMPLE, accepted_tokens=count, rejections=100 - count)
        results.append(summarise(setup, [sample], [SAMPLE]))
    verdicts = compare(results)
    assert verdicts["COUPLED / REJECTION, accepted per try, adaptive"] == pytest.approx(60 / 75)
    assert verdicts["lenience 0.5 / lenience 0, accepted per try, adaptive"] == pytest.approx(90 / 75)
    assert "COUPLED / mlx-lm (independent sampling), accepted per try, k = 3" in verdicts
    assert "COUPLED / mlx-lm (independent sampling), accepted per try, adaptive" not in verdicts
