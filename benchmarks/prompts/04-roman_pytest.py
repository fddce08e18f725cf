import pytest

from numerals.roman import RomanError, from_roman, to_roman


@pytest.mark.parametrize(
    "number, expected",
    [
        (1, "I"),
        (4, "IV"),
        (9, "IX"),
        (14, "XIV"),
        (40, "XL"),
        (90, "XC"),
        (400, "CD"),
        (1994, "MCMXCIV"),
    ],
)
def test_to_roman(number, expected):
    assert to_roman(number) == expected


@pytest.mark.parametrize("number", [0, -1, 4000])
def test_to_roman_out_of_range(number):
    with pytest.raises(RomanError):
        to_roman(number)


@pytest.mark.parametrize("text", ["", "IIII", "VX", "ABC"])
def test_from_roman_malformed(text):
    with pytest.raises(