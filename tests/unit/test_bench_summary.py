"""The measurements of the benchmark, and their summaries."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from specd.bench.sample import RoundTimes, Sample, count_rejections, summarise
from specd.bench.setup import MLX_LM, SPECD, Setup, setups
from specd.sampling import Acceptance

if TYPE_CHECKING:
    pass

COUPLED, REJECTION = Acceptance.COUPLED, Acceptance.REJECTION
ALONE = Setup(SPECD, temperature=1.0)
ROUND = RoundTimes(0.004, 0.02, 0.001, 0.002, 0.003, wire_bytes=1500)
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


def test_adaptive_comes_after_every_fixed_k_and_mlx_lm_has_none() -> None:
    contenders = list(setups(1.0, [3, 7], [COUPLED, REJECTION], [0.0, 0.2], adaptive=True))
    fixed = list(setups(1.0, [3, 7], [COUPLED, REJECTION], [0.0, 0.2]))
    added = [setup for setup in contenders if setup not in fixed]
    assert [setup.label for setup in contenders][7:10] == [setup.label for setup in added]
    assert [setup.label for setup in added] == [
        "specd, adaptive",
        "specd, adaptive, rejection",
        "specd, adaptive, lenience 0.2",
    ]
    assert all(setup.system == SPECD and setup.num_draft_tokens is None and setup.speculates for setup in added)
    assert [setup for setup in contenders if setup not in added] == fixed


def test_names_are_unique_over_temperatures() -> None:
    names = [
        setup.name
        for t in (0.0, 0.7, 1.0)
        for setup in setups(t, [3, 7], [COUPLED, REJECTION], [0.0, 0.2], adaptive=True)
    ]
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
        (Setup(SPECD, None), True),
        (Setup(SPECD, None, 1.0), True),
        (Setup(SPECD, None, 1.0, REJECTION), False),
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


def test_limit_is_the_speed_if_only_verifying_took_time() -> None:
    # 10 tokens after the first in 5 rounds, which verify for 0.02 s each, and 1 s in all.
    result = summarise(Setup(SPECD, 3), [SAMPLE], [SAMPLE])
    assert result.limit_tokens_per_second == pytest.approx(10 / (5 * 0.02))
    assert result.of_limit == pytest.approx(0.1)


def test_limit_takes_medians_over_samples_of_itself_and_of_the_ratio() -> None:
    slow, quick = replace(ROUND, verify_seconds=0.1), replace(ROUND, verify_seconds=0.01)
    samples = [
        replace(SAMPLE, decode_seconds=0.2, rounds=(slow, quick)),
        replace(SAMPLE, decode_seconds=0.4, rounds=(slow, slow)),
        replace(SAMPLE, decode_seconds=0.5, rounds=(quick, quick)),
    ]
    result = summarise(Setup(SPECD, None), samples, [SAMPLE] * 3)
    assert result.limit_tokens_per_second == pytest.approx(10 / 0.11)
    assert result.of_limit == pytest.approx(0.5)  # of 0.11 / 0.2, 0.2 / 0.4 and 0.02 / 0.5


def test_only_speculation_whose_rounds_are_known_has_a_limit() -> None:
    alone = summarise(Setup(SPECD, 0), [SAMPLE], [SAMPLE])
    of_mlx_lm = summarise(Setup(MLX_LM, 3), [replace(SAMPLE, rounds=())], [SAMPLE])
    for result in (alone, of_mlx_lm):
        assert (result.limit_tokens_per_second, result.of_limit) == (None, None)


def test_a_text_of_one_token_does_not_count_for_the_limit() -> None:
    short = replace(SAMPLE, token_ids=(0,), decode_seconds=0.0, rounds=())
    result = summarise(Setup(SPECD, 3), [short, short, SAMPLE], [SAMPLE] * 3)
    assert result.limit_tokens_per_second == pytest.approx(100)


def test_records_hold_what_the_medians_are_made_of() -> None:
    records: list[dict[str, Any]] = [
        replace(SAMPLE, decode_seconds=seconds).as_record() for seconds in (0.25, 0.5, 2.0)
    ]
    result = summarise(
        Setup(SPECD, 3), [replace(SAMPLE, decode_seconds=seconds) for seconds in (0.25, 0.5, 2.0)], [SAMPLE] * 3
    )
    speeds = [(record["token_ids"] - 1) / record["decode_seconds"] for record in records]
    limits = [(record["token_ids"] - 1) / record["verify_seconds"] for record in records]
    assert median(speeds) == pytest.approx(result.tokens_per_second)
    assert median(limits) == pytest.approx(result.limit_tokens_per_second)
    assert median(np.divide(speeds, limits)) == pytest.approx(result.of_limit)
    assert [record["rounds"] for record in records] == [5, 5, 5]


def test_a_text_of_one_token_has_no_speed() -> None:
    short = replace(SAMPLE, token_ids=(0,), decode_seconds=0.0, rounds=())
    assert summarise(ALONE, [short, SAMPLE], [SAMPLE, SAMPLE]).speedup == 1
    assert summarise(ALONE, [SAMPLE, SAMPLE], [SAMPLE, short]).speedup == 1


def test_a_record_has_the_setup_among_its_fields() -> None:
    record = summarise(Setup(SPECD, 3, 1.0, REJECTION, 0.1), [SAMPLE], [SAMPLE]).as_record()
    assert record["name"] == "specd, k = 3, lenience 0.1, T = 1"
    assert (record["acceptance"], record["lenience"], record["temperature"]) == ("rejection", 0.1, 1.0)
    assert record["acceptance_per_try"] is None


def test_an_adaptive_record_has_no_number_of_draft_tokens() -> None:
    record = summarise(Setup(SPECD, None), [SAMPLE], [SAMPLE]).as_record()
    assert (record["name"], record["num_draft_tokens"]) == ("specd, adaptive", None)
