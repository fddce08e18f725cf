"""The plot of the benchmark."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specd.bench.plot import draw, save_plot
from specd.bench.sample import summarise
from specd.bench.setup import SPECD, setups
from tests.unit.test_bench_summary import COUPLED, REJECTION, SAMPLE

PLOTTED = [
    summarise(
        setup,
        [
            replace(
                SAMPLE,
                decode_seconds=1 / (1 + (4 if setup.is_adaptive else setup.num_draft_tokens or 0) / 10),
                proposed_tokens=10 if setup.speculates and setup.system == SPECD else 0,
                accepted_tokens=5 if setup.is_adaptive else 8 - (setup.num_draft_tokens or 0),
            )
        ],
        [SAMPLE],
    )
    for temperature in (0.0, 0.7)
    for setup in setups(temperature, [3, 7], [COUPLED], [0.0], adaptive=True)
]


def test_plot_is_a_png_of_a_plausible_size(tmp_path: Path) -> None:
    for name, results in (("both.png", PLOTTED), ("greedy.png", PLOTTED[: len(PLOTTED) // 2])):
        save_plot(results, "a title", tmp_path / name)
    sizes = {}
    for file in tmp_path.iterdir():
        data = file.read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        assert data[12:16] == b"IHDR"
        assert 20_000 < len(data) < 1_000_000  # an empty white image has 10 kB
        sizes[file.name] = struct.unpack(">II", data[16:24])
    assert sizes == {"both.png": (1650, 1260), "greedy.png": (1650, 630)}


def test_plot_has_a_row_for_each_temperature_and_says_what_is_drawn() -> None:
    axes = draw(PLOTTED, "a title").axes
    assert [panel.get_title() for panel in axes] == [
        "speed-up, greedy",
        "acceptance rate, greedy",
        "speed-up, temperature 0.7",
        "acceptance rate, temperature 0.7",
    ]
    assert all("k, draft tokens a round" in panel.get_xlabel() for panel in axes)
    assert ["%" in panel.get_ylabel() for panel in axes] == [False, True] * 2


@pytest.mark.parametrize("row", [0, 1])
def test_plot_draws_each_k_and_adaptive_as_a_horizontal_line(row: int) -> None:
    speedup, acceptance = (
        {str(line.get_label()): np.array(line.get_data()).T for line in panel.get_lines()}
        for panel in draw(PLOTTED, "").axes[2 * row : 2 * row + 2]
    )
    assert set(speedup) == {"specd", "specd, adaptive", "mlx-lm"}
    np.testing.assert_allclose(speedup["specd"], [[0.0, 1.0], [3.0, 1.3], [7.0, 1.7]])
    np.testing.assert_allclose(speedup["mlx-lm"], [[0.0, 1.0], [3.0, 1.3], [7.0, 1.7]])
    np.testing.assert_allclose(speedup["specd, adaptive"], [[0, 1.4], [1, 1.4]])  # from one edge to the other

    assert set(acceptance) == {"specd", "specd, adaptive"}
    np.testing.assert_allclose(acceptance["specd"], [[3, 50], [7, 10]])
    np.testing.assert_allclose(acceptance["specd, adaptive"], [[0, 50], [1, 50]])


def test_each_way_to_accept_has_a_line_of_its_own() -> None:
    contenders = setups(1.0, [3], [COUPLED, REJECTION], [0.0, 0.2], adaptive=True)
    panel = draw([summarise(setup, [SAMPLE], [SAMPLE]) for setup in contenders], "").axes[0]
    assert [line.get_label() for line in panel.get_lines()] == [
        *("specd", "specd, adaptive", "specd, rejection", "specd, adaptive, rejection"),
        *("specd, lenience 0.2", "specd, adaptive, lenience 0.2", "mlx-lm"),
    ]
