"""Check 16: stop strings that nearly match cost time in proportion to the text, and end it where they match."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from specd.text.stop_strings import StopStrings

NEARLY = [f"{'a' * length}b" for length in range(192, 256)]  # as many and as long as may be
TEXTS = {"held": "a", "released": "a" * 255 + "c", "alternating": "ac"}


def cost(text: str, num_characters: int) -> int:
    """Count the function calls of a text that comes a character at a time."""
    num_calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in {"call", "c_call"}

    stop = StopStrings(NEARLY)
    pieces = [text[i % len(text)] for i in range(num_characters)]
    sys.setprofile(count)
    try:
        for piece in pieces:
            stop.push(piece)
    finally:
        sys.setprofile(None)
    assert stop.matched is None
    return num_calls


@pytest.mark.parametrize("kind", TEXTS)
def test_the_cost_grows_with_the_text_and_no_faster(kind: str) -> None:
    short, long = cost(TEXTS[kind], 1024), cost(TEXTS[kind], 8 * 1024)
    assert long < 1.3 * 8 * short
    assert long < 8 * 1024 * 400  # a few for each character and string


def test_a_near_match_hides_no_match() -> None:
    stop = StopStrings(NEARLY)
    shown = "".join(stop.push(piece) for piece in "x" + "a" * 300)
    assert stop.matched is None
    shown += stop.push("b")
    assert stop.matched == NEARLY[-1]
    assert shown == "x" + "a" * 45
