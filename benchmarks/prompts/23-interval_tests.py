"""Tests for the Interval and IntervalSet classes."""

import math

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from intervals import Interval, IntervalSet, hull, merge


@pytest.fixture
def unit():
    """The closed interval from zero to one."""
    return Interval(0.0, 1.0)


@pytest.fixture
def gaps():
    """A set of three intervals with gaps in between."""
    return IntervalSet([Interval(0, 1), Interval(2, 4), Interval(7, 8)])


class TestConstruction:
    def test_bounds(self, unit):
        assert unit.low == 0.0
        assert unit.high == 1.0

    def test_single_point(self):
        point = Interval(3, 3)
        assert point.length == 0
        assert not point.is_empty()

    def test_reversed_bounds(self):
        with pytest.raises(ValueError, match="low must not exceed high"):
            Interval(2, 1)

    @pytest.mark.parametrize("low, high", [(math.nan, 1), (0, math.nan)])
    def test_nan(self, low, high):
        with pytest.raises(ValueError, match="nan"):
            Interval(low, high)

    @pytest.mark.parametrize(
        "text, low, high",
        [
            ("[0, 1]", 0, 1),
            ("[-2, 5]", -2, 5),
            ("[0.5, 2.5]", 0.5, 2.5),
            (" [ 1 , 2 ] ", 1, 2),
            ("[-inf, inf]", -math.inf, math.inf),
        ],
    )
    def test_from_string(self, text, low, high):
        interval = Interval.from_string(text)
        assert interval.low == low
        assert interval.high == high

    @pytest.mark.parametrize("text", ["", "[", "[1]", "[1, 2", "1, 2", "[a, b]"])
    def test_from_string_malformed(self, text):
        with pytest.raises(ValueError):
            Interval.from_string(text)

    def test_repr(self, unit):
        assert repr(unit) == "Interval(0.0, 1.0)"

    def test_hash(self, unit):
        assert hash(unit) == hash(Interval(0.0, 1.0))
        assert len({unit, Interval(0.0, 1.0)}) == 1


class TestPredicates:
    @pytest.mark.parametrize("value", [0.0, 0.25, 0.5, 1.0])
    def test_contains(self, unit, value):
        assert value in unit

    @pytest.mark.parametrize("value", [-0.1, 1.1, math.inf])
    def test_does_not_contain(self, unit, value):
        assert value not in unit

    @pytest.mark.parametrize(
        "a, b, expected",
        [
            (Interval(0, 2), Interval(1, 3), True),
            (Interval(0, 2), Interval(2, 3), True),
            (Interval(0, 2), Interval(3, 4), False),
            (Interval(0, 9), Interval(3, 4), True),
            (Interval(3, 4), Interval(0, 9), True),
        ],
    )
    def test_overlaps(self, a, b, expected):
        assert a.overlaps(b) is expected
        assert b.overlaps(a) is expected

    @pytest.mark.parametrize(
        "a, b, expected",
        [
            (Interval(0, 2), Interval(1, 3), False),
            (Interval(0, 2), Interval(0, 2), True),
            (Interval(0, 2), Interval(0, 1), True),
            (Interval(0, 1), Interval(0, 2), False),
        ],
    )
    def test_covers(self, a, b, expected):
        assert a.covers(b) is expected


class TestArithmetic:
    def test_add(self):
        assert Interval(1, 2) + Interval(3, 5) == Interval(4, 7)

    def test_add_number(self, unit):
        assert unit + 2 == Interval(2, 3)
        assert 2 + unit == Interval(2, 3)

    def test_subtract(self):
        assert Interval(1, 2) - Interval(3, 5) == Interval(-4, -1)

    def test_subtract_number(self, unit):
        assert unit - 2 == Interval(-2, -1)
        assert 2 - unit == Interval(1, 2)

    def test_multiply(self):
        assert Interval(1, 2) * Interval(3, 5) == Interval(3, 10)
        assert Interval(-1, 2) * Interval(3, 5) == Interval(-5, 10)
        assert Interval(-2, -1) * Interval(-5, -3) == Interval(3, 10)

    def test_multiply_number(self, unit):
        assert unit * 3 == Interval(0, 3)
        assert unit * -3 == Interval(-3, 0)

    def test_divide(self):
        assert Interval(1, 2) / Interval(4, 8) == Interval(0.125, 0.5)

    def test_divide_by_zero(self, unit):
        with pytest.raises(ZeroDivisionError):
            unit / Interval(-1, 1)

    def test_negate(self):
        assert -Interval(1, 2) == Interval(-2, -1)

    def test_abs(self):
        assert abs(Interval(1, 2)) == Interval(1, 2)
        assert abs(Interval(-2, -1)) == Interval(1, 2)
        assert abs(Interval(-2, 1)) == Interval(0, 2)


class TestSampling:
    @pytest.mark.parametrize("count", [2, 3, 10])
    def test_linspace(self, unit, count):
        points = unit.linspace(count)
        assert points.shape == (count,)
        assert_allclose(points, np.linspace(0.0, 1.0, count))

    def test_clip(self, unit):
        values = np.array([-1.0, 0.0, 0.5, 1.0, 2.0])
        expected = np.array([0.0, 0.0, 0.5, 1.0, 1.0])
        assert_array_equal(unit.clip(values), expected)


class TestIntervalSet:
    def test_length(self, gaps):
        assert len(gaps) == 3
        assert gaps.total_length() == 4

    def test_contains(self, gaps):
        assert 0.5 in gaps
        assert 3 in gaps
        assert 5 not in gaps

    def test_union(self, gaps):
        other = IntervalSet([Interval(1, 2), Interval(9, 10)])
        expected = IntervalSet([Interval(0, 4), Interval(7, 8), Interval(9, 10)])
        assert gaps | other == expected

    def test_intersection(self, gaps):
        other = IntervalSet([Interval(0.5, 3)])
        expected = IntervalSet([Interval(0.5, 1), Interval(2, 3)])
        assert gaps & other ==