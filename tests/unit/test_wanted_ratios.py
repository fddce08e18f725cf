"""The ratios of `benchmarks/accelerator.py`: which there are, and which are marked."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.wanted_ratios import print_ratios, ratios, raw_curve

RAW = {"growing": {"1": {"median_ms": 10.0}, "4": {"median_ms": 70.0}}, "one length": {"4": {"median_ms": 12.0}}}


def row(speedup: float) -> dict[str, Any]:
    return {"speculates": True, "speedup": speedup, "of_raw_limit": 0.9}


def test_a_raw_pass_is_the_faster_of_those_at_one_length_and_at_growing_ones() -> None:
    """mlx-lm plans each new length on some devices, so a verify must not be compared with that alone."""
    assert raw_curve({"raw": RAW | {"seconds": 3.0}}) == {1: 10.0, 4: 12.0}


def test_parts_that_failed_or_were_left_out_have_no_ratios() -> None:
    assert list(ratios({})) == []
    assert list(ratios({"raw": RAW, "verify": {"error": "stopped after 1 s", "seconds": 1.0}})) == []
    replay = {"0.8": {"target alone": {"speculates": False, "speedup": 1.0}, "k = 3": row(2.0)}, "seconds": 1.0}
    assert [what for what, _, _ in ratios({"replay": replay})] == [
        "4. replay 0.8, best / target only",
        "4. replay 0.8, best / limit",
    ]


def test_a_missed_ratio_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    verify = {"4": {"compute_ms": 18.0, "longest_ms": 20.0}}
    print_ratios({"raw": RAW, "verify": verify, "real-draft": {"adaptive": row(0.96)}})
    by_raw, longest, adaptive = capsys.readouterr().out.splitlines()
    assert by_raw.split()[-4:] == ["1.50", "<=", "1.25", "MISSED"]
    assert longest.split()[-3:] == ["1.11", "<=", "2"]
    assert adaptive.endswith("MISSED")
