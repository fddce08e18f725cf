"""What the benchmark makes of its measurements."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.acceptance import METHODS, coupled, estimate, rounds
from specd.bench.comparison import compare
from specd.bench.sample import Round, Sample, count_rejections, summarise
from specd.bench.setup import MLX_LM, SPECD, Setup, setups
from specd.sampling import Acceptance

RANDOM = np.random.default_rng(0)
P, Q = RANDOM.dirichlet([0.3] * 6, 20), RANDOM.dirichlet([0.3] * 6, 20)

COUPLED, REJECTION = Acceptance.COUPLED, Acceptance.REJECTION
ALONE = Setup(SPECD, temperature=1.0)
ROUND = Round(0.004, 0.02, 0.001, 0.002, 0.003, wire_bytes=1500)
SAMPLE = Sample("a", 0, tuple(range(11)), 0.5, 1.0, rounds=(ROUND,) * 5)


def test_each_k_meets_each_way_to_accept_and_lenience_is_for_rejection() -> None:
    labels = [setup.label for setup in setups(1.0, [3, 7], [COUPLED, REJECTION], [0.0, 0.2])]
    assert labels == [
        "specd, target alone",
        *("specd, k = 3", "specd, k = 3, rejection", "specd, k = 3, lenience 0.2"),
        *("specd, k = 7", "specd, k = 7, rejection", "specd, k = 7, lenience 0.2"),
        "mlx-lm, target alone",
        *("mlx-lm, k = 3", "mlx-lm, k = 7"),
    ]


def test_names_are_unique_over_temperatures() -> None:
    names = [setup.name for t in (0.0, 0.7, 1.0) for setup in setups(t, [3, 7], [COUPLED, REJECTION], [0.0, 0.2])]
    assert len(set(names)) == len(names)
    assert Setup(SPECD, 3).name == "specd, k = 3"
    assert Setup(SPECD, 3, 0.7).name == "specd, k = 3, T = 0.7"


@pytest.mark.parametrize(
    ("setup", "expected"),
    [
        (Setup(SPECD, 3), True),
        (Setup(MLX_LM, 3), True),
        (Setup(SPECD, 3, 0.0, REJECTION), True),
        (Setup(SPECD, 3, 0.0, REJECTION, 0.1), False),
        (Setup(SPECD, 3, 1.0), True),
        (Setup(SPECD, 3, 1.0, REJECTION), False),
        (Setup(MLX_LM, 3, 1.0), False),
        (Setup(MLX_LM, 0, 1.0), False),
    ],
)
def test_who_must_give_the_tokens_of_the_target_alone(setup: Setup, expected: bool) -> None:
    assert setup.repeats_target is expected


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ("DDDt DDDt", 0),  # bonus tokens
        ("DDt t DDDt Dt", 3),
        ("DDDt DD", 0),  # the last round is cut, by the end of the text or by an end token
        ("DDDt t", 1),
        ("", 0),
    ],
)
def test_rejections_are_own_tokens_after_fewer_than_k_drafted(rounds: str, expected: int) -> None:
    assert count_rejections([letter == "D" for letter in rounds.replace(" ", "")], 3) == expected


def test_the_target_alone_rejects_nothing() -> None:
    assert count_rejections([False] * 5, 0) == 0


def test_summary_takes_medians_and_counts_tries() -> None:
    sample = replace(SAMPLE, decode_seconds=0.5, proposed_tokens=15, accepted_tokens=6, rejections=4)
    slow = replace(sample, decode_seconds=2.0, accepted_tokens=3, rejections=5)
    result = summarise(Setup(SPECD, 3, 1.0), [sample, sample, slow], [SAMPLE] * 3)

    assert result.tokens_per_second == 20
    assert result.speedup == 2
    assert result.acceptance_rate == pytest.approx(15 / 45)
    assert result.acceptance_per_try == pytest.approx(15 / 28)
    assert result.acceptance_length == 2
    assert result.round_kilobytes == 1.5
    assert result.round_milliseconds["total"] == pytest.approx(30)
    assert result.round_milliseconds["wire_and_coordinator"] == pytest.approx(5)


def test_a_text_of_one_token_has_no_speed() -> None:
    short = replace(SAMPLE, token_ids=(0,), decode_seconds=0.0, rounds=())
    assert summarise(ALONE, [short, SAMPLE], [SAMPLE, SAMPLE]).speedup == 1
    assert summarise(ALONE, [SAMPLE, SAMPLE], [SAMPLE, short]).speedup == 1


def test_a_record_has_the_setup_among_its_fields() -> None:
    record = summarise(Setup(SPECD, 3, 1.0, REJECTION, 0.1), [SAMPLE], [SAMPLE]).as_record()
    assert record["name"] == "specd, k = 3, lenience 0.1, T = 1"
    assert (record["acceptance"], record["lenience"], record["temperature"]) == ("rejection", 0.1, 1.0)
    assert record["acceptance_per_try"] is None


def test_comparison_pairs_the_same_k_and_knows_the_best_without_lenience() -> None:
    per_try = {COUPLED: 64, REJECTION: 67}
    samples = {}
    for setup in setups(1.0, [3, 7], [COUPLED, REJECTION], [0.0, 0.5]):
        accepted = 48 if setup.system == MLX_LM else 80 if setup.lenience else per_try[setup.acceptance]
        speed = (1 + setup.lenience) * (1 + setup.num_draft_tokens / 10)
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
    assert len(compare(results)) == 4


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
